"""Pure: how many groups may be in flight, so that what they grow to fits into the KV caches.

A rollout that starts is small and grows for minutes: admission by the room that is free now lets in
twice what fits later. So the question is what those in flight will hold at their peak (`Forecast`),
and that is kept below a part of the KV which shrinks with every retraction and grows back slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pydantic

__all__ = ["Admission", "AdmissionSettings", "Forecast"]

_NUM_BUCKETS = 32


@dataclass(slots=True)
class _Member:
    num_tokens: int = 0
    bucket: int = 0


class Forecast:
    """What the rollouts in flight will hold at most, from how far they are and when others ended.

    Lengths are cut into 32 buckets. For each it counts the tokens that rollouts grew by while they
    were in it, and how many of them ended: the second by the first is how likely one is to end per
    token there. That is right at any time, also while only the short ones have ended, since the
    long ones count with the way that they have come. What is in flight is then moved on, bucket by
    bucket, and the peak is looked up.

    It assumes that all grow equally fast, and does not wait for tools.
    """

    def __init__(
        self,
        *,
        longest: int,
        prior: int | None = None,
        weight: float = 50.0,
        window: int = 16_384,
    ) -> None:
        """No rollout holds more than `longest` tokens of its own; before `weight` of them have
        ended, `prior` tokens are expected of each (two thirds of the longest: to start too few at
        first is mended in seconds, too many in minutes). After every `window` that have ended, all
        that was learnt counts half: lengths change as a model is trained."""
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
        """A rollout is in flight. Raises ValueError: it was already."""
        if key in self._members:
            raise ValueError(f"{key} is in flight already")
        self._members[key] = _Member()
        self._present[0] += 1

    def grow(self, key: str, num_tokens: int) -> None:
        """It holds so many more, sampled ones and those of tools."""
        member = self._members.get(key)
        if member is None:
            return
        bucket, last = member.bucket, _NUM_BUCKETS - 1
        self._present[bucket] -= 1
        while num_tokens:
            left = (bucket + 1) * self._width - member.num_tokens
            step = num_tokens if bucket == last else min(num_tokens, left)
            self._grown[bucket] += step
            member.num_tokens += step
            num_tokens -= step
            bucket += step == left and bucket < last
        self._present[bucket] += 1
        member.bucket = bucket

    def end(self, key: str, *, whole: bool = True) -> None:
        """It ended; `whole` says by itself, so that its length tells something."""
        member = self._members.pop(key, None)
        if member is None:
            return
        self._present[member.bucket] -= 1
        if whole:
            self._ended[member.bucket] += 1
            self._num_learnt += 1
            if self._num_learnt == self._window:
                self._num_learnt = 0
                self._grown = [tokens / 2 for tokens in self._grown]
                self._ended = [count / 2 for count in self._ended]

    def peak(self, num_new: int = 0) -> float:
        """Tokens held at the worst moment to come, if `num_new` start now and none after them."""
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


class AdmissionSettings(pydantic.BaseModel):
    """How much of the KV caches the rollouts in flight may come to hold."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    target: float = pydantic.Field(
        1.0, gt=0, le=2, description="The part of the KV that rollouts may fill at their peak."
    )
    growth: float = pydantic.Field(
        0.01, ge=0, description="What is added to that part per period without retractions."
    )
    cut: float = pydantic.Field(
        0.9, gt=0, lt=1, description="By which factor it falls after a retraction."
    )
    period_s: float = pydantic.Field(
        2.0, gt=0, description="How long a change is left to show its effect."
    )
    report_ttl_s: float = pydantic.Field(
        15.0, gt=0, description="Nothing grows when servers have told nothing new for so long."
    )


class Admission:
    """Which groups may start: grow, hold or cut once per period."""

    def __init__(self, settings: AdmissionSettings, forecast: Forecast) -> None:
        self._settings = settings
        self.forecast = forecast
        self.target = settings.target
        self.num_in_flight = 0
        self._changed_s = -math.inf
        self._num_retracted = 0

    def observe(self, now: float, num_retracted: int, reported_s: float) -> str:
        """What servers reported: "grow", "hold" or "cut", for the log.

        Args:
            num_retracted: requests, since the last call.
            reported_s: when a server last told anything new.
        """
        settings = self._settings
        self._num_retracted += num_retracted
        if now - self._changed_s < settings.period_s:
            return "hold"
        if self._num_retracted:
            change, self.target = "cut", self.target * settings.cut
        elif now - reported_s < settings.report_ttl_s and self.target < settings.target:
            change, self.target = "grow", min(settings.target, self.target + settings.growth)
        else:
            return "hold"
        self._changed_s, self._num_retracted = now, 0
        return change

    def may_start(self, capacity: int, group_size: int, num_prompt: int = 0) -> bool:
        """Whether one more group may start now, of `group_size` with a prompt of `num_prompt`
        tokens. `capacity` is that of all servers that take requests. One may always be in flight.
        """
        if not self.num_in_flight:
            return True
        peak = self.forecast.peak(group_size) + (self.num_in_flight + 1) * num_prompt
        return peak <= self.target * capacity

    def start(self) -> None:
        """A group started. It counts until it ends, also where it was not free to."""
        self.num_in_flight += 1

    def end(self) -> None:
        """A group ended. Raises ValueError: more ended than started."""
        if not self.num_in_flight:
            raise ValueError("more groups ended than started")
        self.num_in_flight -= 1
