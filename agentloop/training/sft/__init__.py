"""Supervised fine-tuning on dialogues."""
