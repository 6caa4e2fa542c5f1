"""The entropies of a run's rollouts: asked of a learner, and kept beside them.

    trajectories/group-0000016.jsonl ──batch──> a learner ──> entropy/group-0000016.jsonl
                                                              entropy/about.json

A group's file has a line for each of its rollouts, in the order of its trajectories: {"id": its
name, "entropies": [[of each token of its first turn], [of its second], ...]}, in nats. What gave
them stands in about.json, by the group's number; so what was found once is read the next time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import anyio.to_thread
import orjson

from agentloop.errors import DataError, SettingsError
from agentloop.groups.tasks import read_jsonl
from agentloop.training.batch import Sample, write_batch
from agentloop.training.entropy import Sampled, k3
from agentloop.training.learner import Learner, LearnerError

__all__ = ["EntropyFolder", "Found", "Origin", "Rollout", "group_files", "read_rollouts", "score"]

_GROUP = re.compile(r"group-(\d+)\.jsonl")
_DIGITS = 6

Entropies = list[list[float]]
"""Of a rollout: of each of its turns those of each sampled token."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A trajectory as it is scored, T tokens long.

    Attributes:
        ids, mask, logprobs: [T], as in `agentloop.trajectory.Trajectory`.
        turns: without their entropies.
        versions: how many of its tokens were sampled under which version.
    """

    id: str
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    turns: tuple[Sampled, ...]
    versions: Mapping[str, int]

    @property
    def sampled_logprobs(self) -> list[float]:
        """The engine's, of the sampled tokens alone."""
        return [one for one, sampled in zip(self.logprobs, self.mask, strict=True) if sampled]

    def with_entropies(self, entropies: Entropies) -> tuple[Sampled, ...]:
        """Its turns, with them."""
        pairs = zip(self.turns, entropies, strict=True)
        return tuple(replace(turn, entropies=found) for turn, found in pairs)


@dataclass(frozen=True, slots=True)
class Origin:
    """What gives entropies. Of an equal one they would be the same.

    Attributes:
        weights: the folder of the model; `identity` tells its weights from others there.
        version: that they were published as, in this run; None: they are not this run's.
        temperature: that logits are divided by.
    """

    weights: str
    identity: str
    version: str | None
    temperature: float

    @classmethod
    def of(cls, weights: Path, *, version: str | None, temperature: float) -> Origin:
        """Raises SettingsError: the folder cannot be read."""
        try:
            if (manifest := weights / "published.json").is_file():  # it has their checksums
                told = manifest.read_bytes()
            else:
                files = sorted(weights.glob("*.safetensors"))
                stats = [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files]
                told = repr(stats).encode()
        except OSError as error:
            raise SettingsError(f"{weights}: {error.strerror or error}") from error
        identity = hashlib.sha256(told).hexdigest()[:16]
        return cls(str(weights.resolve()), identity, version, temperature)


@dataclass(frozen=True, slots=True)
class Found:
    """Of a group's rollouts, in their order; `mismatch_kl` is the mean over their tokens of the KL
    from what sampled them to what scored them."""

    entropies: list[Entropies]
    mismatch_kl: float


def group_files(run: Path) -> dict[int, Path]:
    """The trajectories of a run, by the number of their group, the newest last."""
    files = (run / "trajectories").glob("group-*.jsonl")
    numbered = ((_GROUP.fullmatch(file.name), file) for file in files)
    return dict(sorted((int(match[1]), file) for match, file in numbered if match))


def read_rollouts(path: Path) -> list[Rollout]:
    """The rollouts of a group. Raises DataError: it names the line."""
    rollouts = []
    for number, row in read_jsonl(path):
        try:
            rollouts.append(_rollout(row["trajectory"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: line {number}: no rollout: {error!r}") from error
    return rollouts


def _rollout(row: Mapping[str, Any]) -> Rollout:
    turns = []
    answered = False
    for turn in row["turns"]:
        calls = tuple((call["start"], call["end"]) for call in turn["calls"])
        turns.append(Sampled(turn["output_ids"], (), calls, answered))
        answered = bool(turn["results"] and turn["observation_ids"])
    versions = Counter(version for version in row["versions"] if version is not None)
    made = Rollout(
        row["id"], row["ids"], row["mask"], row["logprobs"], tuple(turns), dict(versions)
    )
    num = sum(len(turn.ids) for turn in turns)
    if not len(made.ids) == len(made.mask) == len(made.logprobs) or sum(made.mask) != num:
        raise ValueError("ids, mask and logprobs do not go together")
    return made


class EntropyFolder:
    """`entropy/` in a run's folder."""

    def __init__(self, run: Path) -> None:
        self.path = run / "entropy"

    def kept(self, number: int, rollouts: Sequence[Rollout], origin: Origin) -> Found | None:
        """What was found of this group before; None: nothing that is whole, of these rollouts and
        of this origin."""
        told = self._about().get(str(number))
        if not isinstance(told, dict) or told.get("origin") != asdict(origin):
            return None
        try:
            rows = [row for _, row in read_jsonl(self._file(number))]
            found = Found([row["entropies"] for row in rows], float(told["mismatch_kl"]))
            there = [(row["id"], [len(turn) for turn in row["entropies"]]) for row in rows]
        except (DataError, KeyError, TypeError, ValueError):
            return None
        wanted = [(one.id, [len(turn.ids) for turn in one.turns]) for one in rollouts]
        return found if there == wanted else None

    def keep(self, number: int, rollouts: Sequence[Rollout], origin: Origin, found: Found) -> None:
        """Raises SettingsError: it cannot be written."""
        pairs = zip(rollouts, found.entropies, strict=True)
        rows = [{"id": one.id, "entropies": entropies} for one, entropies in pairs]
        about = self._about()
        about[str(number)] = {"origin": asdict(origin), "mismatch_kl": found.mismatch_kl}
        try:
            self.path.mkdir(exist_ok=True)
            # This one last: what it does not speak of is found anew.
            _write(self._file(number), b"".join(orjson.dumps(row) + b"\n" for row in rows))
            _write(self.path / "about.json", orjson.dumps(about, option=orjson.OPT_INDENT_2))
        except OSError as error:
            raise SettingsError(f"{self.path}: {error.strerror or error}") from error

    def _file(self, number: int) -> Path:
        return self.path / f"group-{number:07}.jsonl"

    def _about(self) -> dict[str, Any]:
        try:
            about = json.loads((self.path / "about.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return about if isinstance(about, dict) else {}


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


async def score(
    learner: Learner, rollouts: Sequence[Rollout], folder: Path, *, timeout_s: float
) -> Found:
    """What the learner's weights say of these rollouts. Batch and answer go by files in `folder`,
    for a moment.

    Raises:
        LearnerError: it failed, or what it says is no number.
        SettingsError: a file cannot be written.
    """
    some = [one for one in rollouts if any(one.mask)]
    if not some:
        return Found([[[] for _ in one.turns] for one in rollouts], 0.0)
    samples = [Sample(one.ids, one.mask, one.logprobs, 0.0, 0) for one in some]
    with tempfile.TemporaryDirectory(prefix=".scoring-", dir=folder) as temporary:
        batch, out = Path(temporary) / "batch", Path(temporary) / "scores"
        await anyio.to_thread.run_sync(write_batch, batch, samples)
        await learner.ask("logprobs", batch=str(batch), out=str(out), timeout_s=timeout_s)
        return await anyio.to_thread.run_sync(_read_scores, out, rollouts)


def _read_scores(path: Path, rollouts: Sequence[Rollout]) -> Found:
    from safetensors.numpy import load

    tensors = load(path.read_bytes())
    mask = [one for rollout in rollouts if any(rollout.mask) for one in rollout.mask]
    sampled = [index for index, one in enumerate(mask) if one]
    logprobs = tensors["logprobs"][sampled].tolist()
    entropies = tensors["entropies"][sampled].tolist()
    if not all(map(math.isfinite, (*logprobs, *entropies))):
        raise LearnerError("logprobs: what the weights say of a token is no number")
    engine = [one for rollout in rollouts for one in rollout.sampled_logprobs]
    rounded = [round(max(0.0, one), _DIGITS) for one in entropies]
    lengths = [len(turn.ids) for rollout in rollouts for turn in rollout.turns]
    ends = accumulate(lengths, initial=0)
    turns = iter([rounded[start:end] for start, end in pairwise(ends)])
    found = [[next(turns) for _ in rollout.turns] for rollout in rollouts]
    return Found(found, k3(engine, logprobs))
