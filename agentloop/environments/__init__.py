"""Environments, tasks and rewards: an agent is trained and evaluated on them."""
