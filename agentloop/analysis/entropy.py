"""Find the tokens at which a policy is uncertain: those of the highest entropy.

    group-*.jsonl ──> rollouts ──a learner──> entropies ──top 20% of each rollout──> marked tokens
                                                        ──by kind and id──> most frequent tokens

Source: rStar2-Agent (arXiv 2508.20722, "Analysis of Agentic Reasoning Behaviors"), which inspects
the top 20% of the tokens of 64 trajectories. Some are forking tokens (the model doubts, checks,
tries again), some reflect on a tool's result, and tokens of calls are rarely among them. The paper
classifies by reading; here tokens are classified by position, so a forking token in a turn after a
tool's result counts as reflection.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from pathlib import Path

import anyio.to_thread

from agentloop.environments.tasks.sources import read_jsonl
from agentloop.errors import DataError
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.learner_client.client import Learner, LearnerError
from agentloop.training.learner_client.protocol import ScoreRequest
from agentloop.trajectory import Trajectory

_NUM_ROLLOUTS = 64  # the number the paper analyzes
_SHARE = 0.2  # of each rollout's tokens, as in the paper
_MAX_LOG_RATIO = 20.0  # as in learner/loss.py


class Kind(StrEnum):
    """The position of a token."""

    FORKING = "forking"  # in the text of a turn that does not follow a tool's result
    REFLECTION = "reflection"  # in the text of a turn right after a tool's result
    CALL = "call"  # in a tool call, markers included


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """The T tokens that a policy sampled in a rollout.

    Attributes:
        ids, kinds: [T].
        entropies: [T], in nats, of the distributions that the ids were sampled from.
        mismatch: [T], estimates of the KL divergence, in nats, from the policy that sampled to the
            one that scored (k3, as in the metric mismatch_kl).
    """

    ids: Sequence[int]
    kinds: Sequence[Kind]
    entropies: Sequence[float]
    mismatch: Sequence[float]


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Statistics of one token id within a kind.

    Attributes:
        num, num_marked: number of times sampled, and marked (at least 1).
        mean_entropy: mean over the marked occurrences, in nats.
    """

    id: int
    num: int
    num_marked: int
    mean_entropy: float


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Statistics of the tokens of one kind.

    Attributes:
        mean_entropy: mean over all tokens, marked or not, in nats; 0 without tokens.
        tokens: token ids marked at least once, most often marked first.
    """

    num: int
    num_marked: int
    mean_entropy: float
    tokens: tuple[TokenFigures, ...]


def last_rollouts(run: Path, num_groups: int | None = None) -> dict[int, list[Trajectory]]:
    """Read the rollouts with sampled tokens of a run's last groups, by the group's number.

    Args:
        num_groups: number of groups; None: enough of them to hold 64 rollouts.

    Raises:
        DataError: there are none, or a line is invalid.
    """
    files = sorted((run / "trajectories").glob("group-*.jsonl"), key=_group_number, reverse=True)
    rollouts: dict[int, list[Trajectory]] = {}
    for path in files:
        enough = sum(map(len, rollouts.values())) >= _NUM_ROLLOUTS
        if len(rollouts) == num_groups or (num_groups is None and enough):
            break
        rollouts[_group_number(path)] = _read_group(path)
    if not any(rollouts.values()):
        raise DataError(f"{run}: no tokens were sampled in trajectories/group-*.jsonl")
    return dict(sorted(rollouts.items()))


def _group_number(path: Path) -> int:
    digits = path.stem.removeprefix("group-")
    return int(digits) if digits.isdecimal() else -1


def _read_group(path: Path) -> list[Trajectory]:
    rollouts = []
    for number, row in read_jsonl(path):
        try:
            rollout = Trajectory.from_dict(row["trajectory"])
            if any(len(turn.output_ids) != len(turn.logprobs) for turn in rollout):
                raise ValueError("output_ids and logprobs differ in length")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: line {number}: not a rollout: {error!r}") from error
        if any(rollout.mask):
            rollouts.append(rollout)
    return rollouts


def _kinds(rollout: Trajectory) -> list[Kind]:
    """Return the kind of each sampled token."""
    kinds: list[Kind] = []
    text = Kind.FORKING
    for turn in rollout:
        of_turn = [text] * len(turn.output_ids)
        for call in turn.calls:
            of_turn[call.start : call.end] = [Kind.CALL] * len(of_turn[call.start : call.end])
        kinds += of_turn
        text = Kind.REFLECTION if turn.results and turn.observation_ids else Kind.FORKING
    return kinds


async def score(
    learner: Learner, rollouts: Sequence[Trajectory], folder: Path, *, timeout_s: float
) -> list[ScoredRollout]:
    """Compute the entropies of rollouts with sampled tokens by the learner's weights.

    Batch and result are exchanged as files in `folder`.

    Raises:
        LearnerError: the learner failed, or a result is not finite.
        RunFolderError: a file cannot be written.
    """
    batch, out = folder / "batch", folder / "scores"
    samples = [*map(Sample.of, rollouts)]
    await anyio.to_thread.run_sync(write_batch, batch, samples)
    await learner.ask(ScoreRequest(batch=batch, out=out), timeout_s=timeout_s)
    return await anyio.to_thread.run_sync(_read_scores, out, rollouts)


def _read_scores(path: Path, rollouts: Sequence[Trajectory]) -> list[ScoredRollout]:
    from safetensors.numpy import load

    tensors = load(path.read_bytes())
    ends = accumulate((len(rollout.ids) for rollout in rollouts), initial=0)
    scored = []
    for rollout, (start, end) in zip(rollouts, pairwise(ends), strict=True):
        sampled = [index for index, is_sampled in enumerate(rollout.mask) if is_sampled]
        entropies = tensors["entropies"][start:end][sampled].tolist()
        logprobs = tensors["logprobs"][start:end][sampled].tolist()
        if not all(map(math.isfinite, (*logprobs, *entropies))):
            raise LearnerError("logprobs: the log-probability of a token is not finite")
        ids, engine = rollout.ids, rollout.logprobs
        scored.append(
            ScoredRollout(
                ids=[ids[index] for index in sampled],
                kinds=_kinds(rollout),
                entropies=[max(0.0, entropy) for entropy in entropies],
                mismatch=[
                    _k3(engine[index], logprob)
                    for index, logprob in zip(sampled, logprobs, strict=True)
                ],
            )
        )
    return scored


def _k3(engine: float, scored: float) -> float:
    d = max(-_MAX_LOG_RATIO, min(_MAX_LOG_RATIO, scored - engine))
    return math.expm1(d) - d


def mark_highest(entropies: Sequence[float], share: float = _SHARE) -> list[bool]:
    """Mark the highest `share` (0 to 1) of the entropies, rounded up; of ties, the first."""
    num = math.ceil(round(share * len(entropies), 6))  # 0.1 * 30 is a little more than 3
    by_height = sorted(range(len(entropies)), key=lambda index: (-entropies[index], index))
    chosen = set(by_height[:num])
    return [index in chosen for index in range(len(entropies))]


def analyze(rollouts: Sequence[ScoredRollout]) -> dict[Kind, KindFigures]:
    """Mark the highest entropies of each rollout; return the statistics of every kind."""
    entropies: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    nums = Counter[tuple[Kind, int]]()
    marked: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rollout in rollouts:
        marks = mark_highest(rollout.entropies)
        tokens = zip(rollout.kinds, rollout.ids, rollout.entropies, marks, strict=True)
        for kind, id, entropy, is_marked in tokens:
            entropies[kind].append(entropy)
            nums[kind, id] += 1
            if is_marked:
                marked[kind, id].append(entropy)
    figures = {}
    for kind, values in entropies.items():
        of_kind = [
            TokenFigures(id, nums[kind, id], len(highest), statistics.fmean(highest))
            for (other, id), highest in marked.items()
            if other is kind
        ]
        of_kind.sort(key=lambda token: (-token.num_marked, -token.mean_entropy, token.id))
        figures[kind] = KindFigures(
            num=len(values),
            num_marked=sum(token.num_marked for token in of_kind),
            mean_entropy=statistics.fmean(values) if values else 0.0,
            tokens=tuple(of_kind),
        )
    return figures
