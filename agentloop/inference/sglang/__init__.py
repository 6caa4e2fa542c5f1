"""The client of one SGLang server."""
