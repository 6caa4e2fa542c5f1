"""`agentloop env`: commands for environments."""
