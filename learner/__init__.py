"""The learner: turns finished groups into new weights. Started as its own processes."""
