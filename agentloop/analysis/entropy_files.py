"""The entropies of a run's rollouts, computed by a learner and cached in the run's folder.

    trajectories/group-0000016.jsonl ──batch──> a learner ──> entropy/group-0000016.jsonl
                                                              entropy/about.json

A group's file has a line for each rollout, in the order of its trajectories: {"id": the rollout's
id, "entropies": [[first turn's tokens], [second turn's], ...]}, in nats. For each group's number,
about.json holds the weights that computed them, so that cached entropies can be reused.
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

import anyio.to_thread
import orjson

from agentloop.analysis.entropy import Sampled, k3
from agentloop.environments.tasks.sources import read_jsonl
from agentloop.errors import DataError, RunFolderError
from agentloop.plain_json import JsonObject
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.learner_client.client import Learner, LearnerError
from agentloop.training.learner_client.protocol import ScoreRequest
from agentloop.trajectory import Trajectory

_GROUP = re.compile(r"group-(\d+)\.jsonl")
_DIGITS = 6

Entropies = list[list[float]]
"""The entropies of a rollout: one tuple per turn, with a value per sampled token, in nats."""


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A stored trajectory of T tokens, ready to be scored.

    Attributes:
        ids, mask, logprobs: [T], as in `agentloop.trajectory.Trajectory`.
        turns: the turns, without entropies.
        versions: number of tokens sampled under each version.
    """

    id: str
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    turns: tuple[Sampled, ...]
    versions: Mapping[str, int]

    @property
    def sampled_logprobs(self) -> list[float]:
        """The engine's log-probabilities of the sampled tokens."""
        return [
            logprob
            for logprob, is_sampled in zip(self.logprobs, self.mask, strict=True)
            if is_sampled
        ]

    def with_entropies(self, entropies: Entropies) -> tuple[Sampled, ...]:
        """Return the turns with their entropies."""
        pairs = zip(self.turns, entropies, strict=True)
        return tuple(replace(turn, entropies=values) for turn, values in pairs)


@dataclass(frozen=True, slots=True)
class Origin:
    """The weights and temperature that entropies are computed with; a key of the cache.

    Attributes:
        weights: the model's folder; `identity` distinguishes its weights from earlier ones there.
        version: the version that this run published them as; None: they are not this run's.
        temperature: divisor of the logits.
    """

    weights: str
    identity: str
    version: str | None
    temperature: float

    @classmethod
    def of(cls, weights: Path, *, version: str | None, temperature: float) -> Origin:
        """Identify the weights in a folder. Raises RunFolderError if it cannot be read."""
        try:
            if (manifest := weights / "published.json").is_file():  # it has their checksums
                content = manifest.read_bytes()
            else:
                files = sorted(weights.glob("*.safetensors"))
                stats = [
                    (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files
                ]
                content = repr(stats).encode()
        except OSError as error:
            raise RunFolderError(f"{weights}: {error.strerror or error}") from error
        identity = hashlib.sha256(content).hexdigest()[:16]
        return cls(str(weights.resolve()), identity, version, temperature)


@dataclass(frozen=True, slots=True)
class GroupScores:
    """The entropies of a group's rollouts, in order.

    `mismatch_kl` is the mean over their tokens of the KL divergence, in nats, from the policy that
    sampled them to the one that scored them.
    """

    entropies: list[Entropies]
    mismatch_kl: float


def group_files(run: Path) -> dict[int, Path]:
    """Return the trajectory files of a run by group number, newest last."""
    files = (run / "trajectories").glob("group-*.jsonl")
    numbered = ((_GROUP.fullmatch(file.name), file) for file in files)
    return dict(sorted((int(match[1]), file) for match, file in numbered if match))


def read_rollouts(path: Path) -> list[RecordedRollout]:
    """Read the rollouts of a group. Raises DataError naming the invalid line."""
    rollouts = []
    for number, row in read_jsonl(path):
        try:
            rollouts.append(_rollout(row["trajectory"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: line {number}: not a rollout: {error!r}") from error
    return rollouts


def _rollout(row: JsonObject) -> RecordedRollout:
    trajectory = Trajectory.from_dict(row)
    turns = []
    is_answered = False
    for turn in trajectory:
        if len(turn.output_ids) != len(turn.logprobs):
            raise ValueError("output_ids and logprobs differ in length")
        calls = tuple((call.start, call.end) for call in turn.calls)
        turns.append(Sampled(turn.output_ids, (), calls, is_answered))
        is_answered = bool(turn.results and turn.observation_ids)
    versions = Counter(version for version in trajectory.versions if version is not None)
    ids, mask, logprobs = trajectory.ids, trajectory.mask, trajectory.logprobs
    return RecordedRollout(trajectory.id, ids, mask, logprobs, tuple(turns), dict(versions))


class EntropyFolder:
    """The cache of entropies: `entropy/` in a run's folder."""

    def __init__(self, run: Path) -> None:
        self.path = run / "entropy"

    def load(
        self, number: int, rollouts: Sequence[RecordedRollout], origin: Origin
    ) -> GroupScores | None:
        """Return the cached entropies of a group, or None if there are none that are complete and
        match these rollouts and this origin."""
        entry = self._entries().get(str(number))
        if not isinstance(entry, dict) or entry.get("origin") != asdict(origin):
            return None
        try:
            rows = [row for _, row in read_jsonl(self._file(number))]
            scores = GroupScores([row["entropies"] for row in rows], float(entry["mismatch_kl"]))
            cached = [(row["id"], [len(turn) for turn in row["entropies"]]) for row in rows]
        except (DataError, KeyError, TypeError, ValueError):
            return None
        expected = [(rollout.id, [len(turn.ids) for turn in rollout.turns]) for rollout in rollouts]
        return scores if cached == expected else None

    def save(
        self, number: int, rollouts: Sequence[RecordedRollout], origin: Origin, scores: GroupScores
    ) -> None:
        """Cache the entropies of a group. Raises RunFolderError if they cannot be written."""
        pairs = zip(rollouts, scores.entropies, strict=True)
        rows = [{"id": rollout.id, "entropies": entropies} for rollout, entropies in pairs]
        entries = self._entries()
        entries[str(number)] = {"origin": asdict(origin), "mismatch_kl": scores.mismatch_kl}
        try:
            self.path.mkdir(exist_ok=True)
            # Write this file last: entropies that it does not list are computed again.
            _write(self._file(number), b"".join(orjson.dumps(row) + b"\n" for row in rows))
            _write(self.path / "about.json", orjson.dumps(entries, option=orjson.OPT_INDENT_2))
        except OSError as error:
            raise RunFolderError(f"{self.path}: {error.strerror or error}") from error

    def _file(self, number: int) -> Path:
        return self.path / f"group-{number:07}.jsonl"

    def _entries(self) -> dict[str, object]:
        try:
            entries = json.loads((self.path / "about.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


async def score(
    learner: Learner, rollouts: Sequence[RecordedRollout], folder: Path, *, timeout_s: float
) -> GroupScores:
    """Compute the entropies of rollouts with the learner's weights.

    Batch and result are exchanged as temporary files in `folder`.

    Raises:
        LearnerError: the learner failed, or a result is not finite.
        RunFolderError: a file cannot be written.
    """
    some = [rollout for rollout in rollouts if any(rollout.mask)]
    if not some:
        return GroupScores([[[] for _ in rollout.turns] for rollout in rollouts], 0.0)
    samples = [Sample(rollout.ids, rollout.mask, rollout.logprobs, 0.0, 0) for rollout in some]
    with tempfile.TemporaryDirectory(prefix=".scoring-", dir=folder) as temporary:
        batch, out = Path(temporary) / "batch", Path(temporary) / "scores"
        await anyio.to_thread.run_sync(write_batch, batch, samples)
        await learner.ask(ScoreRequest(batch=batch, out=out), timeout_s=timeout_s)
        return await anyio.to_thread.run_sync(_read_scores, out, rollouts)


def _read_scores(path: Path, rollouts: Sequence[RecordedRollout]) -> GroupScores:
    from safetensors.numpy import load

    tensors = load(path.read_bytes())
    mask = [is_sampled for rollout in rollouts if any(rollout.mask) for is_sampled in rollout.mask]
    sampled = [index for index, is_sampled in enumerate(mask) if is_sampled]
    logprobs = tensors["logprobs"][sampled].tolist()
    entropies = tensors["entropies"][sampled].tolist()
    if not all(map(math.isfinite, (*logprobs, *entropies))):
        raise LearnerError("logprobs: the log-probability of a token is not finite")
    engine = [logprob for rollout in rollouts for logprob in rollout.sampled_logprobs]
    rounded = [round(max(0.0, entropy), _DIGITS) for entropy in entropies]
    lengths = [len(turn.ids) for rollout in rollouts for turn in rollout.turns]
    ends = accumulate(lengths, initial=0)
    turns = iter([rounded[start:end] for start, end in pairwise(ends)])
    by_rollout = [[next(turns) for _ in rollout.turns] for rollout in rollouts]
    return GroupScores(by_rollout, k3(engine, logprobs))
