"""Credit assignment: the rewards of a group to per-token advantages and weights. Pure."""
