"""Whether a server has the weights that the learner has.

    published.json ── SHA-256 of what the learner had ──> the files, read again ──┐
                                                                                  ├─> a Proof
    /weights_checker ── a checksum of each tensor ── what the server has ─────────┘

A server's word for its version is nothing, and that servers are alike only says that they are all
right or all wrong. So each tensor that a server tells of is held against the learner's, where it is
known what it must say (checksums.py); of the rest, and of other servers, it is compared what is
alike.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np  # transformers brings it

from agentloop.inference.sglang import Checksum, WeightsInfo
from agentloop.training.checksums import MODELS, VERSIONS, Layout, Tensor, checksum, parts_of

__all__ = ["UNASKED", "Judgement", "Proof", "PublishedFiles", "judge", "layout_of", "prove"]

_MAX_THREADS = 16
_DTYPES = {"float": "float32", "half": "float16"}
_ANY_DTYPE = ("bfloat16", "float16", "float32")
_NUMPY = {"F32": "float32", "F16": "float16", "BF16": "uint16", "F64": "float64", "I64": "int64"}
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

UNASKED = "weights.verify is false"

Sum = Callable[[str, int], str | None]
"""Of a tensor of a server's, on a tensor-parallel rank; None: it is not known."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found out about a server's weights.

    Attributes:
        checksum: of all of them, SGLang's own.
        rest: of what was not compared with the learner's: "" if all was.
        wrong: which tensor is not the learner's, in words.
        unproven: why none was compared.
    """

    checksum: str
    rest: str
    wrong: str = ""
    unproven: str = ""


def prove(found: Checksum, expected: Sum, *, unproven: str = "") -> Proof:
    """Hold each tensor against what is expected of it."""
    rest = hashlib.sha256()
    wrong, num_known, num_unknown = "", 0, 0
    for rank, tensors in found.ranks:
        for name in sorted(tensors):
            if (known := expected(name, rank)) is None:
                rest.update(f"{rank} {name} {tensors[name]}\n".encode())
                num_unknown += 1
            else:
                num_known += 1
                if known != tensors[name] and not wrong:
                    wrong = f"its {name} is not what the learner has"
    if not num_known:
        return Proof(found.whole, found.whole, unproven=unproven or "it tells of no such tensor")
    return Proof(found.whole, rest.hexdigest() if num_unknown else "", wrong)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Which servers have the right weights, and why the others have not, by url. `rest` is what is
    right of that which nobody could hold against the learner's; none where nobody knows, or needs
    to."""

    right: list[str]
    wrong: dict[str, str]
    rest: str | None


def judge(proofs: Mapping[str, Proof], rest: str | None = None) -> Judgement:
    """The learner's tensors decide; of what was not compared with them, what was right before
    (`rest`), or else what most servers have."""
    wrong = {url: proof.wrong for url, proof in proofs.items() if proof.wrong}
    others = {url: proof.rest for url, proof in proofs.items() if url not in wrong and proof.rest}
    if rest is None:
        (most, num), *less = Counter(others.values()).most_common(2) or [("", 0)]
        rest = most if num and not (less and less[0][1] == num) else None
    for url, found in others.items():
        if rest is None:
            wrong[url] = f"nobody knows which of the servers' weights are right: {others}"
        elif found != rest:
            wrong[url] = f"its weights differ from the others': {proofs[url].checksum}"
    return Judgement(sorted(proofs.keys() - wrong.keys()), wrong, rest)


def layout_of(info: WeightsInfo, config: Mapping[str, Any]) -> Layout | str:
    """How a server holds a model of this configuration; why nobody knows that."""
    if info.sglang not in VERSIONS:
        return f"SGLang {info.sglang}: known is what {' and '.join(VERSIONS)} says of its tensors"
    if info.unusual:
        return f"its tensors are not simply the model's: {info.unusual}"
    if config.get("model_type") not in MODELS:
        return f"a model of the type {config.get('model_type')}: known are {', '.join(MODELS)}"
    dtype = _DTYPES.get(info.dtype, info.dtype)
    if info.device not in ("cpu", "cuda"):
        return f"the device {info.device}"
    if info.device == "cpu" and dtype != "float32":
        return f"{dtype} on a CPU, where some pack their weights"
    if dtype not in (*_ANY_DTYPE, "auto"):
        return f"the type {dtype}"
    num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return Layout(info.device, dtype, info.num_ranks, num_kv_heads)


class PublishedFiles:
    """The weights in a folder that the learner has published, as servers hold them. Made for one
    hand-over: what was computed for one server serves the others like it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._parts: dict[str, tuple[str, ...]] = {}
        self._config: dict[str, Any] = {}
        self._sums: dict[tuple[str, int, Layout], str] = {}
        self._problem: str | None = None  # none yet known
        self._is_damaged = False

    def prove(self, found: Checksum, info: WeightsInfo) -> Proof:
        """Takes as long as it takes to read and hash all of it: in a thread."""
        if self._problem is None:
            self._problem = self._open()
        if self._is_damaged:
            return Proof(found.whole, "", wrong=self._problem)
        layout = self._problem or layout_of(info, self._config)
        if isinstance(layout, str):
            return prove(found, lambda *_: None, unproven=layout)
        layout = self._with_dtype(layout, found)
        self._compute(found, layout)
        return prove(found, lambda name, rank: self._sums.get((name, rank, layout)))

    def _open(self) -> str:
        """Why there is nothing to compare with; "" if there is."""
        try:
            manifest = json.loads((self._folder / "published.json").read_bytes())
            self._config = json.loads((self._folder / "config.json").read_bytes())
            for file, differs in _in_threads(self._differs, list(manifest["sha256"].items())):
                if differs:
                    self._is_damaged = True
                    return f"{self._folder / file} is not what the learner has published"
                self._tensors |= _read(self._folder / file)
        except (OSError, KeyError, ValueError) as error:
            return f"{self._folder} cannot be read: {error}"
        self._parts = parts_of(self._tensors)
        return ""

    def _differs(self, item: tuple[str, str]) -> tuple[str, bool]:
        file, expected = item
        with (self._folder / file).open("rb") as stream:
            return file, hashlib.file_digest(stream, "sha256").hexdigest() != expected

    def _with_dtype(self, layout: Layout, found: Checksum) -> Layout:
        """Of a server that was not told a type, the one of its smallest tensor."""
        if layout.dtype != "auto":
            return layout
        ranks = [(rank, sums) for rank, sums in found.ranks if sums.keys() & self._parts.keys()]
        layouts = [replace(layout, dtype=dtype) for dtype in _ANY_DTYPE]
        if not ranks:
            return layouts[0]
        rank, sums = ranks[0]
        name = min(sums.keys() & self._parts.keys(), key=self._size)
        same = (one for one in layouts if self._sum((name, rank, one)) == sums[name])
        return next(same, layouts[0])

    def _size(self, name: str) -> int:
        return sum(self._tensors[part].array.nbytes for part in self._parts[name])

    def _compute(self, found: Checksum, layout: Layout) -> None:
        wanted = {
            (name, rank, layout)
            for rank, sums in found.ranks
            for name in sums.keys() & self._parts.keys()
        }
        keys = sorted(wanted - self._sums.keys(), key=lambda key: key[:2])
        self._sums.update(zip(keys, _in_threads(self._sum, keys), strict=True))

    def _sum(self, key: tuple[str, int, Layout]) -> str:
        name, rank, layout = key
        return checksum(name, [self._tensors[part] for part in self._parts[name]], layout, rank)


def _in_threads(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Hashing lets go of Python's lock."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(work, items))


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of safetensors, mapped into memory."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    tensors: dict[str, Tensor] = {}
    for name, one in header.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            kind = one["dtype"]
            numbers = data[begin:end].view(_NUMPY.get(kind, "uint8"))
            shape = one["shape"] if kind in _NUMPY else [-1]
            tensors[name] = Tensor(_NAMES.get(kind, kind), numbers.reshape(shape))
    return tensors
