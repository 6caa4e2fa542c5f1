"""The training loop: groups are admitted, rolled out, queued and learned, stage by stage."""
