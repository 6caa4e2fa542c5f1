"""The HTTP server of `agentloop serve` and of sessions."""
