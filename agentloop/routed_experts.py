"""The experts to which a mixture-of-experts model has sent each token, in each layer."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from typing import NamedTuple, Self

__all__ = ["MAX_EXPERTS", "RoutedExperts"]

MAX_EXPERTS = 256
"""The most experts of a layer that can be recorded: a byte for each of a token's experts."""


class RoutedExperts(NamedTuple):
    """The experts of consecutive tokens of a trajectory.

    `str` returns them as text, compressed, which takes time: call it in a thread.

    Attributes:
        start: the number of tokens before them in the trajectory.
        width: experts of a token: as many in each layer as it is sent to, layer by layer.
        ids: the experts of the first token, then those of the second, and so on.
    """

    start: int
    width: int
    ids: bytes

    @property
    def end(self) -> int:
        """The number of tokens up to the last of them."""
        return self.start + len(self.ids) // self.width

    def after(self, start: int) -> Self:
        """Return those of the tokens from `start` on."""
        num_known = max(0, start - self.start)
        return self._replace(start=self.start + num_known, ids=self.ids[num_known * self.width :])

    @classmethod
    def decode(cls, text: str, start: int, end: int) -> Self:
        """Return the experts of the tokens [start, end), which SGLang has sent as `text`.

        Raises:
            ValueError: the text is damaged, or an expert is not below `MAX_EXPERTS`.
        """
        numbers = b64decode(text, validate=True)  # int32, little-endian
        width, rest = divmod(len(numbers), 4 * (end - start))
        if rest or not width:
            raise ValueError(f"{len(numbers)} bytes of experts for {end - start} tokens")
        if any(numbers[at::4].strip(b"\0") for at in (1, 2, 3)):
            raise ValueError(f"an expert is not from 0 to {MAX_EXPERTS - 1}")
        return cls(start, width, numbers[::4])

    def __str__(self) -> str:
        return f"{self.start} {self.width} {b64encode(zlib.compress(self.ids, 1)).decode()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the experts of which `text` is the text.

        Raises:
            ValueError: it is not such a text.
        """
        start, width, ids = text.split(" ")
        try:
            experts = cls(int(start), int(width), zlib.decompress(b64decode(ids, validate=True)))
        except zlib.error as error:
            raise ValueError(f"experts: {error}") from error
        if experts.start < 0 or experts.width < 1 or len(experts.ids) % experts.width:
            raise ValueError("experts: the text is damaged")
        return experts
