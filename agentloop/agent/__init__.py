"""One trajectory: messages to ids, tokens to tool calls, and back."""
