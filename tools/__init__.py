"""Programs for developers of agentloop; not in the wheel."""
