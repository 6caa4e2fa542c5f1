"""The learner's processes as seen from the trainer."""
