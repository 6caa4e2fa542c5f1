"""The inference servers, and who goes where."""
