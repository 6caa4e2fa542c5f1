"""Pure decisions: capacity, placement, queueing, admission, health."""
