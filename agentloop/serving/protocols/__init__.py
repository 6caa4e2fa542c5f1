"""The APIs that clients speak."""
