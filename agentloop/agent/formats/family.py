"""The form in which a family of models writes tool calls, thoughts, and the ends of turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentloop.agent.channels import Channel, Channels, Markup, Splitter
from agentloop.agent.formats.values import Schemas, parameters_of
from agentloop.agent.text_stream import TokenCodec
from agentloop.trajectory import ToolCall


class CallStream(Protocol):
    """Finds the tool calls of one turn, however its tokens arrive."""

    def feed(self, ids: Sequence[int]) -> list[ToolCall]:
        """Take the next sampled ids; return the calls that they close."""
        ...

    def finish(self) -> list[ToolCall]:
        """Return the call that was still open when the model ended its turn, as malformed."""
        ...


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """The text of a call, to force one (`tool_choice`).

    Attributes:
        begin: Text before the arguments, with NAME for the tool's name.
        end: Text after them.
        style: How arguments are written, by xgrammar's name.
        section: Texts before the first call and after the last one.
        separator: Text between two calls.
        is_only_one: Whether a forced turn has one call only.
    """

    begin: str
    end: str = ""
    style: str = "json"
    section: tuple[str, str] = ("", "")
    separator: str = ""
    is_only_one: bool = False


MakeCallStream = Callable[[TokenCodec, Schemas, str], CallStream]
"""A function of a chat format, the tools' schemas and a prefix for the calls' ids."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """The form in which the models of a family write.

    Attributes:
        name: The value of `chat.format`.
        models: Models of the family, for people to read.
        signs: Texts of which each is in a chat template of the family.
        make_calls: Makes the stream that finds the calls of a turn.
        markup: The tags of thoughts and calls in the text of a turn.
        make_channels: Makes what splits a turn's text, if tags are not enough; the arguments are
            those of `channels`.
        end_of_calls: Token that ends a turn with calls, if it differs from that of other turns.
        section_end: Token that closes all calls of a turn, if each has a closing tag of its own.
        call_form: The text of a call, to force one; None: calls cannot be forced.
        sglang_parser: SGLang's own parser of this form (`--tool-call-parser`), or empty.
        call_id: Returns the id by which the template names a sampled call; by default, ours.
        history_id: Returns the id that the template needs for a call of an earlier message, from
            its id, its name and its number in the conversation; by default, its id.
    """

    name: str
    models: str
    signs: tuple[str, ...]
    make_calls: MakeCallStream
    markup: Markup = field(default_factory=Markup)
    make_channels: Callable[[bool, bool], Splitter] | None = None
    end_of_calls: str | None = None
    section_end: str = ""
    call_form: CallForm | None = None
    sglang_parser: str = ""
    call_id: Callable[[ToolCall], str] = lambda call: call.id
    history_id: Callable[[str, str, int], str] | None = None

    def fits(self, template: str) -> bool:
        """Return whether a chat template is one of this family."""
        return all(sign in template for sign in self.signs)

    def calls(
        self,
        chat: TokenCodec,
        tools: Sequence[Mapping[str, object]] = (),
        *,
        id_prefix: str = "call",
    ) -> CallStream:
        """Return a stream that finds the calls of one turn.

        Args:
            tools: JSON schemas of the tools, in OpenAI's form.
            id_prefix: How the ids of the calls begin.
        """
        return self.make_calls(chat, parameters_of(tools), id_prefix)

    def channels(self, reasoning: bool, has_tools: bool = True) -> Splitter:
        """Return what splits the text of one turn into channels.

        Args:
            reasoning: Whether the generation prompt has already opened a thought.
            has_tools: Whether the model was given tools; if not, text that looks like an unmarked
                call is none.
        """
        if self.make_channels is not None:
            return self.make_channels(reasoning, has_tools)
        return Channels(reasoning=reasoning, markup=self.markup)

    @property
    def thought_tags(self) -> tuple[str, ...]:
        """The tags of reasoning and of answers."""
        thoughts = (tag for pair in self.markup.thoughts for tag in pair)
        return (*thoughts, *(tag for tag in self.markup.others if tag.endswith("answer>")))

    @property
    def all_tags(self) -> tuple[str, ...]:
        """The tags that a model of this family samples."""
        return self.markup.tags

    def message_of(self, text: str, *, has_calls: bool) -> dict[str, str]:
        """Return the fields of an assistant's message for the text of a turn, without its calls."""
        if self.make_channels is None:
            for opening, _ in self.markup.calls:
                text = text.partition(opening)[0]
            return {"content": text.rstrip("\n")}
        splitter = self.make_channels(False, True)
        pieces = [*splitter.feed(text), *splitter.flush()]
        content, thought = (
            "".join(piece for channel, piece in pieces if channel is wanted)
            for wanted in (Channel.CONTENT, Channel.REASONING)
        )
        if not thought:
            return {"content": content}
        # The templates of such families take either, in a message with calls.
        return {"content": thought} if has_calls else {"content": content, "thinking": thought}
