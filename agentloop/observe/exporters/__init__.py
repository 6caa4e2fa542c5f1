"""Readers of the events that write elsewhere."""
