"""GSPO (arXiv 2507.18071): GRPO's advantages with one policy ratio for a whole sequence. Pure.

The learner computes the ratio, since it depends on the current policy, and needs all tokens of a
sequence to have the same advantage.
"""

from __future__ import annotations

from agentloop.training.credit.grpo import rollout_advantages
from agentloop.training.credit.rule import CreditRule

RULE = CreditRule(rollout_advantages, aggregate="sequence", objective="gspo")
