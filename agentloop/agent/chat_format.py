"""Messages to token ids, append-only.

The model's own chat template is the truth about its markup, and everything else is data:

- `prompt()` renders the template over *placeholders*, so that what a user or a tool wrote is
  encoded apart from the markup and can never become a control token;
- `observation()` is what the template puts between an assistant's turn and the next generation
  prompt, so that each turn's prompt is the last one's ids, then what was sampled, then this.

Nothing that was sampled is ever decoded and tokenised again. Works with any Hugging Face template
that renders contents verbatim and knows the `tool` role; one that does not is refused, by name.
Not covered: images and audio.
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

from agentloop.errors import ModelError, RequestError
from agentloop.plain_json import valid_text
from agentloop.trajectory import Message, Turn

__all__ = ["ChatFormat", "ChatSettings", "TextStream"]

Render = Callable[..., str]
_MAX_RENDERED = 64  # prompts kept
_MAX_DEPTH = 64
_THOUGHTS = ("reason", "think", "answer")
_SAMPLED = (*_THOUGHTS, "tool_call")  # what a model writes of its own accord
_MAX_CHARS_ON_LOOP = 20_000  # some milliseconds

_MAX_HELD = 64
# What a template is rendered with, besides `ChatSettings.arguments`.
_RENDERED_WITH = {"messages", "conversation", "tools", "add_generation_prompt", "tokenize"}


class ChatSettings(pydantic.BaseModel):
    """How messages become tokens, where the model's folder does not say so or says it wrong."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    template: str | None = pydantic.Field(
        None,
        description="A Jinja file, or its text, in place of the model's own chat template. Models "
        "that are trained with it are published with it.",
    )
    end_token: str | None = pydantic.Field(
        None,
        description="The token that ends an assistant's turn; none: the first control token that "
        "the chat template writes after an assistant's message.",
    )
    arguments: dict[str, Any] = pydantic.Field(
        default_factory=dict,
        description="Variables of the chat template, such as enable_thinking = false for Qwen3.",
    )

    @pydantic.field_validator("arguments")
    @classmethod
    def _are_not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_RENDERED_WITH & value.keys()):
            raise ValueError(f"{', '.join(taken)}: set by agentloop for each prompt")
        return value

    @pydantic.field_validator("template")
    @classmethod
    def _read(cls, value: str | None) -> str | None:
        """Return the text, so that a run has it even if the file changes or is elsewhere later."""
        if value is None or "{" in value:
            return value
        try:
            text = Path(value).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{value!r} cannot be read: {reason}") from error
        if "{" not in text:
            raise ValueError(f"{value!r} is no Jinja template: it has no expression")
        return text


class ChatFormat:
    """The chat template and tokenizer of one model.

    Attributes:
        vocab_size: ids at or above it must never reach a server.
        end_id: the token that ends an assistant's turn.
        stop_ids: those that end a generation: `end_id`, and the tokenizer's own end of text, which
            differs from it in base models.
        generation_prompt: the template's text between the last message and the model's first token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        render: Render,
        *,
        end_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        """Learn a model's markup from its template.

        Args:
            render: `render(messages, tools=None, add_generation_prompt=False)` returns the
                template's text.
            end_token: as in `ChatSettings`.
            eos_token: the tokenizer's end of text.

        Raises:
            ModelError: the template cannot be used for a tool-using agent.
        """
        self.tokenizer = tokenizer
        self._render = render
        # Not the number of tokens: a vocabulary may have holes.
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
        self._learn_observation()
        self._rendering = anyio.Lock()
        self._rendered: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    @classmethod
    def load(cls, model_path: str | Path, settings: ChatSettings | None = None) -> ChatFormat:
        """Read the tokenizer and the template of a model folder (or of a cached hub name).

        What `settings` name wins over what is there.

        Raises:
            ModelError: there is none, or it is of a kind that cannot be used.
        """
        # 0.7 s, paid by those who load a model; AutoTokenizer would import torch as well.
        from transformers import PreTrainedTokenizerFast

        try:
            hf = PreTrainedTokenizerFast.from_pretrained(str(model_path))
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"no usable tokenizer in {str(model_path)!r}: {error}") from error
        backend = getattr(hf, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ModelError(f"{str(model_path)!r} has no fast tokenizer (tokenizer.json)")
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

        chat = cls(backend, render, end_token=settings.end_token, eos_token=hf.eos_token)
        # A padded vocabulary: the model may sample ids that the tokenizer has no text for.
        chat.vocab_size = max(chat.vocab_size, _padded_vocab_size(Path(model_path)))
        return chat

    @property
    def opened_thought(self) -> str:
        """The tag with which the generation prompt opens a thought, or nothing."""
        match = re.search(r"<(?:reason|think)>\s*$", self.generation_prompt)
        return match.group() if match else ""

    def messages_of(self, turns: Iterable[Turn]) -> list[Message]:
        """A trajectory's turns as messages, for a conversation that goes on after it.

        For a new prompt alone: what stands after a turn's calls and in them is rendered anew.
        """
        messages: list[Message] = []
        for turn in turns:
            said = turn.text.partition("<tool_call>")[0]
            for token in self._stops:
                said = said.removesuffix(token)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": self.opened_thought + said.rstrip("\n"),
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
        """The id of `text` where it is one token of the vocabulary, else None."""
        found: int | None = self.tokenizer.token_to_id(text)
        return found

    def encode(self, text: str) -> list[int]:
        """Encode data: no part of it becomes an added token, whatever it spells."""
        pieces, start = [], 0
        # Each look-alike is cut after its first character, so that neither side spells it.
        while match := self._control_re.search(text, start):
            pieces.append(text[start : match.start() + 1])
            start = match.start() + 1
        pieces.append(text[start:])
        ids = [token for piece in pieces for token in self._encode(piece)]
        if not self._control_ids.isdisjoint(ids):  # a normalizer made one from other characters
            ids = [token for char in text for token in self._encode(char)]
            ids = [token for token in ids if token not in self._control_ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text for people and parsers, control tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def question(self, ids: Sequence[int]) -> str:
        """What a prompt ends with: its last message, where that is a user's; else all of it."""
        text, mark = self.decode(ids), secrets.token_hex(8)
        asked = self._render([{"role": "user", "content": mark}], add_generation_prompt=True)
        before, _, after = asked.partition(mark)
        controls = (token.content for token in self.tokenizer.get_added_tokens_decoder().values())
        opening = before[max([0, *map(before.rfind, controls)]) :]
        _, found, question = text.removesuffix(after).rpartition(opening)
        return question if found and text.endswith(after) else text

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The ids of a conversation, up to and including the generation prompt.

        Args:
            messages: in the terms of OpenAI; `content` a string, parts of type text, or None.
            tools: JSON schemas, as from `agentloop.agent.tools`.

        Raises:
            RequestError: a message cannot be rendered; names it.
        """
        if not messages:
            raise RequestError("messages: at least one is needed")
        mark = _Placeholders()
        marked = [
            self._disarmed_message(_marked(index, message, mark), mark)
            for index, message in enumerate(messages)
        ]
        disarmed_tools = [self._disarmed(tool, mark) for tool in tools]
        try:
            text = self._render(marked, tools=disarmed_tools, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like (jinja2, KeyError, ...)
            raise RequestError(f"messages: the model's chat template says: {error}") from error
        return self._encode_marked(text, mark)

    async def prompt_in_turn(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """`prompt()`, one at a time: a thousand at once would hold the event loop for a second.

        The rollouts of a group have one prompt, and render it once. A long prompt is rendered in
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

    def at_least(self, messages: Sequence[Message]) -> int:
        """Tokens that a prompt of these messages has at the least; found without rendering it."""
        return max(len(messages), _num_chars(messages) // self._longest_token)

    def sampled(self, message: Message) -> list[int]:
        """The ids that a model samples to say an assistant's `message`, its end token included.

        They are what the template writes after the generation prompt. Tags of thoughts and of
        calls that the content spells are control tokens; nothing else in it, and nothing in the
        arguments of `tool_calls`, is.

        Raises:
            RequestError: the template cannot render it, or begins it in another way than what
                the generation prompt ends with.
        """
        mark = _Placeholders()
        asked = {"role": "user", "content": mark("question")}
        said = self._disarmed_message(_marked(0, message, mark), mark, keep=_SAMPLED)
        try:
            before = self._render([asked], add_generation_prompt=True)
            text = self._render([asked, said])
        except Exception as error:  # as in prompt()
            raise RequestError(f"content: the model's chat template says: {error}") from error
        if not text.startswith(before):
            raise RequestError(self._why_not_sampled(message))
        turn, end, _ = text.removeprefix(before).partition(self._end_token)
        if not end:
            raise RequestError(
                f"content: the model's chat template does not end this message with "
                f"{self._end_token!r}: set chat.template to a template that ends every turn so"
            )
        return [*self._encode_marked(turn, mark), self.end_id]

    def _why_not_sampled(self, message: Message) -> str:
        """Say why the template does not write `message` behind its generation prompt."""
        why = (
            "content: the model's chat template starts a generated turn with "
            f"{self.generation_prompt!r} but does not start this message so"
        )
        opened = self.opened_thought.strip()
        if opened and not str(message.get("content") or "").startswith(opened):
            return (
                f"{why}: begin the content with {opened}, or set chat.template to a template that "
                "adds it, such as docs/recipes/paper.jinja"
            )
        return f"{why}: set chat.template to a template that starts both alike"

    def observation(self, contents: Sequence[str | list[int]]) -> list[int]:
        """What follows an assistant's turn: the tools' responses and a new generation prompt.

        Args:
            contents: one per call, in the order of the calls; text, or ids (already truncated).
        """
        before, between, after = self._around_responses
        ids = list(before)
        for index, content in enumerate(contents):
            if index:
                ids += between
            ids += self.encode(content) if isinstance(content, str) else content
        return ids + after

    def _disarmed_message(
        self, message: Mapping[str, Any], mark: _Placeholders, keep: Sequence[str] = _THOUGHTS
    ) -> Any:
        """An assistant's past turn keeps its thoughts as markup, and nothing else: it may have
        repeated what a user or a tool told it to say."""
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

    def _disarmed(self, value: Any, mark: _Placeholders) -> Any:
        """What goes through the template as it is, less what spells a control token."""
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
        whole = valid_text(text)  # a lone surrogate has no tokens
        ids: list[int] = self.tokenizer.encode(whole, add_special_tokens=False).ids
        return ids

    def _encode_marked(self, text: str, mark: _Placeholders) -> list[int]:
        ids: list[int] = []
        pieces = mark.split(text)
        for index, piece in enumerate(pieces):
            # Odd pieces are the names of placeholders, even ones the template's markup.
            ids += self.encode(mark.contents[int(piece)]) if index % 2 else self._encode(piece)
        return ids

    def _find_end_token(self, asked: str | None) -> str:
        """Return the token that ends an assistant's turn: `asked`, or what the template writes."""
        if asked is not None and self.tokenizer.token_to_id(asked) is None:
            raise ModelError(f"chat.end_token: the tokenizer has no token {asked!r}")
        mark = _Placeholders()
        question = {"role": "user", "content": mark("question")}
        said = {"role": "assistant", "content": mark("said")}
        try:
            tail = mark.split(self._render([question, said]))[-1]
        except Exception as error:  # as in prompt()
            raise ModelError(f"the chat template cannot be rendered: {error}") from error
        if asked is not None:
            if asked not in tail:
                raise ModelError(
                    f"chat.end_token: the chat template does not end a turn with {asked!r}: after "
                    f"an assistant's message it writes {tail!r}"
                )
            return asked
        found = self._control_re.search(tail)
        if found is None:
            raise ModelError(
                "the chat template does not end a turn with a control token of the tokenizer: "
                f"after an assistant's message it writes {tail!r}. Set chat.template to one that "
                "does"
            )
        return found.group()

    def _learn_observation(self) -> None:
        """Read off the template what stands before, between and after two tool responses."""
        mark = _Placeholders()
        asked = {"role": "user", "content": mark("question")}
        call = {"type": "function", "function": {"name": "tool", "arguments": {}}}
        said = {"role": "assistant", "content": mark("said"), "tool_calls": [call]}
        responses = [
            {"role": "tool", "name": "tool", "content": mark(text)} for text in ("first", "second")
        ]
        try:
            text = self._render([asked, said, *responses], add_generation_prompt=True)
        except Exception as error:  # as in prompt()
            raise ModelError(f"the chat template cannot render tool responses: {error}") from error
        pieces = mark.split(text)
        if [pieces[i] for i in range(1, len(pieces), 2)] != ["0", "1", "2", "3"]:
            raise ModelError("the chat template drops, repeats or reorders tool responses")
        _, _, _, _, after_said, _, between, _, after = pieces
        end = after_said.find(self._end_token)
        if end < 0:
            raise ModelError(
                f"the chat template does not end a turn with tool calls with {self._end_token!r}, "
                "as it does one without"
            )
        before = after_said[end + len(self._end_token) :]
        self.generation_prompt = self._generation_prompt(after)
        self._around_responses = (
            self._encode(before),
            self._encode(between),
            self._encode(after),
        )

    def _generation_prompt(self, after: str) -> str:
        mark = _Placeholders()
        response = {"role": "tool", "name": "tool", "content": mark("response")}
        asked = {"role": "user", "content": mark("question")}
        call = {"type": "function", "function": {"name": "tool", "arguments": {}}}
        said = {"role": "assistant", "content": mark("said"), "tool_calls": [call]}
        closed = mark.split(self._render([asked, said, response]))[-1]
        return after.removeprefix(closed)


class TextStream:
    """Token ids in, text out as soon as it is whole UTF-8; `flush()` gives what is held back."""

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
                # No character is this long. The library decodes all that it holds for each
                # token, so that a model that babbles bytes would cost quadratic time.
                text += self.flush()
                self._stream = DecodeStream(skip_special_tokens=False)
        return text

    def flush(self) -> str:
        held, self._held = self._held, []
        return self._chat.decode(held) if held else ""


class _Placeholders:
    """Stand-ins for contents while a template is rendered.

    Random, so that no content can spell one; of plain letters, so that no template changes it.
    """

    def __init__(self) -> None:
        self.contents: list[str] = []
        self._tag = f"PH{secrets.token_hex(8)}N"

    def __call__(self, content: str) -> str:
        self.contents.append(content)
        return f"{self._tag}{len(self.contents) - 1}E"

    def split(self, text: str) -> list[str]:
        """Markup, the name of a placeholder, markup, and so on; ends with markup."""
        first, *rest = text.split(self._tag)
        return [first, *(part for piece in rest for part in piece.partition("E")[::2])]


def _spelling(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches where one of `tokens` is spelled; never, where there is none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _num_chars(value: Any) -> int:
    """Characters of all texts in it, at any depth.

    Raises:
        RequestError: it is nested too deeply to be rendered.
    """
    total, pending = 0, [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise RequestError(f"messages: nested more than {_MAX_DEPTH} deep")
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            pending += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            pending += [(part, depth + 1) for part in item]
    return total


def _padded_vocab_size(folder: Path) -> int:
    """Rows of the model's embedding, where its folder tells; else 0."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _marked(index: int, message: object, mark: _Placeholders) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}]: an object is expected, not {message!r:.50}")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise RequestError(f"messages[{index}].role: {role!r} is not a role")
    content = _text(index, message.get("content"))
    marked = {**message, "role": "system" if role == "developer" else role}
    # An assistant's past turn goes through the template as it is: templates cut thoughts from it.
    marked["content"] = content if role == "assistant" or not content else mark(content)
    if isinstance(calls := message.get("tool_calls"), list):
        marked["tool_calls"] = [_with_arguments_read(call) for call in calls]
    return marked


def _with_arguments_read(call: Any) -> Any:
    """OpenAI's clients send a call's arguments as a string; templates are written for objects."""
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
    raise RequestError(f"messages[{index}].content: a string or parts of type text are expected")
