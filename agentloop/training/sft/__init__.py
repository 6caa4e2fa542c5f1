"""Supervised fine-tuning on dialogues, which become trajectories with the ids of rollouts."""
