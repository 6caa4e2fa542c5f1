"""Other protocols than chat completions, translated to them and back."""
