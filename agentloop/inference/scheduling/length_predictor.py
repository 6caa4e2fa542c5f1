"""Pure: predicts how many tokens a turn will still generate, from the lengths of earlier turns."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque

_MAX_GROUPS = 4096  # groups whose lengths are remembered; beyond it the oldest are forgotten


class LengthPredictor:
    """Predicts the length of a turn from its siblings' turns or, if they are few, from recent ones.

    The prediction is a quantile of the remaining length among turns that got as far as this one, so
    that a long turn is not expected to end at once because most turns are short. The quantile need
    not be high: of many sequences that share a cache few are long at the same time, and parked
    tokens are a buffer. It was chosen with bench/router.py.
    """

    def __init__(
        self, *, quantile: float = 0.4, prior: int = 512, window: int = 2048, min_samples: int = 8
    ) -> None:
        """Create a predictor; `prior` is used if fewer than `min_samples` turns got that far."""
        self._quantile = quantile
        self._prior = prior
        self._min_samples = min_samples
        self._window = window
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._groups: OrderedDict[str, list[int]] = OrderedDict()

    def learn(self, group: str, num_tokens: int) -> None:
        """Record that a turn of `group` ended normally after `num_tokens`."""
        if len(self._recent) == self._window:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]
        self._recent.append(num_tokens)
        insort(self._sorted, num_tokens)
        if group:
            lengths = self._groups.setdefault(group, [])
            if len(lengths) < self._window:
                insort(lengths, num_tokens)
            if len(self._groups) > _MAX_GROUPS:
                self._groups.popitem(last=False)

    def remaining(self, group: str, num_so_far: int = 0) -> int:
        """Return the expected number of tokens to come after `num_so_far`; at least 1."""
        for lengths in (self._groups.get(group, ()), self._sorted):
            first = bisect_right(lengths, num_so_far)
            num_longer = len(lengths) - first
            if num_longer >= self._min_samples:
                return lengths[first + int(self._quantile * (num_longer - 1))] - num_so_far
        return self._prior
