"""What all commands that start something share: settings, checks of the machine, and progress."""
