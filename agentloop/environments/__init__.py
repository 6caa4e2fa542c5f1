"""What an agent is trained and evaluated on: environments, tasks and rewards."""
