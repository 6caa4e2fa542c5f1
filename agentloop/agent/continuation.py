"""Render what a chat template writes after an assistant's turn: its responses, and the next prompt.

The text between two turns is rendered once, over stand-ins for the turn itself, so that a prompt is
the previous prompt, the sampled ids and this. Templates differ in how they take calls; what a
template wants is found out by trying.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from agentloop.agent.encoder import TokenEncoder
from agentloop.agent.formats import Family
from agentloop.agent.openai_messages import (
    function_call,
    normal_form,
    one_call_each,
    tool_message,
    with_ids,
)
from agentloop.agent.placeholders import Placeholders
from agentloop.errors import ModelError, RequestError
from agentloop.plain_json import JsonObject
from agentloop.trajectory import Message, ToolCall

Render = Callable[..., str]
"""`render(messages, tools=None, add_generation_prompt=False)` returns a template's text."""

QUESTION: Message = {"role": "user", "content": "question"}

_MAX_CHECKED = 256  # shapes of conversations that are remembered


class Continuation:
    """Renders what comes after an assistant's turn.

    Attributes:
        text_arguments: whether the template takes the arguments of calls as JSON text.
    """

    def __init__(
        self, render: Render, encoder: TokenEncoder, family: Family, *, end: str, end_of_calls: str
    ) -> None:
        """Find out how the template takes calls, and check that it writes responses in order.

        Templates differ in whether arguments are an object or its JSON text, and some write one
        call per turn only.

        Args:
            end: the token that ends a turn without calls.
            end_of_calls: the token that ends a turn with calls.

        Raises:
            ModelError: the template cannot be used for a tool-using agent.
        """
        self._render, self._encoder, self._family = render, encoder, family
        self._end, self._end_of_calls = end, end_of_calls
        self._checked: dict[tuple[str, ...], bool] = {}
        self.text_arguments = self._one_call = False
        self._needs_content = not self._takes_empty_answer()
        error: Exception | None = None
        for self._one_call in (False, True):
            for self.text_arguments in (False, True):
                mark = Placeholders()
                responses = [mark("first"), mark("second")]
                try:
                    before, _, after = self._after_responses(responses, (), mark)
                except Exception as raised:  # templates may raise anything
                    error = error or raised
                    continue
                if mark.split(before + after)[1::2] != ["0", "1"]:
                    raise ModelError("the chat template drops, repeats or reorders tool responses")
                if responses[0] in before:
                    raise ModelError(
                        "the chat template does not end a turn with tool calls with "
                        f"{end_of_calls!r}, but it does end a turn without tool calls with it"
                    )
                return
        raise ModelError(f"the chat template cannot render tool responses: {error}") from error

    def _takes_empty_answer(self) -> bool:
        try:
            self._render([QUESTION, {"role": "assistant", "content": ""}, QUESTION])
        except Exception:  # as above
            return False
        return True

    def after_calls(
        self, contents: Sequence[str | list[int]], calls: Sequence[ToolCall], *, is_cut: bool
    ) -> list[int]:
        """Return the ids of tool responses and of a new generation prompt.

        Args:
            contents: One per call, in the order of the calls: text, or ids that are already
                truncated.
            calls: The turn's calls. Some templates write their ids or names again.
            is_cut: Whether the turn lacks its end, which is then written first.
        """
        mark = Placeholders()
        responses = [
            mark(content) if isinstance(content, list) else self._encoder.disarm(content, mark)
            for content in contents
        ]
        before, end, text = self._after_responses(responses, self._disarm_names(calls, mark), mark)
        if is_cut:
            text = self._section_end(before) + end + text
        return self._encoder.encode_marked(text, mark)

    def after_turn(
        self,
        messages: Sequence[Message],
        calls: Sequence[ToolCall],
        *,
        is_cut: bool,
        num_calls: int = 0,
    ) -> list[int]:
        """Return the ids of any messages after a turn, and of a new generation prompt.

        Args:
            messages: Messages in OpenAI's format: tool responses, questions, turns of others.
            calls: The turn's calls, to which the responses refer by their ids.
            is_cut: Whether the turn lacks its end, which is then written first.
            num_calls: Number of calls in the conversation so far, for templates that count them.

        Raises:
            RequestError: A message cannot be rendered, or the template does not append it.
        """
        mark = Placeholders()
        plain = normal_form(messages, [(call.id, call.name) for call in calls])
        plain = self.as_taken(plain, self._family, num_calls)
        ids = {call.id: self._family.call_id(call) for call in calls}
        for message in plain:
            if (answered := message.get("tool_call_id")) in ids:
                message["tool_call_id"] = ids[answered]
        disarmed = [
            self.disarm_message(message, mark, self._family.thought_tags) for message in plain
        ]
        try:
            self._check_order(plain, has_calls=bool(calls))
            before, end, text = self._after(disarmed, self._disarm_names(calls, mark), mark)
        except RequestError:
            raise
        except Exception as error:  # a template may raise anything, as in __init__
            raise RequestError(f"messages: the model's chat template says: {error}") from error
        if is_cut:
            text = self._section_end(before) + end + text
        return self._encoder.encode_marked(text, mark)

    def as_taken(
        self, messages: list[dict[str, object]], family: Family, num_calls: int = 0
    ) -> list[dict[str, object]]:
        """Return messages in the normal form as the template takes calls and their ids.

        Args:
            num_calls: Number of calls before them.
        """
        if family.make_channels is not None:  # whose templates take either, beside calls
            messages = [
                {name: value for name, value in message.items() if name != "reasoning_content"}
                if message.get("tool_calls") and message.get("content")
                else message
                for message in messages
            ]
        if self._one_call:
            messages = one_call_each(messages)
        if family.history_id is not None:
            messages = with_ids(messages, family.history_id, num_calls)
        return messages

    def disarm_message(
        self, message: Message, mark: Placeholders, keep: Sequence[str]
    ) -> JsonObject:
        """Disarm a message, except the `keep` tags in the content of an assistant's turn.

        Nothing else in an assistant's turn stays markup: the model may have repeated text that a
        user or a tool injected.
        """
        disarmed: JsonObject = self._encoder.disarm_value(message, mark)
        if message["role"] == "assistant":
            content = self._encoder.disarm(message["content"], mark, keep=keep)
            is_empty = not content and not message.get("tool_calls")
            disarmed["content"] = mark("") if is_empty and self._needs_content else content
        if self.text_arguments:
            for call in disarmed.get("tool_calls") or []:
                call["function"]["arguments"] = json.dumps(
                    call["function"]["arguments"], ensure_ascii=False
                )
        return disarmed

    def _disarm_names(self, calls: Sequence[ToolCall], mark: Placeholders) -> list[tuple[str, str]]:
        """Return the ids and the names of calls, disarmed, as the template writes them."""
        return [
            (
                self._encoder.disarm(self._family.call_id(call), mark),
                self._encoder.disarm(call.name, mark),
            )
            for call in calls
        ]

    def _section_end(self, before: str) -> str:
        """Return what closes all calls of a turn, if the template wrote it `before` the end."""
        end = self._family.section_end
        return end if end and end in before else ""

    def _after_responses(
        self, responses: Sequence[str], names: Sequence[tuple[str, str]], mark: Placeholders
    ) -> tuple[str, str, str]:
        """Return what `_after` does, for responses to calls."""
        named = list(_with_names(names)) or [
            (f"call{index:05}", "tool") for index in range(len(responses))
        ]
        messages = [
            tool_message(id, response) for (id, _), response in zip(named, responses, strict=True)
        ]
        return self._after(messages, named, mark)

    def _after(
        self, messages: Sequence[Message], names: Sequence[tuple[str, str]], mark: Placeholders
    ) -> tuple[str, str, str]:
        """Return the text between a turn's content and its end, the end, and the text after it.

        Args:
            names: The ids and the names of the turn's calls.
        """
        # A template may write both, the content alone, or the calls alone.
        content, argument = mark(""), mark("")
        reply: dict[str, object] = {"role": "assistant", "content": content}
        if names:
            arguments: object = {"argument": argument}
            if self.text_arguments:
                arguments = json.dumps(arguments)
            tool_calls = [function_call(id, name, arguments) for id, name in _with_names(names)]
            reply["tool_calls"] = tool_calls[-1:] if self._one_call else tool_calls
        text = self._render([QUESTION, reply, *messages], add_generation_prompt=True)
        if names:
            tail = text.rpartition(argument if argument in text else content)[2]
            before, end, after = tail.partition(self._end_of_calls)
            return (before, end, after) if end else (tail, self._end_of_calls, "")
        tail = text.partition(content)[2]
        before, end, after = tail.partition(self._end)
        if not end:  # the end of a turn opens the next message, whose role differs
            match = self._encoder.control_re.search(tail)
            if match is None:
                raise RequestError(
                    "messages: the model's chat template drops or reorders messages, or does not "
                    f"end an assistant's turn with {self._end!r}"
                )
            return tail[: match.start()], match.group(), tail[match.end() :]
        return before, end, after

    def _check_order(self, messages: Sequence[Message], *, has_calls: bool) -> None:
        """Check, once per shape, that the template writes all of these messages, in their order.

        Raises:
            RequestError: It does not.
        """
        shape = (
            *(message["role"] + "+" * bool(message.get("tool_calls")) for message in messages),
            has_calls,
        )
        key = tuple(map(str, shape))
        if key not in self._checked:
            mark = Placeholders()
            marked = [{**message, "content": mark("")} for message in messages]
            names = [("call00000", "tool")] if has_calls else []
            pieces = mark.split("".join(self._after(marked, names, mark)))[1::2]
            wanted = [str(index) for index in range(len(messages))]
            self._checked[key] = [piece for piece in pieces if piece in wanted] == wanted
            if len(self._checked) > _MAX_CHECKED:
                del self._checked[next(iter(self._checked))]
        if not self._checked[key]:
            raise RequestError(
                "messages: the model's chat template drops, repeats or reorders messages after a "
                "turn"
            )


def _with_names(names: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield ids and names of calls; one that could not be decoded has no name."""
    for index, (id, name) in enumerate(names):
        yield id or f"call{index:05}", name or "unknown"
