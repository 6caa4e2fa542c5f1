"""A trajectory as the page shows it: token by token, while it grows and after.

Ids are the truth, and text for people is decoded from them here, each token once. Decoding is work
for a thread: a `Telling` is asked in one, and by one reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from agentloop.agent.chat_format import ChatFormat, TextStream
from agentloop.trajectory import (
    CallStatus,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
    VersionSpan,
)

__all__ = ["Telling", "trajectory_of"]

_TAGS = re.compile("(</?(?:reason|think|answer)>)")  # a piece belongs to what it begins in

Entropies = Sequence[Sequence[float]]
"""Of each sampled token, turn by turn, in nats."""


class Telling:
    """One trajectory for one reader, who has been told of it up to a token."""

    def __init__(
        self,
        record: Trajectory,
        chat: ChatFormat | None,
        verdict: Callable[[], Mapping[str, Any]] = dict,
        entropies: Entropies | None = None,
    ) -> None:
        """`verdict` says what was made of it: its reward, its group. Without `chat` text is not
        told token by token."""
        self._record = record
        self._chat = chat
        self._verdict = verdict
        self._entropies = entropies
        self._told: list[_Told] = []  # of each turn
        self._last: Any = None  # what a delta was made of

    def whole(self) -> dict[str, Any]:
        """All there is. What grows meanwhile comes with the next `delta`."""
        record = self._record
        return {
            "id": record.id,
            "created_unix_s": record.created_unix_s,
            "elapsed_s": record.elapsed_s,
            "stop_reason": None,
            "error": record.error,
            "prompt": "" if self._chat is None else self._chat.decode(record.prompt_ids),
            "prompt_tokens": len(record.prompt_ids),
            "turns": [self._turn(index, 0) for index in range(len(record.turns))],
            **self._verdict(),
        }

    def delta(self) -> dict[str, Any] | None:
        """What has come since it was asked last; None: nothing."""
        turns = self._record.turns
        last = (len(turns), *_extent(turns[-1])) if turns else None
        if last == self._last:
            return None
        self._last = last
        first = max(0, len(self._told) - 1)
        known = 0
        if self._told and self._chat is not None:
            # The last one again: what was held back of a character may belong to it by now.
            known = max(0, len(self._told[first].pieces) - 1)
        told = [self._turn(first, known)]
        told += [self._turn(index, 0) for index in range(first + 1, len(turns))]
        return {"turn": first, "token": known, "turns": told}

    def _turn(self, index: int, known: int) -> dict[str, Any]:
        turn = self._record.turns[index]
        is_over = turn.ended_s > 0  # it may be growing: when this is true, all of it is there
        num = min(len(turn.output_ids), len(turn.logprobs))
        entropies = None
        if self._entropies is not None and index < len(self._entropies):
            entropies = self._entropies[index][known:num]
        return {
            "pieces": self._pieces(index, turn, num, is_over=is_over)[known:],
            "ids": turn.output_ids[known:num],
            "logprobs": turn.logprobs[known:num],
            "entropies": entropies,
            "end": str(turn.end) if is_over else None,
            "versions": [asdict(span) for span in turn.versions],
            "servers": list(turn.servers),
            "cached_tokens": turn.cached_tokens,
            "started_s": turn.started_s,
            "first_token_s": turn.first_token_s,
            "generated_s": turn.generated_s,
            "ended_s": turn.ended_s,
            "calls": [asdict(call) for call in turn.calls],
            "results": [asdict(result) for result in turn.results],
            "observation": "" if self._chat is None else self._chat.decode(turn.observation_ids),
            "observation_tokens": len(turn.observation_ids),
        }

    def _pieces(self, index: int, turn: Turn, num: int, *, is_over: bool) -> list[str]:
        """The text that each token brings. One whose character is not whole yet brings none, and
        the last one of a turn what is held back."""
        if index == len(self._told):
            self._told.append(_Told([], None if self._chat is None else TextStream(self._chat)))
        told = self._told[index]
        if not num and is_over:  # of an endpoint of others, which tells no ids
            return [piece for piece in _TAGS.split(turn.text) if piece]
        pieces, new = told.pieces, turn.output_ids[len(told.pieces) : num]
        if told.stream is None:
            pieces += [""] * len(new)
            return [turn.text, *pieces[1:]] if pieces else []
        pieces += [told.stream.feed([token]) for token in new]
        if is_over and pieces:
            pieces[-1] += told.stream.flush()
        return pieces


@dataclass(slots=True)
class _Told:
    pieces: list[str]
    stream: TextStream | None


def _extent(turn: Turn) -> tuple[float, ...]:
    """Of what grows or comes later."""
    grow: tuple[list[Any], ...] = (turn.output_ids, turn.calls, turn.results, turn.servers)
    return (turn.ended_s, len(turn.observation_ids), *map(len, grow))


def trajectory_of(row: Mapping[str, Any]) -> Trajectory:
    """What `Trajectory.to_dict` made plain data of. Raises KeyError, TypeError, ValueError: it is
    none."""
    turns = [
        Turn(
            **{
                **{field.name: one[field.name] for field in fields(Turn) if field.name in one},
                "end": TurnEnd(one["end"]),
                "versions": [VersionSpan(**span) for span in one["versions"]],
                "calls": [ToolCall(**call) for call in one["calls"]],
                "results": [
                    ToolResult(**{**result, "status": CallStatus(result["status"])})
                    for result in one["results"]
                ],
            }
        )
        for one in row["turns"]
    ]
    return Trajectory(
        row["id"],
        row["prompt_ids"],
        turns,
        StopReason(row["stop_reason"]),
        row["error"],
        row["created_unix_s"],
        row["elapsed_s"],
        row.get("answer", ""),  # older records have none
    )
