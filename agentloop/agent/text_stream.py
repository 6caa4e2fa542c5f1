"""Decode sampled ids incrementally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_MAX_HELD = 64


class TokenCodec(Protocol):
    """Tokenizer and end tokens, for what reads sampled ids."""

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]

    def token_id(self, text: str) -> int | None: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """Decodes token ids incrementally; text is returned as soon as it is complete UTF-8."""

    def __init__(self, chat: TokenCodec) -> None:
        self._chat = chat
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            self._held.append(token)
            piece = self._stream.step(self._chat.tokenizer, token)
            if piece is not None:
                text += piece
                self._held.clear()
            elif len(self._held) == _MAX_HELD:
                # No character has this many tokens. The library decodes everything it holds at
                # each token, so a model that emits invalid bytes would take quadratic time.
                text += self.flush()
                self._stream = DecodeStream(skip_special_tokens=False)
        return text

    def flush(self) -> str:
        """Return the text of the ids that were held back."""
        held, self._held = self._held, []
        return self._chat.decode(held) if held else ""
