"""A run's folder, status and metrics."""
