"""New weights to the servers, and the proof that they arrived."""
