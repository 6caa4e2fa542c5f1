"""Tasks in, each sampled k times; what the model can do out, and how sure that is."""
