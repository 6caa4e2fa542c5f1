"""CISPO (arXiv 2506.13585): GRPO's advantages with clipped, detached importance weights. Pure."""

from __future__ import annotations

from agentloop.training.credit.grpo import rollout_advantages
from agentloop.training.credit.rule import CreditRule

RULE = CreditRule(rollout_advantages, objective="cispo")
