"""What the HTTP service speaks, and whom it listens to. Knows requests and records, no runtime."""
