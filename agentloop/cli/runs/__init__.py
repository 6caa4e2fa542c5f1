"""`agentloop runs`: commands that inspect the runs that are there."""
