"""Where a policy hesitates: its tokens of the highest entropy, and what they do there. Pure.

    entropies ──the top of each rollout──> marked tokens ──by kind, by id──> the most frequent ones

After rStar2-Agent (arXiv 2508.20722, "Analysis of Agentic Reasoning Behaviors"): of each of 64
trajectories the top 20% of tokens are looked at. Some fork (the model doubts, checks, tries again),
some reflect on what a tool has answered, and those of calls are rarely among them. There, people
read them; here they are told apart by where they stand, so a fork in a turn after a tool's result
counts as a reflection.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "Analysis",
    "Kind",
    "KindFigures",
    "Place",
    "Sampled",
    "TokenFigures",
    "analyze",
    "k3",
    "marked",
    "nearest_version",
]

_MAX_LOG_RATIO = 20.0  # as in learner/loss.py


class Kind(StrEnum):
    """Where a token stands."""

    FORKING = "forking"  # in the text of a turn before which no tool has answered
    REFLECTION = "reflection"  # in the text of a turn right after a tool's result
    CALL = "call"  # in a tool call, markers included


@dataclass(frozen=True, slots=True)
class Sampled:
    """A turn of T sampled tokens.

    Attributes:
        ids: [T].
        entropies: [T], in nats, of the distributions that they were drawn from.
        calls: where its tool calls begin and end in `ids`.
        after_result: whether a tool's result stands right before it.
    """

    ids: Sequence[int]
    entropies: Sequence[float]
    calls: Sequence[tuple[int, int]] = ()
    after_result: bool = False

    @property
    def kinds(self) -> list[Kind]:
        """[T]."""
        text = Kind.REFLECTION if self.after_result else Kind.FORKING
        kinds = [text] * len(self.ids)
        for start, end in self.calls:
            kinds[start:end] = [Kind.CALL] * len(kinds[start:end])
        return kinds


@dataclass(frozen=True, slots=True)
class Place:
    """Numbers, from 0: of a rollout, of a turn in it, of a token in that."""

    rollout: int
    turn: int
    token: int


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Of one token among those of a kind.

    Attributes:
        num, num_marked: how often it was sampled; how often it is marked, which is once at least.
        mean_entropy: where it is marked.
        highest: where its entropy is the highest.
    """

    id: int
    num: int
    num_marked: int
    mean_entropy: float
    highest: Place


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Of the tokens of a kind.

    Attributes:
        mean_entropy: of all of them, marked or not; 0 where there is none.
        tokens: those that are marked at all, the most often marked ones first.
    """

    num: int
    num_marked: int
    mean_entropy: float
    tokens: tuple[TokenFigures, ...]


@dataclass(frozen=True, slots=True)
class Analysis:
    """
    Attributes:
        num_rollouts: with a sampled token at least.
        threshold: the lowest entropy that is marked; the median over the rollouts.
        kinds: each of them, also where there is none.
    """

    num_rollouts: int
    num: int
    num_marked: int
    mean_entropy: float
    threshold: float
    kinds: Mapping[Kind, KindFigures]


def marked(entropies: Sequence[float], share: float) -> list[bool]:
    """The `share` of them, from 0 to 1, that is highest, rounded up; of equal ones the first."""
    num = math.ceil(round(share * len(entropies), 6))  # 0.1 * 30 is a little more than 3
    by_height = sorted(range(len(entropies)), key=lambda index: (-entropies[index], index))
    chosen = set(by_height[:num])
    return [index in chosen for index in range(len(entropies))]


def analyze(rollouts: Iterable[Sequence[Sampled]], share: float = 0.2) -> Analysis:
    """Mark the top `share` of each rollout's tokens, and count."""
    counts: dict[Kind, _Counts] = {kind: _Counts() for kind in Kind}
    thresholds = []
    for number, turns in enumerate(rollouts):
        entropies = [entropy for turn in turns for entropy in turn.entropies]
        marks = iter(marks_list := marked(entropies, share))
        above = [entropy for entropy, mark in zip(entropies, marks_list, strict=True) if mark]
        if above:
            thresholds.append(min(above))
        for index, turn in enumerate(turns):
            for at, kind in enumerate(turn.kinds):
                place = Place(number, index, at)
                counts[kind].add(turn.ids[at], turn.entropies[at], next(marks), place)
    kinds = {kind: count.figures() for kind, count in counts.items()}
    num = sum(one.num for one in kinds.values())
    total = math.fsum(one.total for one in counts.values())
    return Analysis(
        num_rollouts=len(thresholds),
        num=num,
        num_marked=sum(one.num_marked for one in kinds.values()),
        mean_entropy=total / num if num else 0.0,
        threshold=statistics.median(thresholds) if thresholds else 0.0,
        kinds=kinds,
    )


@dataclass(slots=True)
class _Counts:
    """Of a kind, while it is counted."""

    num: int = 0
    total: float = 0.0
    by_id: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    marked: dict[int, list[tuple[float, Place]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, id: int, entropy: float, mark: bool, place: Place) -> None:
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
                num_marked=len(found),
                mean_entropy=statistics.fmean(entropy for entropy, _ in found),
                highest=max(found, key=lambda one: one[0])[1],
            )
            for id, found in self.marked.items()
        ]
        tokens.sort(key=lambda one: (-one.num_marked, -one.mean_entropy, one.id))
        return KindFigures(
            num=self.num,
            num_marked=sum(one.num_marked for one in tokens),
            mean_entropy=self.total / self.num if self.num else 0.0,
            tokens=tuple(tokens),
        )


def nearest_version(sampled: Mapping[int, int], kept: Iterable[int]) -> int:
    """Of the versions of the weights that are `kept`, the one that is nearest to those that have
    `sampled` so many tokens each; of equal ones the newest.

    Raises:
        ValueError: none is kept.
    """

    def distance(version: int) -> int:
        return sum(abs(version - one) * num for one, num in sampled.items())

    return min(sorted(kept, reverse=True), key=distance)


def k3(engine: Sequence[float], scored: Sequence[float]) -> float:
    """The mean over tokens of exp(d) - d - 1 with d = scored - engine: an estimate of the KL from
    what sampled them to what scored them, as the metric mismatch_kl; 0 without tokens."""
    found = []
    for one, other in zip(engine, scored, strict=True):
        d = max(-_MAX_LOG_RATIO, min(_MAX_LOG_RATIO, other - one))
        found.append(math.expm1(d) - d)
    return statistics.fmean(found) if found else 0.0
