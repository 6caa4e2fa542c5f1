"""`agentloop runs`: commands that inspect existing runs."""
