"""Llama 3: a JSON object that is the whole turn, or a Python list of calls.

Nothing marks a call. It is one if tools were given, and the turn begins with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from agentloop.agent.channels import Channel, Channels, Markup, Splitter
from agentloop.agent.formats.family import CallForm, CallStream, Family
from agentloop.agent.formats.grammars import Grammar, JsonObjects, PythonCalls
from agentloop.agent.formats.regions import RegionStream
from agentloop.agent.formats.values import Schemas
from agentloop.agent.text_stream import TokenCodec

_PYTHON_TAG = "<|python_tag|>"
_MARKUP = Markup(thoughts=(("<think>", "</think>"),), calls=(), others=(_PYTHON_TAG,))


def _json() -> Grammar:
    return JsonObjects(is_text_without=True)


def _stream(make: Callable[[], Grammar]) -> Callable[[TokenCodec, Schemas, str], CallStream]:
    def calls(chat: TokenCodec, schemas: Schemas, id_prefix: str) -> CallStream:
        def grammar() -> Grammar:
            made = make()
            made.is_over = not schemas
            return made

        return RegionStream(
            chat, grammar, opening=None, closing=None, skipped=_PYTHON_TAG, id_prefix=id_prefix
        )

    return calls


class UnmarkedChannels:
    """Withholds a turn that begins as a call does until it is known whether it is one."""

    def __init__(self, make: Callable[[], Grammar], starts: str) -> None:
        self._grammar = make()
        self._starts = starts
        self._channels = Channels(reasoning=False, markup=_MARKUP)
        self._held: str | None = ""  # None: the turn is text

    @property
    def channel(self) -> Channel | None:
        """Implement `Splitter`."""
        return self._channels.channel if self._held is None else None

    def feed(self, text: str) -> Iterator[tuple[Channel, str]]:
        if self._held is None:
            yield from self._channels.feed(text)
            return
        self._held += text
        beginning = self._held.lstrip().removeprefix(_PYTHON_TAG).lstrip()
        if beginning and beginning[0] not in self._starts and not _PYTHON_TAG.startswith(beginning):
            yield from self._release()

    def flush(self) -> Iterator[tuple[Channel, str]]:
        """Yield the text that was held back, now that the turn is over. Again, yield nothing."""
        if self._held is not None:
            text = self._held.lstrip().removeprefix(_PYTHON_TAG)
            if self._grammar.feed(text):
                self._held = ""
            else:
                yield from self._release()
        yield from self._channels.flush()

    def _release(self) -> Iterator[tuple[Channel, str]]:
        assert self._held is not None
        held, self._held = self._held, None
        yield from self._channels.feed(held)


def _channels(make: Callable[[], Grammar], starts: str) -> Callable[[bool, bool], Splitter]:
    def channels(reasoning: bool, has_tools: bool) -> Splitter:
        if not has_tools:
            return Channels(reasoning=reasoning, markup=_MARKUP)
        return UnmarkedChannels(make, starts)

    return channels


LLAMA_JSON = Family(
    name="llama-json",
    models="Llama 3.1, 3.2, 3.3",
    sglang_parser="llama3",
    call_form=CallForm(begin='{"name": "NAME", "parameters": ', end="}", is_only_one=True),
    signs=("<|start_header_id|>", '"parameters"'),
    make_calls=_stream(_json),
    markup=_MARKUP,
    make_channels=_channels(_json, "{"),
)
LLAMA_PYTHONIC = Family(
    name="llama-pythonic",
    models="Llama 3.2 and Llama 4 with Python calls",
    sglang_parser="pythonic",
    signs=("[func_name1(",),
    make_calls=_stream(PythonCalls),
    section_end="]",
    markup=_MARKUP,
    make_channels=_channels(PythonCalls, "["),
)
