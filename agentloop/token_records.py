"""Hold the records of tokens that servers report: kept ids and experts."""

from __future__ import annotations

import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Self

from pydantic_core.core_schema import CoreSchema, str_schema

__all__ = ["MAX_EXPERTS", "MAX_KEPT_IDS", "KeptIds", "RoutedExperts"]

MAX_KEPT_IDS = 4096
"""The most ids that SGLang reports for a token (`--sampling-mask-max-tokens`)."""

MAX_EXPERTS = 256
"""The most experts of a layer that can be recorded: a byte for each of a token's experts."""


class KeptIds:
    """The ids that top-k, top-p and min-p have left to sample each of a sequence of tokens from.

    `str` returns them as text, compressed, which takes time: call it in a thread.

    Attributes:
        counts: the number of kept ids of each token; 0: nothing was cut off from the distribution
            that it was sampled from, or it was not sampled.
        ids: the kept ids of the first token, then those of the second, and so on.
    """

    __slots__ = ("counts", "ids")

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        self.counts, self.ids = array("H"), array("i")
        self.extend([*rows])

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        """Append tokens, each with its kept ids."""
        self.counts.fromlist([*map(len, rows)])
        self.ids.fromlist([*chain.from_iterable(rows)])

    def append(self, other: KeptIds) -> None:
        """Append the tokens of `other`."""
        self.counts += other.counts
        self.ids += other.ids

    def append_whole(self, num_tokens: int) -> None:
        """Append tokens without kept ids."""
        self.counts += array("H", bytes(2 * num_tokens))

    def __iter__(self) -> Iterator[array[int]]:
        """Yield the kept ids of each token."""
        end = 0
        for count in self.counts:
            start, end = end, end + count
            yield self.ids[start:end]

    def copy(self) -> KeptIds:
        """Return a copy that `extend` does not change."""
        copied = KeptIds()
        copied.append(self)
        return copied

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptIds):
            return NotImplemented
        return self.counts == other.counts and self.ids == other.ids

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> CoreSchema:
        return str_schema()  # it is sent as its text

    def __repr__(self) -> str:
        return f"<KeptIds: {len(self.ids)} of {len(self.counts)} tokens>"

    def __str__(self) -> str:
        counts, ids = self.counts.tobytes(), self.ids.tobytes()
        # The bytes of a kind together: most of the higher ones are 0.
        planes = [counts[at::2] for at in range(2)] + [ids[at::4] for at in range(4)]
        data = len(self.counts).to_bytes(4, "little") + b"".join(planes)
        return b64encode(zlib.compress(data, 1)).decode()

    @classmethod
    def parse(cls, text: str) -> KeptIds:
        """Return the kept ids of which `text` is the text.

        Raises:
            ValueError: It is not such a text.
        """
        try:
            data = zlib.decompress(b64decode(text, validate=True))
        except zlib.error as error:
            raise ValueError(f"kept ids: {error}") from error
        num_tokens = int.from_bytes(data[:4], "little")
        num_ids, rest = divmod(len(data) - 4 - 2 * num_tokens, 4)
        kept = cls()
        kept.counts = array("H", _joined(data[4 : 4 + 2 * num_tokens], 2))
        kept.ids = array("i", _joined(data[4 + 2 * num_tokens :], 4))
        if rest or sum(kept.counts) != num_ids:
            raise ValueError("kept ids: the text is damaged")
        return kept


def _joined(planes: bytes, width: int) -> bytes:
    """Return numbers of `width` bytes, from their first bytes, their second bytes, and so on."""
    num = len(planes) // width
    data = bytearray(num * width)
    for at in range(width):
        data[at::width] = planes[at * num : (at + 1) * num]
    return bytes(data)


class RoutedExperts(NamedTuple):
    """The experts to which consecutive tokens of a trajectory were sent.

    Attributes:
        start: the number of tokens before them in the trajectory.
        width: experts of a token: as many in each layer as it is sent to, layer by layer.
        ids: the experts of the first token, then those of the second, and so on.
    """

    start: int
    width: int
    ids: bytes

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> CoreSchema:
        return str_schema()  # it is sent as its text

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
        zeros = bytes(len(numbers) // 4)
        if any(numbers[at::4] != zeros for at in (1, 2, 3)):
            raise ValueError(f"an expert is not from 0 to {MAX_EXPERTS - 1}")
        return cls(start, width, numbers[::4])

    def __str__(self) -> str:
        return f"{self.start} {self.width} {b64encode(self.ids).decode()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the experts of which `text` is the text.

        Raises:
            ValueError: it is not such a text.
        """
        start, width, ids = text.split(" ")
        experts = cls(int(start), int(width), b64decode(ids, validate=True))
        if experts.start < 0 or experts.width < 1 or len(experts.ids) % experts.width:
            raise ValueError("experts: the text is damaged")
        return experts
