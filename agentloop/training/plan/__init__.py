"""A run before it starts: its settings, their checks, what it needs, and where it runs."""
