"""The agent: messages to ids, tokens to tool calls, and back."""
