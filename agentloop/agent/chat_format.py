"""Encode conversations as token ids, append-only.

The model's own chat template defines the markup; everything else is data:

- `prompt()` renders the template over *placeholders*, so text from users and tools is encoded
  separately from the markup and can never become a control token;
- `observation()` returns the ids that the template puts between an assistant's turn and the next
  generation prompt. The prompt of a turn is the previous prompt, the sampled ids and this.

Sampled ids are never decoded and tokenised again. Works with any Hugging Face template that renders
contents verbatim and supports the `tool` role; others are rejected with an error that says why.
Images and audio are not supported.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pydantic
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentloop.agent.placeholders import Placeholders
from agentloop.agent.tokenizer import load_tokenizer
from agentloop.errors import ModelError, RequestError
from agentloop.plain_json import valid_text
from agentloop.trajectory import Message, Turn

__all__ = ["ChatFormat", "ChatSettings", "TextStream"]

Render = Callable[..., str]
_MAX_RENDERED = 64  # prompts in the cache
_MAX_DEPTH = 64
_THOUGHTS = ("reason", "think", "answer")
_SAMPLED = (*_THOUGHTS, "tool_call")  # tags that a model samples
_MAX_CHARS_ON_LOOP = 20_000  # takes some milliseconds

_MAX_HELD = 64
# Variables passed to every template, besides `ChatSettings.arguments`.
_RESERVED_ARGUMENTS = {"messages", "conversation", "tools", "add_generation_prompt", "tokenize"}


class ChatSettings(pydantic.BaseModel):
    """Overrides for the chat template and end token of the model's folder."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    template: str | None = pydantic.Field(
        None,
        description="Jinja file, or the template's text, to use instead of the model's own chat "
        "template. A model that is trained with it is published with it.",
    )
    end_token: str | None = pydantic.Field(
        None,
        description="Token that ends an assistant's turn. By default, the first control token that "
        "the chat template writes after an assistant message.",
    )
    arguments: dict[str, Any] = pydantic.Field(
        default_factory=dict,
        description="Extra variables for the chat template, such as enable_thinking = false for "
        "Qwen3.",
    )

    @pydantic.field_validator("arguments")
    @classmethod
    def _check_not_reserved(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_RESERVED_ARGUMENTS & value.keys()):
            raise ValueError(f"{', '.join(taken)}: reserved, set by agentloop for each prompt")
        return value

    @pydantic.field_validator("template")
    @classmethod
    def _read(cls, value: str | None) -> str | None:
        """Return the template's text, so that a run keeps it even if the file changes or moves."""
        if value is None or "{" in value:
            return value
        try:
            text = Path(value).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{value!r} cannot be read: {reason}") from error
        if "{" not in text:
            raise ValueError(f"{value!r} is not a Jinja template: it contains no expression")
        return text


class ChatFormat:
    """The chat template and tokenizer of one model.

    Attributes:
        vocab_size: Ids at or above this must never be sent to a server.
        end_id: The token that ends an assistant's turn.
        stop_ids: The tokens that end a generation: `end_id` and the tokenizer's end-of-text token,
            which differ in base models.
        generation_prompt: The template's text between the last message and the model's first token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        render: Render,
        *,
        end_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        """Derive the markup from the template.

        Args:
            render: `render(messages, tools=None, add_generation_prompt=False)` returns the
                template's text.
            end_token: As in `ChatSettings`.
            eos_token: The tokenizer's end-of-text token.

        Raises:
            ModelError: The template cannot be used for a tool-using agent.
        """
        self.tokenizer = tokenizer
        self._render = render
        # The highest id, not the number of tokens: a vocabulary may have gaps.
        self.vocab_size: int = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        added = tokenizer.get_added_tokens_decoder()
        self._control_ids = frozenset(added)
        self._control_re = _spelling(token.content for token in added.values())
        self._longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
        self._end_token = self._find_end_token(end_token)
        stops = {
            token: tokenizer.token_to_id(token) for token in (self._end_token, eos_token or "")
        }
        self._stops = {token: id for token, id in stops.items() if id is not None}
        self.end_id: int = self._stops[self._end_token]
        self.stop_ids: tuple[int, ...] = tuple(self._stops.values())
        self._derive_observation()
        self._rendering = anyio.Lock()
        self._rendered: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    @classmethod
    def load(cls, model_path: str | Path, settings: ChatSettings | None = None) -> ChatFormat:
        """Load the tokenizer and the template of a model folder or a cached hub name.

        `settings` take precedence over the files.

        Raises:
            ModelError: The tokenizer or the template is missing or cannot be used.
        """
        hf = load_tokenizer(model_path)
        settings = settings or ChatSettings()
        if settings.template is not None:
            hf.chat_template = settings.template
        if not hf.chat_template:
            raise ModelError(
                f"the tokenizer of {str(model_path)!r} has no chat template: set chat.template to "
                "a Jinja file"
            )

        def render(
            messages: Sequence[Message],
            tools: Sequence[Mapping[str, Any]] | None = None,
            add_generation_prompt: bool = False,
        ) -> str:
            text = hf.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **settings.arguments,
            )
            return str(text)

        chat = cls(
            hf.backend_tokenizer, render, end_token=settings.end_token, eos_token=hf.eos_token
        )
        # With a padded vocabulary the model may sample ids that the tokenizer cannot decode.
        chat.vocab_size = max(chat.vocab_size, _padded_vocab_size(Path(model_path)))
        return chat

    @property
    def opened_thought(self) -> str:
        """The tag with which the generation prompt opens a reasoning block, or an empty string."""
        match = re.search(r"<(?:reason|think)>\s*$", self.generation_prompt)
        return match.group() if match else ""

    def messages_of(self, turns: Iterable[Turn]) -> list[Message]:
        """Return a trajectory's turns as messages, to continue the conversation after it.

        Only for a new prompt: calls and the text after them are rendered again by the template.
        """
        messages: list[Message] = []
        for turn in turns:
            content = turn.text.partition("<tool_call>")[0]
            for token in self._stops:
                content = content.removesuffix(token)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": self.opened_thought + content.rstrip("\n"),
            }
            if turn.calls:
                message["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                    for call in turn.calls
                ]
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": result.call_id, "content": result.content}
                for result in turn.results
            ]
        return messages

    def token_id(self, text: str) -> int | None:
        """Return the id of `text` if it is a single token of the vocabulary, else None."""
        found: int | None = self.tokenizer.token_to_id(text)
        return found

    def encode(self, text: str) -> list[int]:
        """Encode data: no part of it becomes an added token, even if it spells one."""
        pieces, start = [], 0
        # Split each look-alike after its first character, so that neither part is one.
        while match := self._control_re.search(text, start):
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        pieces.append(text[start:])
        ids = [token for piece in pieces for token in self._encode(piece)]
        if not self._control_ids.isdisjoint(ids):  # a normalizer produced one
            ids = [token for char in text for token in self._encode(char)]
            ids = [token for token in ids if token not in self._control_ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including control tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def last_user_text(self, ids: Sequence[int]) -> str:
        """Return a prompt's last message if it is a user's, else the text of the whole prompt."""
        text, mark = self.decode(ids), secrets.token_hex(8)
        rendered = self._render([{"role": "user", "content": mark}], add_generation_prompt=True)
        before, _, after = rendered.partition(mark)
        controls = (token.content for token in self.tokenizer.get_added_tokens_decoder().values())
        opening = before[max([0, *map(before.rfind, controls)]) :]
        _, found, question = text.removesuffix(after).rpartition(opening)
        return question if found and text.endswith(after) else text

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of a conversation, including the generation prompt.

        Args:
            messages: Messages in OpenAI's format; `content` is a string, text parts or None.
            tools: JSON schemas, as made by `agentloop.agent.tools`.

        Raises:
            RequestError: A message cannot be rendered; the message names it.
        """
        if not messages:
            raise RequestError("messages: at least one message is required")
        mark = Placeholders()
        marked = [
            self._disarmed_message(_marked(index, message, mark), mark)
            for index, message in enumerate(messages)
        ]
        disarmed_tools = [self._disarmed(tool, mark) for tool in tools]
        try:
            text = self._render(marked, tools=disarmed_tools, add_generation_prompt=True)
        except Exception as error:  # templates may raise anything (jinja2, KeyError, ...)
            raise RequestError(f"messages: the model's chat template says: {error}") from error
        return self._encode_marked(text, mark)

    async def prompt_async(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Render a prompt as `prompt()` does, one at a time so as not to block the event loop.

        Prompts are cached, because the rollouts of a group share one. A long prompt is rendered in
        a thread.
        """
        size = _num_chars((messages, tools))
        async with self._rendering:  # no deadline: rendering takes milliseconds, and ends by itself
            if size > _MAX_CHARS_ON_LOOP:
                return await anyio.to_thread.run_sync(self.prompt, messages, tools)
            key = repr((messages, tools))
            if key not in self._rendered:
                self._rendered[key] = tuple(self.prompt(messages, tools))
            self._rendered.move_to_end(key)
            if len(self._rendered) > _MAX_RENDERED:
                self._rendered.popitem(last=False)
            return list(self._rendered[key])

    def min_prompt_tokens(self, messages: Sequence[Message]) -> int:
        """Return a lower bound of the number of tokens of a prompt, without rendering it."""
        return max(len(messages), _num_chars(messages) // self._longest_token)

    def encode_assistant_turn(self, message: Message) -> list[int]:
        """Return the ids that a model would sample for an assistant's `message`.

        These are the ids that the template writes after the generation prompt, including the end
        token. Tags of reasoning and of tool calls in the content become control tokens; anything
        else, and the arguments of `tool_calls`, is encoded as data.

        Raises:
            RequestError: The template cannot render the message, or does not start it with the
                generation prompt.
        """
        mark = Placeholders()
        question = {"role": "user", "content": mark("question")}
        reply = self._disarmed_message(_marked(0, message, mark), mark, keep=_SAMPLED)
        try:
            before = self._render([question], add_generation_prompt=True)
            text = self._render([question, reply])
        except Exception as error:  # as in prompt()
            raise RequestError(f"content: the model's chat template says: {error}") from error
        if not text.startswith(before):
            raise RequestError(self._explain_mismatch(message))
        turn, end, _ = text.removeprefix(before).partition(self._end_token)
        if not end:
            raise RequestError(
                f"content: the model's chat template does not end this message with "
                f"{self._end_token!r}: set chat.template to a template that ends every turn with it"
            )
        return [*self._encode_marked(turn, mark), self.end_id]

    def _explain_mismatch(self, message: Message) -> str:
        """Explain why the template does not write `message` after its generation prompt."""
        why = (
            "content: the model's chat template starts a generated turn with "
            f"{self.generation_prompt!r} but starts this message differently"
        )
        opened = self.opened_thought.strip()
        if opened and not str(message.get("content") or "").startswith(opened):
            return (
                f"{why}: begin the content with {opened}, or set chat.template to a template that "
                "adds it, such as docs/recipes/paper.jinja"
            )
        return f"{why}: set chat.template to a template that starts both in the same way"

    def observation(self, contents: Sequence[str | list[int]]) -> list[int]:
        """Return the ids after an assistant's turn: tool responses and a new generation prompt.

        Args:
            contents: One per call, in the order of the calls: text, or ids that are already
                truncated.
        """
        before, between, after = self._around_responses
        ids = list(before)
        for index, content in enumerate(contents):
            if index:
                ids += between
            ids += self.encode(content) if isinstance(content, str) else content
        return ids + after

    def user_message(self, content: str) -> list[int]:
        """Return the ids after an assistant's turn: a user's message and a new generation prompt.

        Raises:
            RequestError: The template does not write a user's message after an assistant's turn.
        """
        mark = Placeholders()
        messages = [{"role": role, "content": mark(role)} for role in ("user", "assistant", "user")]
        try:
            text = self._render(messages, add_generation_prompt=True)
        except Exception as error:  # as in prompt()
            raise RequestError(f"reply: the model's chat template says: {error}") from error
        pieces = mark.split(text)
        end = pieces[4].find(self._end_token) if pieces[1::2] == ["0", "1", "2"] else -1
        if end < 0:
            raise RequestError(
                "reply: the model's chat template drops or reorders messages, or does not end an "
                f"assistant's turn with {self._end_token!r}"
            )
        before, after = pieces[4][end + len(self._end_token) :], pieces[6]
        return self._encode(before) + self.encode(content) + self._encode(after)

    def _disarmed_message(
        self, message: Mapping[str, Any], mark: Placeholders, keep: Sequence[str] = _THOUGHTS
    ) -> Any:
        """Replace control tokens by placeholders, except the `keep` tags of an assistant's turn.

        Nothing else in an assistant's turn stays markup: the model may have repeated text that a
        user or a tool injected.
        """
        disarmed = self._disarmed(message, mark)
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            disarmed["content"] = self._control_re.sub(
                lambda match: (
                    match.group() if match.group().strip("</>") in keep else mark(match.group())
                ),
                content,
            )
        return disarmed

    def _disarmed(self, value: Any, mark: Placeholders) -> Any:
        """Replace all control tokens spelled in `value`, at any depth, by placeholders."""
        if isinstance(value, str):
            return self._control_re.sub(lambda match: mark(match.group()), value)
        if isinstance(value, Mapping):
            return {
                self._disarmed(key, mark): self._disarmed(item, mark) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._disarmed(item, mark) for item in value]
        return value

    def _encode(self, text: str) -> list[int]:
        whole = valid_text(text)  # a lone surrogate cannot be tokenised
        ids: list[int] = self.tokenizer.encode(whole, add_special_tokens=False).ids
        return ids

    def _encode_marked(self, text: str, mark: Placeholders) -> list[int]:
        ids: list[int] = []
        pieces = mark.split(text)
        for index, piece in enumerate(pieces):
            # Odd pieces are names of placeholders, even pieces the template's markup.
            ids += self.encode(mark.contents[int(piece)]) if index % 2 else self._encode(piece)
        return ids

    def _find_end_token(self, configured: str | None) -> str:
        """Return `configured`, or the end-of-turn token that the template writes."""
        if configured is not None and self.tokenizer.token_to_id(configured) is None:
            raise ModelError(f"chat.end_token: the tokenizer has no token {configured!r}")
        mark = Placeholders()
        question = {"role": "user", "content": mark("question")}
        reply = {"role": "assistant", "content": mark("reply")}
        try:
            tail = mark.split(self._render([question, reply]))[-1]
        except Exception as error:  # as in prompt()
            raise ModelError(f"the chat template cannot be rendered: {error}") from error
        if configured is not None:
            if configured not in tail:
                raise ModelError(
                    f"chat.end_token: the chat template does not end a turn with {configured!r}: "
                    f"after an assistant's message it writes {tail!r}"
                )
            return configured
        found = self._control_re.search(tail)
        if found is None:
            raise ModelError(
                "the chat template does not end a turn with a control token of the tokenizer: "
                f"after an assistant's message it writes {tail!r}. Set chat.template to a template "
                "that does"
            )
        return found.group()

    def _derive_observation(self) -> None:
        """Find the text that the template writes before, between and after two tool responses."""
        mark = Placeholders()
        question = {"role": "user", "content": mark("question")}
        call = {"type": "function", "function": {"name": "tool", "arguments": {}}}
        reply = {"role": "assistant", "content": mark("reply"), "tool_calls": [call]}
        responses = [
            {"role": "tool", "name": "tool", "content": mark(text)} for text in ("first", "second")
        ]
        try:
            text = self._render([question, reply, *responses], add_generation_prompt=True)
        except Exception as error:  # as in prompt()
            raise ModelError(f"the chat template cannot render tool responses: {error}") from error
        pieces = mark.split(text)
        if [pieces[i] for i in range(1, len(pieces), 2)] != ["0", "1", "2", "3"]:
            raise ModelError("the chat template drops, repeats or reorders tool responses")
        _, _, _, _, after_reply, _, between, _, after = pieces
        end = after_reply.find(self._end_token)
        if end < 0:
            raise ModelError(
                f"the chat template does not end a turn with tool calls with {self._end_token!r}, "
                "but it does end a turn without tool calls with it"
            )
        before = after_reply[end + len(self._end_token) :]
        self.generation_prompt = self._generation_prompt(after)
        self._around_responses = (
            self._encode(before),
            self._encode(between),
            self._encode(after),
        )

    def _generation_prompt(self, after: str) -> str:
        mark = Placeholders()
        response = {"role": "tool", "name": "tool", "content": mark("response")}
        question = {"role": "user", "content": mark("question")}
        call = {"type": "function", "function": {"name": "tool", "arguments": {}}}
        reply = {"role": "assistant", "content": mark("reply"), "tool_calls": [call]}
        closed = mark.split(self._render([question, reply, response]))[-1]
        return after.removeprefix(closed)


class TextStream:
    """Decodes token ids incrementally; text is returned as soon as it is complete UTF-8."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            self._held.append(token)
            piece = self._stream.step(self._chat.tokenizer, token)
            if piece is not None:
                text += piece
                self._held.clear()
            elif len(self._held) == _MAX_HELD:
                # No character has this many tokens. The library decodes everything it holds at
                # each token, so a model that emits invalid bytes would take quadratic time.
                text += self.flush()
                self._stream = DecodeStream(skip_special_tokens=False)
        return text

    def flush(self) -> str:
        """Return the text of the ids that were held back."""
        held, self._held = self._held, []
        return self._chat.decode(held) if held else ""


def _spelling(tokens: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that matches any of `tokens`, or nothing if there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _num_chars(value: Any) -> int:
    """Return the total length of all strings in `value`, at any depth.

    Raises:
        RequestError: The value is nested too deeply.
    """
    total, pending = 0, [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise RequestError(f"messages: nested more than {_MAX_DEPTH} levels deep")
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            pending += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            pending += [(part, depth + 1) for part in item]
    return total


def _padded_vocab_size(folder: Path) -> int:
    """Return the number of rows of the model's embedding, or 0 if its folder does not say."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _marked(index: int, message: object, mark: Placeholders) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}]: expected an object, got {message!r:.50}")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise RequestError(f"messages[{index}].role: {role!r} is not a valid role")
    content = _text(index, message.get("content"))
    marked = {**message, "role": "system" if role == "developer" else role}
    # An assistant's past turn is not replaced: templates remove the reasoning from it.
    marked["content"] = content if role == "assistant" or not content else mark(content)
    if isinstance(calls := message.get("tool_calls"), list):
        marked["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return marked


def _with_parsed_arguments(call: Any) -> Any:
    """Parse a call's arguments if they are a JSON string, as OpenAI's clients send them."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _text(index: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(texts)  # type: ignore[arg-type]
    raise RequestError(f"messages[{index}].content: expected a string or text parts")
