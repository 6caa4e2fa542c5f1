"""Benchmarks, one command each: its `--help` says what it measures."""
