"""gpt-oss: messages with headers, of which one kind is a call.

A message is `<|start|>ROLE<|channel|>CHANNEL<|message|>TEXT<|end|>`; a generated turn begins after
`<|start|>assistant`. A header with `to=functions.NAME` makes it a call, which `<|call|>` ends.
(OpenAI's description of the harmony format.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agentloop.agent.channels import Channel, Markup
from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.values import Schemas, decode_arguments
from agentloop.agent.text_stream import TokenCodec
from agentloop.trajectory import ToolCall

__all__ = ["HARMONY"]

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT_RE = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL_RE = re.compile(r"<\|channel\|>\s*(\w+)")
_MARKUP_RE = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
_MAX_CALL_TOKENS = 65_536


class _Calls:
    """Finds the calls of one turn by the headers of its messages."""

    def __init__(self, chat: TokenCodec, schemas: Schemas, id_prefix: str) -> None:
        self._chat = chat
        self._id_prefix = id_prefix
        self._message_id = chat.token_id(_MESSAGE)
        self._end_ids = {id for end in _ENDS if (id := chat.token_id(end)) is not None}
        self._position = self._start = 0
        self._count = 0
        self._header: list[int] = []
        self._name: str | None = None  # of the call whose arguments are being written
        self._text: list[int] | None = None  # the message's text; None: in a header

    def feed(self, ids: Sequence[int]) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for token in ids:
            if token in self._end_ids:
                calls += self._end(None, self._position + 1)
                self._header, self._start = [], self._position
            elif self._text is None and token == self._message_id:
                recipient = _RECIPIENT_RE.search(self._chat.decode(self._header))
                self._name, self._text = recipient[1] if recipient else None, []
            elif self._text is None:
                self._header.append(token)
            elif self._name is not None:
                self._text.append(token)
                if len(self._text) > _MAX_CALL_TOKENS:
                    reason = f"it exceeds {_MAX_CALL_TOKENS} tokens"
                    calls += self._end(reason, self._position + 1)
            self._position += 1
        return calls

    def finish(self) -> list[ToolCall]:
        return self._end("the turn ended before it closed", self._position)

    def _end(self, reason: str | None, end: int) -> list[ToolCall]:
        """End a message."""
        text, name = self._text, self._name
        self._text = self._name = None
        if text is None or name is None:
            return []
        raw = self._chat.decode(text)
        call_id = f"{self._id_prefix}_{self._count}"
        self._count += 1
        if reason is not None:
            error: str | None = f"the tool call was not closed with <|call|>: {reason}"
            return [ToolCall(call_id, "", {}, raw, self._start, end, error)]
        arguments, error = decode_arguments(raw)
        return [ToolCall(call_id, name, arguments, raw, self._start, end, error)]


class HarmonyChannels:
    """Splits a turn's text by the channels that its headers name."""

    def __init__(self) -> None:
        self._held = ""
        self._header = ""
        self._channel: Channel | None = None  # None: a call or an unknown channel, not shown
        self._is_header = True

    @property
    def channel(self) -> Channel | None:
        return None if self._is_header else self._channel

    def feed(self, text: str) -> Iterator[tuple[Channel, str]]:
        self._held += text
        start = 0
        for match in _MARKUP_RE.finditer(self._held):
            yield from self._emit(self._held[start : match.start()])
            self._switch(match.group())
            start = match.end()
        unread = self._held[start:]
        cut = unread.rfind("<")
        if cut < 0 or not _begins_markup(unread[cut:]):
            cut = len(unread)
        self._held = unread[cut:]
        yield from self._emit(unread[:cut])

    def flush(self) -> Iterator[tuple[Channel, str]]:
        """Yield the text that was held back, now that the turn is over."""
        held, self._held = self._held, ""
        yield from self._emit(held)

    def _emit(self, text: str) -> Iterator[tuple[Channel, str]]:
        if self._is_header:
            self._header += text
        elif text and self._channel is not None:
            yield self._channel, text

    def _switch(self, markup: str) -> None:
        if markup == _MESSAGE and self._is_header:
            self._is_header = False
            match = _CHANNEL_RE.search(self._header)
            channel = match[1] if match else "final"
            if _RECIPIENT_RE.search(self._header):
                self._channel = None
            else:
                is_thought = channel == "analysis"
                self._channel = Channel.REASONING if is_thought else Channel.CONTENT
        elif markup in _ENDS:
            self._is_header, self._header = True, ""
        elif self._is_header:
            self._header += markup


def _begins_markup(text: str) -> bool:
    names = ("start", "channel", "constrain", "message", "end", "call", "return")
    return any(f"<|{name}|>".startswith(text) for name in names)


HARMONY = Family(
    name="harmony",
    models="gpt-oss",
    sglang_parser="gpt-oss",
    call_form=CallForm(
        begin="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        is_only_one=True,
    ),
    signs=("<|channel|>", "<|message|>", "<|call|>"),
    make_calls=_Calls,
    markup=Markup(thoughts=(), calls=(), others=_TAGS),
    make_channels=lambda reasoning, has_tools: HarmonyChannels(),
    end_of_calls="<|call|>",
)
