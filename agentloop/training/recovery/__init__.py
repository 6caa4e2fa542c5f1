"""Going on after a stop: where a run is, its checkpoints, and repeating its steps."""
