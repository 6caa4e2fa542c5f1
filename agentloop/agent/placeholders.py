"""Stand-ins for data while a chat template is rendered."""

from __future__ import annotations

import secrets


class Placeholders:
    """Stand-ins for text or token ids while a template is rendered.

    Their names are random, so that no content can spell one, and alphanumeric, so that no template
    changes them.
    """

    def __init__(self) -> None:
        self.contents: list[str | list[int]] = []
        self._tag = f"PH{secrets.token_hex(8)}N"

    def __call__(self, content: str | list[int]) -> str:
        self.contents.append(content)
        return f"{self._tag}{len(self.contents) - 1}E"

    def split(self, text: str) -> list[str]:
        """Split rendered text into markup, placeholder name, markup, ..., ending with markup."""
        first, *pieces = text.split(self._tag)
        return [first, *(part for piece in pieces for part in piece.partition("E")[::2])]
