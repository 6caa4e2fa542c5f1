"""Find the tokens at which a policy is uncertain: those of the highest entropy. Pure.

    entropies ──top share of each rollout──> marked tokens ──by kind and id──> most frequent tokens

Source: rStar2-Agent (arXiv 2508.20722, "Analysis of Agentic Reasoning Behaviors"), which inspects
the top 20% of the tokens of 64 trajectories. Some are forking tokens (the model doubts, checks,
tries again), some reflect on a tool's result, and tokens of calls are rarely among them. The paper
classifies by reading; here tokens are classified by position, so a forking token in a turn after a
tool's result counts as reflection.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_MAX_LOG_RATIO = 20.0  # as in learner/loss.py


class Kind(StrEnum):
    """The position of a token."""

    FORKING = "forking"  # in the text of a turn that does not follow a tool's result
    REFLECTION = "reflection"  # in the text of a turn right after a tool's result
    CALL = "call"  # in a tool call, markers included


@dataclass(frozen=True, slots=True)
class Sampled:
    """A turn of T sampled tokens.

    Attributes:
        ids: [T].
        entropies: [T], in nats, of the distributions that the ids were sampled from.
        calls: (start, end) of each tool call in `ids`.
        after_result: whether the turn directly follows a tool's result.
    """

    ids: Sequence[int]
    entropies: Sequence[float]
    calls: Sequence[tuple[int, int]] = ()
    after_result: bool = False

    @property
    def kinds(self) -> list[Kind]:
        """Return the kind of each token, [T]."""
        text = Kind.REFLECTION if self.after_result else Kind.FORKING
        kinds = [text] * len(self.ids)
        for start, end in self.calls:
            kinds[start:end] = [Kind.CALL] * len(kinds[start:end])
        return kinds


@dataclass(frozen=True, slots=True)
class TokenPosition:
    """The position of a token: indices of its rollout, turn and token, from 0."""

    rollout: int
    turn: int
    token: int


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Statistics of one token id within a kind.

    Attributes:
        num, num_marked: number of times sampled, and marked (at least 1).
        mean_entropy: mean over the marked occurrences, in nats.
        highest: the occurrence of the highest entropy.
    """

    id: int
    num: int
    num_marked: int
    mean_entropy: float
    highest: TokenPosition


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


@dataclass(frozen=True, slots=True)
class Analysis:
    """The entropy analysis of a set of rollouts.

    Attributes:
        num_rollouts: number of rollouts with at least one sampled token.
        threshold: median over the rollouts of the lowest marked entropy, in nats.
        kinds: statistics of every kind, including those without tokens.
    """

    num_rollouts: int
    num: int
    num_marked: int
    mean_entropy: float
    threshold: float
    kinds: Mapping[Kind, KindFigures]


def mark_highest(entropies: Sequence[float], share: float) -> list[bool]:
    """Mark the highest `share` (0 to 1) of the entropies, rounded up; of ties, the first."""
    num = math.ceil(round(share * len(entropies), 6))  # 0.1 * 30 is a little more than 3
    by_height = sorted(range(len(entropies)), key=lambda index: (-entropies[index], index))
    chosen = set(by_height[:num])
    return [index in chosen for index in range(len(entropies))]


def analyze(rollouts: Iterable[Sequence[Sampled]], share: float = 0.2) -> Analysis:
    """Mark the top `share` of each rollout's tokens and compute the statistics."""
    counts: dict[Kind, _Counts] = {kind: _Counts() for kind in Kind}
    thresholds = []
    for number, turns in enumerate(rollouts):
        entropies = [entropy for turn in turns for entropy in turn.entropies]
        marks = iter(marks_list := mark_highest(entropies, share))
        above = [entropy for entropy, mark in zip(entropies, marks_list, strict=True) if mark]
        if above:
            thresholds.append(min(above))
        for index, turn in enumerate(turns):
            for at, kind in enumerate(turn.kinds):
                place = TokenPosition(number, index, at)
                counts[kind].add(turn.ids[at], turn.entropies[at], next(marks), place)
    kinds = {kind: count.figures() for kind, count in counts.items()}
    num = sum(figures.num for figures in kinds.values())
    total = math.fsum(count.total for count in counts.values())
    return Analysis(
        num_rollouts=len(thresholds),
        num=num,
        num_marked=sum(figures.num_marked for figures in kinds.values()),
        mean_entropy=total / num if num else 0.0,
        threshold=statistics.median(thresholds) if thresholds else 0.0,
        kinds=kinds,
    )


@dataclass(slots=True)
class _Counts:
    """Running counts of one kind."""

    num: int = 0
    total: float = 0.0
    by_id: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    marked: dict[int, list[tuple[float, TokenPosition]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, id: int, entropy: float, mark: bool, place: TokenPosition) -> None:
        self.num += 1
        self.total += entropy
        self.by_id[id] += 1
        if mark:
            self.marked[id].append((entropy, place))

    def figures(self) -> KindFigures:
        tokens = [
            TokenFigures(
                id=id,
                num=self.by_id[id],
                num_marked=len(occurrences),
                mean_entropy=statistics.fmean(entropy for entropy, _ in occurrences),
                highest=max(occurrences, key=lambda occurrence: occurrence[0])[1],
            )
            for id, occurrences in self.marked.items()
        ]
        tokens.sort(key=lambda token: (-token.num_marked, -token.mean_entropy, token.id))
        return KindFigures(
            num=self.num,
            num_marked=sum(token.num_marked for token in tokens),
            mean_entropy=self.total / self.num if self.num else 0.0,
            tokens=tuple(tokens),
        )


def nearest_version(sampled: Mapping[int, int], kept: Iterable[int]) -> int:
    """Return the kept version that is nearest to the versions that sampled; of ties, the newest.

    Args:
        sampled: number of tokens sampled under each version.
        kept: versions whose weights are kept.

    Raises:
        ValueError: `kept` is empty.
    """

    def distance(version: int) -> int:
        return sum(abs(version - sampled_version) * num for sampled_version, num in sampled.items())

    return min(sorted(kept, reverse=True), key=distance)


def k3(engine: Sequence[float], scored: Sequence[float]) -> float:
    """Estimate the KL divergence per token from the sampling to the scoring policy, in nats.

    This is the mean of exp(d) - d - 1 with d = scored - engine, as in the metric mismatch_kl; 0
    without tokens.
    """
    terms = []
    for engine_logprob, scored_logprob in zip(engine, scored, strict=True):
        d = max(-_MAX_LOG_RATIO, min(_MAX_LOG_RATIO, scored_logprob - engine_logprob))
        terms.append(math.expm1(d) - d)
    return statistics.fmean(terms) if terms else 0.0
