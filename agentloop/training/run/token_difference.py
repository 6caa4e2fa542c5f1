"""Compare the log-probabilities of engine and learner, token by token. Pure.

Both score the same sampled tokens. With the same weights, the difference is that of their kernels
and types; tokens that older weights sampled also differ by what has been learned since.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_CONTEXT = 8  # tokens shown before one of the worst


@dataclass(frozen=True, slots=True)
class ScoredConversation:
    """A conversation of T tokens, scored by both.

    Attributes:
        ids, mask, engine, learner: [T]; log-probabilities count where the mask is 1.
        versions: [T], of the weights that sampled each token.
    """

    name: str
    ids: Sequence[int]
    mask: Sequence[int]
    engine: Sequence[float]
    learner: Sequence[float]
    versions: Sequence[str | None]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A sampled token: its position in a conversation, and both log-probabilities."""

    conversation: str
    index: int
    id: int
    before: tuple[int, ...]
    version: str | None
    engine: float
    learner: float

    @property
    def difference(self) -> float:
        """Return by how much the learner's log-probability is higher."""
        return self.learner - self.engine

    @property
    def size(self) -> float:
        """The absolute difference; one that is not a number counts as infinite."""
        return math.inf if math.isnan(self.difference) else abs(self.difference)


@dataclass(frozen=True, slots=True)
class TokenDifferences:
    """Absolute differences of log-probabilities, in nats.

    Attributes:
        mean, p99, max: over all tokens; 0 without tokens.
        versions: number of tokens by the version of the weights that sampled them.
        worst: the tokens with the largest differences, the largest first.
    """

    num: int
    mean: float
    p99: float
    max: float
    versions: Mapping[str, int]
    worst: tuple[ScoredToken, ...]


def differences_of(
    conversations: Sequence[ScoredConversation], *, num_worst: int = 10
) -> TokenDifferences:
    """Summarize the differences at all sampled tokens."""
    sizes = sorted(token.size for token in _scored_tokens(conversations))
    if not sizes:
        return TokenDifferences(0, 0.0, 0.0, 0.0, {}, ())
    return TokenDifferences(
        num=len(sizes),
        mean=math.fsum(sizes) / len(sizes),
        p99=sizes[math.ceil(0.99 * len(sizes)) - 1],
        max=sizes[-1],
        versions=Counter(token.version or "?" for token in _scored_tokens(conversations)),
        worst=tuple(
            heapq.nlargest(num_worst, _scored_tokens(conversations), lambda token: token.size)
        ),
    )


def _scored_tokens(conversations: Sequence[ScoredConversation]) -> Iterator[ScoredToken]:
    for conversation in conversations:
        for index, is_sampled in enumerate(conversation.mask):
            if is_sampled:
                yield ScoredToken(
                    conversation=conversation.name,
                    index=index,
                    id=conversation.ids[index],
                    before=tuple(conversation.ids[max(0, index - _CONTEXT) : index]),
                    version=conversation.versions[index],
                    engine=conversation.engine[index],
                    learner=conversation.learner[index],
                )
