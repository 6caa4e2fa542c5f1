"""The HTTP service's protocol and access control; knows requests and records, not the runtime."""
