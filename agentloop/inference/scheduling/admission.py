"""Pure: how many groups may be in flight so that the KV caches hold their peak.

A rollout starts small and grows for minutes: admission by the capacity that is free now would admit
twice what fits later. So the peak of the rollouts in flight is predicted (`Forecast`) and kept
below a fraction of the KV capacity, which shrinks with every retraction and slowly grows back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_NUM_BUCKETS = 32


@dataclass(slots=True)
class _Member:
    num_tokens: int = 0
    bucket: int = 0


class Forecast:
    """Predicts the peak KV usage of the rollouts in flight, from their progress and past lengths.

    Lengths are divided into 32 buckets. For each bucket it counts the tokens by which rollouts grew
    and the rollouts that ended; their quotient is the probability of ending per token. This
    estimate is unbiased at any time, even while only short rollouts have ended, because the
    progress of long ones counts as well. The rollouts in flight are then advanced bucket by bucket
    to find the peak.

    It assumes that all rollouts grow equally fast and ignores time spent in tools.
    """

    def __init__(
        self,
        *,
        longest: int,
        prior: int | None = None,
        weight: float = 50.0,
        window: int = 16_384,
    ) -> None:
        """Create a forecast.

        Args:
            longest: Bound on the tokens of a rollout besides its group's prompt.
            prior: Tokens expected per rollout until about `weight` of them have ended; by default
                two thirds of `longest`, because starting too few is corrected in seconds, starting
                too many in minutes.
            window: After this many rollouts have ended, all counts are halved, because lengths
                change during training.
        """
        self._width = max(1, math.ceil(longest / _NUM_BUCKETS))
        self._grown = [weight * self._width] * _NUM_BUCKETS  # tokens
        self._ended = [weight * self._width / (prior or longest * 2 / 3)] * _NUM_BUCKETS
        self._window = window
        self._num_learnt = 0
        self._present = [0] * _NUM_BUCKETS
        self._members: dict[str, _Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def start(self, key: str) -> None:
        """Add a rollout.

        Raises:
            ValueError: It is already in flight.
        """
        if key in self._members:
            raise ValueError(f"{key} is already in flight")
        self._members[key] = _Member()
        self._present[0] += 1

    def grow(self, key: str, num_tokens: int) -> None:
        """Record that a rollout grew by `num_tokens`, sampled or from tools."""
        member = self._members.get(key)
        if member is None:
            return
        bucket, last = member.bucket, _NUM_BUCKETS - 1
        self._present[bucket] -= 1
        while num_tokens:
            room = (bucket + 1) * self._width - member.num_tokens
            step = num_tokens if bucket == last else min(num_tokens, room)
            self._grown[bucket] += step
            member.num_tokens += step
            num_tokens -= step
            bucket += step == room and bucket < last
        self._present[bucket] += 1
        member.bucket = bucket

    def end(self, key: str, *, is_complete: bool = True) -> None:
        """Remove a rollout; only if it ended normally (`is_complete`) does its length count."""
        member = self._members.pop(key, None)
        if member is None:
            return
        self._present[member.bucket] -= 1
        if is_complete:
            self._ended[member.bucket] += 1
            self._num_learnt += 1
            if self._num_learnt == self._window:
                self._num_learnt = 0
                self._grown = [tokens / 2 for tokens in self._grown]
                self._ended = [count / 2 for count in self._ended]

    def peak(self, num_new: int = 0) -> float:
        """Return the predicted peak of tokens held if `num_new` rollouts start now and none
        later."""
        present = [float(count) for count in self._present]
        present[0] += num_new
        stays = [
            math.exp(-self._width * ended / grown)
            for grown, ended in zip(self._grown, self._ended, strict=True)
        ]
        worst = 0.0
        for _ in range(_NUM_BUCKETS):
            held = sum((bucket + 0.5) * count for bucket, count in enumerate(present) if count)
            worst = max(worst, held)
            present = [
                0.0,
                *(count * stay for count, stay in zip(present[:-1], stays[:-1], strict=True)),
            ]
        return worst * self._width


_CUT = 0.9  # the target is multiplied by this after SGLang has retracted requests
_GROWTH = 0.01  # after a cut, the target grows back by this much per period without retractions


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds on the KV capacity that the rollouts in flight may come to use.

    Attributes:
        target: Groups are admitted while the predicted peak of all rollouts in flight stays below
            this fraction of the servers' KV capacity.
        period_s: Minimum time between two changes of the fraction, so that each can take effect.
        report_ttl_s: The fraction does not grow if the servers' last load reports are older.
    """

    target: float = 1.0
    period_s: float = 2.0
    report_ttl_s: float = 15.0


class Admission:
    """Decides whether groups may start; grows, holds or cuts the target once per period."""

    def __init__(self, limits: AdmissionLimits, forecast: Forecast) -> None:
        self._limits = limits
        self.forecast = forecast
        self.target = limits.target
        self.num_in_flight = 0
        self._changed_s = -math.inf
        self._num_retracted = 0

    def observe(self, now_s: float, num_retracted: int, reported_s: float) -> None:
        """Update the target from the servers' reports.

        Args:
            num_retracted: Requests retracted since the last call.
            reported_s: Time of the last report with new content.
        """
        limits = self._limits
        self._num_retracted += num_retracted
        if now_s - self._changed_s < limits.period_s:
            return
        if self._num_retracted:
            self.target *= _CUT
        elif now_s - reported_s < limits.report_ttl_s and self.target < limits.target:
            self.target = min(limits.target, self.target + _GROWTH)
        else:
            return
        self._changed_s, self._num_retracted = now_s, 0

    def may_start(self, capacity: int, group_size: int, num_prompt: int = 0) -> bool:
        """Return whether another group of `group_size` rollouts may start now.

        `num_prompt` is the number of tokens of its prompt, `capacity` that of all available
        servers. One group may always be in flight.
        """
        if not self.num_in_flight:
            return True
        peak = self.forecast.peak(group_size) + (self.num_in_flight + 1) * num_prompt
        return peak <= self.target * capacity

    def start(self) -> None:
        """Record that a group started; it counts until it ends, whether or not it was allowed to
        start."""
        self.num_in_flight += 1

    def end(self) -> None:
        """Record that a group ended.

        Raises:
            ValueError: More groups ended than started.
        """
        if not self.num_in_flight:
            raise ValueError("more groups ended than started")
        self.num_in_flight -= 1
