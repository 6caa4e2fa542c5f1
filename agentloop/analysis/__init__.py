"""Plots, listings and statistics of finished runs."""
