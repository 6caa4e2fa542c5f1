"""Verify that a server has the learner's weights.

    published.json ── SHA-256 of the learner's files ──> the files, read again ──┐
                                                                                 ├─> a Proof
    /weights_checker ── checksum of each tensor on the server ───────────────────┘

The version that a server reports proves nothing, and equal servers may all be wrong. So each tensor
that a server reports is compared with the learner's if its expected checksum is known
(checksums.py); all other tensors are only compared between servers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np  # a dependency of transformers

from agentloop.inference.sglang.weight_updates import Checksum, WeightsInfo
from agentloop.training.weight_sync.checksums import (
    MODELS,
    VERSIONS,
    Tensor,
    checksum,
    parts_of,
)
from agentloop.training.weight_sync.layout import Layout

_MAX_THREADS = 16
_DTYPES = {"float": "float32", "half": "float16"}
_ANY_DTYPE = ("bfloat16", "float16", "float32")
_NUMPY = {"F32": "float32", "F16": "float16", "BF16": "uint16", "F64": "float64", "I64": "int64"}
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

UNASKED = "weights.verify is false"

Sum = Callable[[str, int], str | None]
"""The expected checksum of a server's tensor on a tensor-parallel rank; None: unknown."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of verifying a server's weights.

    Attributes:
        checksum: SGLang's checksum of all weights.
        rest: checksum of the tensors that were not compared with the learner's; "" if all were.
        wrong: description of a tensor that differs from the learner's.
        unproven: the reason why no tensor was compared.
    """

    checksum: str
    rest: str
    wrong: str = ""
    unproven: str = ""


def prove(reported: Checksum, expected: Sum, *, unproven: str = "") -> Proof:
    """Compare each tensor with its expected checksum."""
    unknown = hashlib.sha256()
    wrong, num_known, num_unknown = "", 0, 0
    for rank, tensors in reported.ranks:
        for name in sorted(tensors):
            if (expected_sum := expected(name, rank)) is None:
                unknown.update(f"{rank} {name} {tensors[name]}\n".encode())
                num_unknown += 1
            else:
                num_known += 1
                if expected_sum != tensors[name] and not wrong:
                    wrong = f"its {name} differs from the learner's"
    if not num_known:
        return Proof(
            reported.whole, reported.whole, unproven=unproven or "it reports no known tensor"
        )
    return Proof(reported.whole, unknown.hexdigest() if num_unknown else "", wrong)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The servers with the right weights, and the errors of the others, by url.

    `rest` is the accepted checksum of tensors that could not be compared with the learner's; None
    if it is unknown or not needed.
    """

    right: list[str]
    wrong: dict[str, str]
    rest: str | None


def judge(proofs: Mapping[str, Proof], rest: str | None = None) -> Judgement:
    """Decide which servers have the right weights.

    Tensors compared with the learner's must match; the others must have the accepted checksum
    (`rest`), or that of most servers if there is none yet.
    """
    wrong = {url: proof.wrong for url, proof in proofs.items() if proof.wrong}
    rests = {url: proof.rest for url, proof in proofs.items() if url not in wrong and proof.rest}
    if rest is None:
        rest = most_common(rests.values())
    for url, digest in rests.items():
        if rest is None:
            wrong[url] = f"the servers' weights differ, and it is unknown which are right: {rests}"
        elif digest != rest:
            wrong[url] = f"its weights differ from the others': {proofs[url].checksum}"
    return Judgement(sorted(proofs.keys() - wrong.keys()), wrong, rest)


def most_common(checksums: Iterable[str]) -> str | None:
    """Return the checksum that occurs most often; None: there is none, or a tie."""
    (first, num_first), *runners_up = Counter(checksums).most_common(2) or [("", 0)]
    is_tie = runners_up and runners_up[0][1] == num_first
    return first if num_first and not is_tie else None


def layout_of(info: WeightsInfo, config: Mapping[str, object]) -> Layout | str:
    """Return the layout of a model on a server, or the reason why it is unknown."""
    if info.sglang not in VERSIONS:
        return f"SGLang {info.sglang}: only checksums of {' and '.join(VERSIONS)} are known"
    if info.unusual:
        return f"its tensors differ from the model's: {info.unusual}"
    if config.get("model_type") not in MODELS:
        return f"the model type {config.get('model_type')}: only {', '.join(MODELS)} are known"
    dtype = _DTYPES.get(info.dtype, info.dtype)
    if info.device not in ("cpu", "cuda"):
        return f"the device {info.device}"
    if info.device == "cpu" and dtype != "float32":
        return f"{dtype} on a CPU, where weights may be packed"
    if dtype not in (*_ANY_DTYPE, "auto"):
        return f"the dtype {dtype}"
    num_kv_heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if not isinstance(num_kv_heads, int):
        return "the model's number of KV heads, which its configuration lacks"
    return Layout(info.device, dtype, info.num_ranks, num_kv_heads)


class PublishedFiles:
    """The expected checksums of weights published in a folder.

    Made for one weight sync: checksums computed for one server are reused for others of the same
    layout.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._parts: dict[str, tuple[str, ...]] = {}
        self._config: dict[str, object] = {}
        self._sums: dict[tuple[str, int, Layout], str] = {}
        self._problem: str | None = None  # None: not checked yet
        self._is_damaged = False

    def prove(self, reported: Checksum, info: WeightsInfo) -> Proof:
        """Verify a server's weights. Reads and hashes all files: call it in a thread."""
        if self._problem is None:
            self._problem = self._open()
        if self._is_damaged:
            return Proof(reported.whole, "", wrong=self._problem)
        layout = self._problem or layout_of(info, self._config)
        if isinstance(layout, str):
            return prove(reported, lambda *_: None, unproven=layout)
        layout = self._with_dtype(layout, reported)
        self._compute(reported, layout)
        return prove(reported, lambda name, rank: self._sums.get((name, rank, layout)))

    def _open(self) -> str:
        """Return the reason why the files cannot be used, or ""."""
        try:
            manifest = json.loads((self._folder / "published.json").read_bytes())
            self._config = json.loads((self._folder / "config.json").read_bytes())
            for file, differs in _in_threads(self._differs, list(manifest["sha256"].items())):
                if differs:
                    self._is_damaged = True
                    return f"{self._folder / file} differs from what the learner published"
                self._tensors |= _read(self._folder / file)
        except (OSError, KeyError, ValueError) as error:
            return f"{self._folder} cannot be read: {error}"
        self._parts = parts_of(self._tensors)
        return ""

    def _differs(self, item: tuple[str, str]) -> tuple[str, bool]:
        file, expected = item
        with (self._folder / file).open("rb") as stream:
            return file, hashlib.file_digest(stream, "sha256").hexdigest() != expected

    def _with_dtype(self, layout: Layout, reported: Checksum) -> Layout:
        """Complete the layout of a server without a configured dtype, by its smallest tensor."""
        if layout.dtype != "auto":
            return layout
        ranks = [(rank, sums) for rank, sums in reported.ranks if sums.keys() & self._parts.keys()]
        layouts = [replace(layout, dtype=dtype) for dtype in _ANY_DTYPE]
        if not ranks:
            return layouts[0]
        rank, sums = ranks[0]
        name = min(sums.keys() & self._parts.keys(), key=self._size)
        same = (
            candidate for candidate in layouts if self._sum((name, rank, candidate)) == sums[name]
        )
        return next(same, layouts[0])

    def _size(self, name: str) -> int:
        return sum(self._tensors[part].array.nbytes for part in self._parts[name])

    def _compute(self, reported: Checksum, layout: Layout) -> None:
        wanted = {
            (name, rank, layout)
            for rank, sums in reported.ranks
            for name in sums.keys() & self._parts.keys()
        }
        keys = sorted(wanted - self._sums.keys(), key=lambda key: key[:2])
        self._sums.update(zip(keys, _in_threads(self._sum, keys), strict=True))

    def _sum(self, key: tuple[str, int, Layout]) -> str:
        name, rank, layout = key
        return checksum(name, [self._tensors[part] for part in self._parts[name]], layout, rank)


def _in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Map `work` over `items` in threads; hashing releases the GIL."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(work, items))


def _read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, memory-mapped."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            kind = entry["dtype"]
            numbers = data[begin:end].view(_NUMPY.get(kind, "uint8"))
            shape = entry["shape"] if kind in _NUMPY else [-1]
            tensors[name] = Tensor(_NAMES.get(kind, kind), numbers.reshape(shape))
    return tensors
