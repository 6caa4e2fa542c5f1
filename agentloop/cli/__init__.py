"""Commands, one module each; no other module imports them."""
