"""Inference servers, and the routing of requests to them."""
