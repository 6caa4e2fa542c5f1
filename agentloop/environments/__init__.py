"""Environments: async functions of a task and an agent that return a reward."""

from agentloop.environments.agent import Agent
from agentloop.environments.environment import Environment, environment

__all__ = ["Agent", "Environment", "environment"]
