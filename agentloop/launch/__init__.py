"""All commands that start something share these settings, checks of the machine, and progress."""
