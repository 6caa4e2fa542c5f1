"""Groups of rollouts of one task."""
