"""Commands, one module each; only what composes programs imports from them."""
