"""A trajectory as the page shows it: token by token, during and after the rollout.

Text is decoded from the token ids, each token once. Decoding may take long, so call the methods of
`RecordReader` in a thread, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.text_stream import TextStream
from agentloop.trajectory import Message, Trajectory, Turn

_TAGS = re.compile("(</?(?:reason|think|answer)>)")  # each tag starts a new piece
_COPIED = ("cached_tokens", "started_s", "placed_s", "first_token_s", "generated_s", "ended_s")


class RecordReader:
    """Sends one trajectory to one reader, remembering how much has been sent."""

    def __init__(
        self,
        record: Trajectory,
        chat: ChatFormat | None,
        verdict: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """
        Args:
            chat: Decodes tokens; if None, text is not sent token by token.
            verdict: Returns further fields, such as reward and group.
        """
        self._record = record
        self._chat = chat
        self._verdict = verdict
        self._decoded: list[_DecodedTurn] = []
        self._last: tuple[float, ...] | None = None  # extent of the last delta

    def whole(self) -> dict[str, Any]:
        """Return everything so far; anything added since is in the next `delta`."""
        record = self._record
        return {
            "id": record.id,
            "created_unix_s": record.created_unix_s,
            "elapsed_s": record.elapsed_s,
            "stop_reason": None,
            "error": record.error,
            "prompt": self._text(record.prompt_ids) or _in_words(record.messages_between[0]),
            "prompt_tokens": len(record.prompt_ids),
            "turns": [self._turn(index, 0) for index in range(len(record.turns))],
            **self._verdict(),
        }

    def delta(self) -> dict[str, object] | None:
        """Return the changes since the last call, or None if there are none."""
        turns = self._record.turns
        last = (len(turns), *_extent(turns[-1])) if turns else None
        if last == self._last:
            return None
        self._last = last
        first = max(0, len(self._decoded) - 1)
        num_known = 0
        if self._decoded and self._chat is not None:
            # Repeat the last piece: bytes of a character that were held back may now belong to it.
            num_known = max(0, len(self._decoded[first].pieces) - 1)
        changes = [self._turn(first, num_known)]
        changes += [self._turn(index, 0) for index in range(first + 1, len(turns))]
        return {"turn": first, "token": num_known, "turns": changes}

    def _turn(self, index: int, num_known: int) -> dict[str, object]:
        turn = self._record.turns[index]
        is_over = turn.ended_s > 0  # read this first: once it is true, the turn is complete
        num = min(len(turn.output_ids), len(turn.logprobs))
        pieces = self._pieces(index, turn, num, is_over=is_over)
        calls = [asdict(call) for call in turn.calls]
        if not num and is_over:  # without ids, each call is a piece after those of the text
            for start, call in enumerate(calls, len(pieces) - len(calls)):
                call |= {"start": start, "end": start + 1}
        heard = self._record.messages_between[index + 1 : index + 2]  # none while it speaks
        return {
            "pieces": pieces[num_known:],
            "ids": turn.output_ids[num_known:num],
            "logprobs": turn.logprobs[num_known:num],
            "end": str(turn.end) if is_over else None,
            "versions": [asdict(span) for span in turn.versions],
            "servers": list(turn.servers),
            **{name: getattr(turn, name) for name in _COPIED},
            "calls": calls,
            "results": [asdict(result) for result in turn.results],
            "observation": self._text(turn.observation_ids) or "".join(map(_in_words, heard)),
            "observation_tokens": len(turn.observation_ids),
        }

    def _text(self, ids: Sequence[int]) -> str:
        return "" if self._chat is None else self._chat.decode(ids)

    def _pieces(self, index: int, turn: Turn, num: int, *, is_over: bool) -> list[str]:
        """Return the text of each token.

        Without ids, return pieces of the text and then the calls.

        A token that ends within a character has an empty text; at the end of the turn, the last
        token gets the text that was held back.
        """
        if index == len(self._decoded):
            self._decoded.append(
                _DecodedTurn([], None if self._chat is None else TextStream(self._chat))
            )
        decoded = self._decoded[index]
        if not num and is_over:  # from an endpoint or a script, which returns no ids
            texts = [piece for piece in _TAGS.split(turn.text) if piece]
            return [*texts, *(call.raw for call in turn.calls)]
        pieces, new = decoded.pieces, turn.output_ids[len(decoded.pieces) : num]
        if decoded.stream is None:
            pieces += [""] * len(new)
            return [turn.text, *pieces[1:]] if pieces else []
        pieces += [decoded.stream.feed([token]) for token in new]
        if is_over and pieces:
            pieces[-1] += decoded.stream.flush()
        return pieces


@dataclass(slots=True)
class _DecodedTurn:
    pieces: list[str]
    stream: TextStream | None


def _in_words(messages: Sequence[Message]) -> str:
    return "\n\n".join(
        f"{message.get('role')}: {message.get('content') or ''}" for message in messages
    )


def _extent(turn: Turn) -> tuple[float, ...]:
    """Return the sizes of the fields of a turn that may still grow."""
    grow: tuple[Sized, ...] = (turn.output_ids, turn.calls, turn.results, turn.servers)
    return (turn.ended_s, len(turn.observation_ids), *map(len, grow))
