"""gpt-oss: messages with headers, of which one kind is a call.

A message is `<|start|>ROLE<|channel|>CHANNEL<|message|>TEXT<|end|>`; a generated turn begins after
`<|start|>assistant`. A header with `to=functions.NAME` makes it a call, which `<|call|>` ends.
(OpenAI's description of the harmony format.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agentloop.agent.channels import Channel, Channels, Markup
from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.values import Schemas, decode_arguments
from agentloop.agent.text_stream import TokenCodec
from agentloop.trajectory import ToolCall

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_RECIPIENT_RE = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL_RE = re.compile(r"<\|channel\|>\s*(\w+)")
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


class HarmonyChannels(Channels):
    """Splits a turn's text by the channels that its headers name."""

    def __init__(self) -> None:
        super().__init__(reasoning=False, markup=Markup(thoughts=(), calls=(), others=_TAGS))
        self._header: str | None = ""  # None: in a message's text

    @property
    def channel(self) -> Channel | None:
        return super().channel if self._header is None else None

    def _emit(self, text: str) -> Iterator[tuple[Channel, str]]:
        if self._header is None:
            yield from super()._emit(text)
        else:
            self._header += text

    def _switch(self, tag: str) -> None:
        if tag in _ENDS:
            self._header = ""
        elif self._header is None:
            return
        elif tag != _MESSAGE:
            self._header += tag
        else:
            match = _CHANNEL_RE.search(self._header)
            is_thought = match is not None and match[1] == "analysis"
            self._channel = Channel.REASONING if is_thought else Channel.CONTENT
            self._in_call = _RECIPIENT_RE.search(self._header) is not None
            self._header = None


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
