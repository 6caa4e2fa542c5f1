"""Groups of rollouts: play them, whoever the agent is, score them and record them."""
