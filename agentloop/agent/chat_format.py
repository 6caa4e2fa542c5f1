"""Encode conversations as token ids, append-only.

The model's own chat template defines the markup; everything else is data:

- `prompt()` renders the template over messages whose data cannot spell a control token
  (`agentloop.agent.encoder`);
- `observation()` returns the ids that the template puts between an assistant's turn and the next
  generation prompt. The prompt of a turn is the previous prompt, the sampled ids and this.

Sampled ids are never decoded and tokenised again. Works with any Hugging Face template that
supports the `tool` role; others are rejected with an error that says why. What a model samples
(calls, thoughts) is its family's: `agentloop.agent.formats`. Images and audio are not supported.
"""

from __future__ import annotations

import bisect
import copy
import functools
import inspect
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import anyio
from tokenizers import Tokenizer

from agentloop.agent.chat_settings import RESERVED_ARGUMENTS, ChatSettings
from agentloop.agent.continuation import QUESTION, Continuation, Render
from agentloop.agent.encoder import TokenEncoder
from agentloop.agent.formats import HERMES, Family, detect, get_family
from agentloop.agent.openai_messages import (
    function_call,
    normal_form,
    num_chars,
    tool_message,
    with_ids,
)
from agentloop.agent.placeholders import Placeholders
from agentloop.agent.tokenizer import eos_ids, load_tokenizer, padded_vocab_size
from agentloop.errors import ModelError, RequestError
from agentloop.trajectory import Message, ToolCall, Trajectory, Turn, TurnEnd

_MAX_PROMPTS = 64  # in the cache
_MAX_VARIANTS = 8  # formats with other template arguments
_MAX_CHARS_ON_LOOP = 20_000  # takes some milliseconds

_MAX_READ_FIELDS = 256  # of messages, about which the template was asked
_MAX_OPENING_TOKENS = 8
_MAX_OPENINGS = 1024  # ends of prompts in a cache: most are alike
_OPENED_RE = re.compile(r"(?:<(?:reason|think)>|\[THINK\])\s*$")


class ChatFormat:
    """The chat template and tokenizer of one model.

    Attributes:
        tokenizer: The model's tokenizer.
        family: The form of the calls and thoughts that the model samples.
        vocab_size: Ids at or above this must never be sent to a server.
        end_id: The token that ends an assistant's turn without calls.
        stop_ids: The tokens that end a generation: the ends of turns with and without calls, the
            tokenizer's end-of-text token, which differs in base models, and those that the model's
            generation_config.json names.
        generation_prompt: The template's text between the last message and the model's first token.
        reads: `reads(kind, name)` returns whether the template may read a field of messages: it
            names it, or writes it. `kind` is the role of the messages, or "call" or "function" for
            those of calls in them.
        pairs_by_order: Whether only their order tells the model which results answer which calls:
            the template does not read their ids.
    """

    end_id: int
    stop_ids: tuple[int, ...]
    generation_prompt: str
    pairs_by_order: bool

    def __init__(
        self,
        tokenizer: Tokenizer,
        render: Render,
        *,
        family: Family = HERMES,
        end_token: str | None = None,
        eos_token: str | None = None,
        eos_ids: Iterable[int] = (),
        source: str = "",
    ) -> None:
        """Derive the markup from the template.

        Args:
            render: `render(messages, tools=None, add_generation_prompt=False)` returns the
                template's text. It takes further variables of the template by name.
            end_token: The token that ends a turn; by default, the one that the template writes.
            eos_token: The tokenizer's end-of-text token.
            eos_ids: Further tokens that end a generation.
            source: The template's source.

        Raises:
            ModelError: The template cannot be used for a tool-using agent.
        """
        self.tokenizer = tokenizer
        self.family = family
        self._encoder = TokenEncoder(tokenizer)
        self.vocab_size = self._encoder.vocab_size
        self._configured_end = end_token
        self._eos = (eos_token, tuple(eos_ids))
        self._rendering = anyio.Lock(fast_acquire=True)
        self._opening_tag_in = functools.lru_cache(_MAX_OPENINGS)(
            lambda ids: _opening_tag(self.decode(ids))
        )
        self._source = source
        self._use(render)

    def _use(self, render: Render) -> None:
        self._render = render
        self._prompts: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._variants: OrderedDict[str, ChatFormat] = OrderedDict()
        self.reads = functools.lru_cache(_MAX_READ_FIELDS)(self._reads)
        self._end_token = self._find_end_token()
        self._call_end = self.family.end_of_calls or self._end_token
        self._continuation = Continuation(
            render,
            self._encoder,
            self.family,
            end=self._end_token,
            end_of_calls=self._call_end,
        )
        without_prompt, ready = render([QUESTION]), render([QUESTION], add_generation_prompt=True)
        self.generation_prompt = (
            ready.removeprefix(without_prompt) if ready.startswith(without_prompt) else ""
        )
        self._ready = ready
        eos_token, eos_ids = self._eos
        ends = (self._end_token, self._call_end, eos_token or "")
        ids_by_token = {end: id for end in ends if (id := self.token_id(end)) is not None}
        self.end_id = ids_by_token[self._end_token]
        self.pairs_by_order = not self.reads("tool", "tool_call_id")
        self._stops = tuple(ids_by_token)
        self.stop_ids = tuple(dict.fromkeys([*ids_by_token.values(), *eos_ids]))

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

        reserved = inspect.signature(hf.apply_chat_template).parameters.keys() - {"kwargs"}

        def render(
            messages: Sequence[Message],
            tools: Sequence[Mapping[str, object]] | None = None,
            add_generation_prompt: bool = False,
            **arguments: object,
        ) -> str:
            # A version of transformers may have more parameters than those that we know.
            if taken := sorted(reserved & (settings.arguments | arguments).keys()):
                raise ModelError(f"{', '.join(taken)}: reserved by transformers")
            text = hf.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **(settings.arguments | arguments),
            )
            return str(text)

        templates = hf.chat_template  # one, or several by name
        text = templates if isinstance(templates, str) else "\n".join(map(str, templates.values()))
        chat = cls(
            hf.backend_tokenizer,
            render,
            family=detect(text) if settings.format == "auto" else get_family(settings.format),
            end_token=settings.end_token,
            eos_token=hf.eos_token,
            eos_ids=eos_ids(Path(model_path)),
            source=text,
        )
        # With a padded vocabulary the model may sample ids that the tokenizer cannot decode.
        chat.vocab_size = max(chat.vocab_size, padded_vocab_size(Path(model_path)))
        return chat

    def with_arguments(self, arguments: Mapping[str, object]) -> ChatFormat:
        """Return this format with further variables of the template, such as enable_thinking.

        Raises:
            RequestError: A name is reserved, or the template cannot be used with them.
        """
        if not arguments:
            return self
        if taken := sorted(RESERVED_ARGUMENTS & arguments.keys()):
            raise RequestError(f"chat_template_kwargs: {', '.join(taken)}: reserved")
        key = repr(sorted(arguments.items()))
        if key not in self._variants:
            variant = copy.copy(self)
            try:
                variant._use(functools.partial(self._render, **arguments))
            except ModelError as error:
                raise RequestError(f"chat_template_kwargs: {error}") from error
            self._variants[key] = variant
        self._variants.move_to_end(key)
        if len(self._variants) > _MAX_VARIANTS:
            self._variants.popitem(last=False)
        return self._variants[key]

    @property
    def end_of_calls(self) -> str:
        """The token that ends a turn with calls."""
        return self._call_end

    @property
    def opened_thought(self) -> str:
        """The tag with which the generation prompt opens a reasoning block, or an empty string."""
        return _opening_tag(self.generation_prompt)

    def begins_in_thought(self, trajectory: Trajectory, turn: int) -> bool:
        """Return whether the prompt of a turn ends with the tag that opens a reasoning block."""
        return bool(self.opening_tag(trajectory, turn))

    def opening_tag(self, trajectory: Trajectory, turn: int) -> str:
        """Return the tag of reasoning with which the prompt of a turn ends, or an empty string.

        After tool responses, some templates open none.
        """
        turns = trajectory.turns
        before = turns[turn - 1].observation_ids if turn > 0 else trajectory.prompt_ids
        return self._opening_tag_in(tuple(before[-_MAX_OPENING_TOKENS:]))

    def end_of_thought(self, trajectory: Trajectory, turn: int) -> list[int]:
        """Return the ids that close the thought with which a turn was cut off."""
        thoughts = self.family.markup.thoughts
        text = self.opening_tag(trajectory, turn) + trajectory.turns[turn].text
        _, closing = max(thoughts, key=lambda pair: text.rfind(pair[0]))
        return self._encoder.encode_marked(f"\n{closing}\n\n", Placeholders())

    def token_id(self, text: str) -> int | None:
        """Return the id of `text` if it is a single token of the vocabulary, else None."""
        return self._encoder.token_id(text)

    def encode(self, text: str) -> list[int]:
        """Encode data: no part of it becomes a control token, even if it spells one."""
        return self._encoder.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including control tokens."""
        return self._encoder.decode(ids)

    def last_user_text(self, ids: Sequence[int]) -> str:
        """Return a prompt's last message if it is a user's, else the text of the whole prompt."""
        text, mark = self.decode(ids), secrets.token_hex(8)
        rendered = self._render([{"role": "user", "content": mark}], add_generation_prompt=True)
        before, _, after = rendered.partition(mark)
        opening = before
        for control in self._encoder.control_re.finditer(before):
            opening = before[control.start() :]
        _, separator, question = text.removesuffix(after).rpartition(opening)
        return question if separator and text.endswith(after) else text

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()
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
        plain = normal_form(messages, in_call_order=self.pairs_by_order)
        disarmed_tools = [self._encoder.disarm_value(tool, mark) for tool in tools]

        def render(num_messages: int) -> str:
            disarmed = [
                self._continuation.disarm_message(message, mark, self.family.thought_tags)
                for message in self._continuation.as_taken(plain[:num_messages], self.family)
            ]
            return self._render(disarmed, tools=disarmed_tools, add_generation_prompt=True)

        try:
            text = render(len(plain))
        except Exception as error:  # templates may raise anything (jinja2, KeyError, ...)
            index = _first_refused(render, len(plain))
            raise RequestError(
                f"messages[{index}]: the model's chat template says: {error}"
            ) from error
        return self._encoder.encode_marked(text, mark)

    async def prompt_async(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] = ()
    ) -> list[int]:
        """Render a prompt as `prompt()` does, one at a time so as not to block the event loop.

        Prompts are cached, because the rollouts of a group share one. A long prompt is rendered in
        a thread.
        """
        size = num_chars((messages, tools))
        async with self._rendering:  # no deadline: rendering takes milliseconds, and ends by itself
            if size > _MAX_CHARS_ON_LOOP:
                return await anyio.to_thread.run_sync(self.prompt, messages, tools)
            key = repr((messages, tools))
            if key not in self._prompts:
                self._prompts[key] = tuple(self.prompt(messages, tools))
            self._prompts.move_to_end(key)
            if len(self._prompts) > _MAX_PROMPTS:
                self._prompts.popitem(last=False)
            return list(self._prompts[key])

    def _reads(self, kind: str, name: str) -> bool:
        return name in self._source or self._writes(kind, name)

    def _writes(self, kind: str, name: str) -> bool:
        """Return whether the template writes the value of a field."""
        value = Placeholders()("value")
        more = {name: value}
        arguments = '{"a": 1}' if self._continuation.text_arguments else {"a": 1}
        id = "call00000"
        function = {"name": "tool", "arguments": arguments, **(more if kind == "function" else {})}
        call = {"id": id, "type": "function", "function": function}
        reply: Message = {"role": "assistant", "content": "answer"}
        messages: list[Message] = [QUESTION, reply, QUESTION]
        match kind:
            case "system" | "developer":
                messages = [{"role": "system", "content": "text", **more}, QUESTION]
            case "user":
                messages = [{**QUESTION, **more}]
            case "assistant":
                messages[1] = {**reply, **more}
            case _:
                called = {**call, **more} if kind == "call" else call
                response: Message = {"role": "tool", "tool_call_id": id, "content": "text"}
                messages[1] = {"role": "assistant", "content": "", "tool_calls": [called]}
                messages[2] = {**response, **more} if kind == "tool" else response
        try:
            return value in self._render(messages, add_generation_prompt=True)
        except Exception:  # a template may raise anything, as in prompt()
            return True

    def min_prompt_tokens(self, messages: Sequence[Message]) -> int:
        """Return a lower bound of the number of tokens of a prompt, without rendering it."""
        return max(len(messages), num_chars(messages) // self._encoder.longest_token)

    def encode_assistant_turn(self, message: Message, *, num_calls: int = 0) -> list[int]:
        """Return the ids that a model would sample for an assistant's `message`.

        These are the ids that the template writes after the generation prompt, including the end
        token. A thought that the generation prompt opens is empty if the message has none. Tags of
        reasoning and of tool calls in the content become control tokens; anything else, and the
        arguments of `tool_calls`, is encoded as data.

        Args:
            num_calls: Number of calls in the conversation before, for templates that count them.

        Raises:
            RequestError: The template cannot render the message, or does not start it with the
                generation prompt.
        """
        mark = Placeholders()
        (plain,) = normal_form([message])
        if self.family.history_id is not None:
            (plain,) = with_ids([plain], self.family.history_id, num_calls)
        reply = self._continuation.disarm_message(plain, mark, self.family.all_tags)
        try:
            text = self._render([QUESTION, reply])
            before = self._ready
            if not text.startswith(before):  # the text may depend on the date
                before = self._render([QUESTION], add_generation_prompt=True)
        except Exception as error:  # as in prompt()
            raise RequestError(f"content: the model's chat template says: {error}") from error
        if not text.startswith(before):
            if (thinking := self._with_empty_thought(message)) is not None:
                return self.encode_assistant_turn(thinking)
            raise RequestError(self._explain_mismatch(message))
        end_token = self._call_end if plain.get("tool_calls") else self._end_token
        turn, end, _ = text.removeprefix(before).partition(end_token)
        if not end and not self._end_opens_next:
            raise RequestError(
                f"content: the model's chat template does not end this message with "
                f"{end_token!r}: set chat.template to a template that ends every turn with it"
            )
        return self._encoder.encode_marked(turn + end_token, mark)

    def _with_empty_thought(self, message: Message) -> Message | None:
        """Return the message with an empty thought first, where the generation prompt opens one.

        None: the prompt opens none, or the message has one.
        """
        opened, content = self.opened_thought, message.get("content") or ""
        closings = [end for start, end in self.family.markup.thoughts if start == opened.strip()]
        if not closings or not isinstance(content, str) or message.get("reasoning_content"):
            return None
        if any(tag in content for tag in (opened.strip(), closings[0])):
            return None
        # With a line of its own for the tag, an empty thought is what Qwen's templates write.
        between = "\n" if opened.endswith("\n") else ""
        thought = f"{opened}{between}{closings[0]}\n{between}"
        return {**message, "content": thought + content if content else thought.rstrip()}

    def _explain_mismatch(self, message: Message) -> str:
        """Explain why the template does not write `message` after its generation prompt."""
        error = (
            "content: the model's chat template starts a generated turn with "
            f"{self.generation_prompt!r} but starts this message differently"
        )
        opened = self.opened_thought.strip()
        if opened and not str(message.get("content") or "").startswith(opened):
            return (
                f"{error}: begin the content with {opened}, or set chat.template to a template "
                "that adds it, such as `paper`"
            )
        return f"{error}: set chat.template to a template that starts both in the same way"

    def observation(
        self,
        contents: Sequence[str | list[int]],
        calls: Sequence[ToolCall] = (),
        *,
        last_id: int | None = None,
    ) -> list[int]:
        """Return the ids after an assistant's turn: tool responses and a new generation prompt.

        Args:
            contents: One per call, in the order of the calls: text, or ids that are already
                truncated.
            calls: The turn's calls. Some templates write their ids or names again.
            last_id: The last token of the turn. If it is none that ends a turn, because the turn
                was cut, the end is written first.
        """
        is_cut = last_id is not None and self._is_cut(last_id, self._call_end)
        return self._continuation.after_calls(contents, calls, is_cut=is_cut)

    def continuation(
        self,
        messages: Sequence[Message],
        calls: Sequence[ToolCall] = (),
        *,
        last_id: int | None = None,
        num_calls: int = 0,
    ) -> list[int]:
        """Return the ids after an assistant's turn: any messages and a new generation prompt.

        Args:
            messages: Messages in OpenAI's format.
            calls: The turn's calls.
            last_id: The last token of the turn, as in `observation()`.
            num_calls: Number of calls in the conversation so far.

        Raises:
            RequestError: A message cannot be rendered, or the template does not append it.
        """
        end = self._call_end if calls else self._end_token
        return self._continuation.after_turn(
            messages,
            calls,
            is_cut=last_id is not None and self._is_cut(last_id, end),
            num_calls=num_calls,
        )

    async def continuation_async(
        self,
        messages: Sequence[Message],
        calls: Sequence[ToolCall] = (),
        *,
        last_id: int | None = None,
        num_calls: int = 0,
    ) -> list[int]:
        """Render a continuation as `continuation()` does, a long one in a thread."""
        render = functools.partial(
            self.continuation, messages, calls, last_id=last_id, num_calls=num_calls
        )
        async with self._rendering:  # no deadline: as in prompt_async()
            if num_chars(messages) > _MAX_CHARS_ON_LOOP:
                return await anyio.to_thread.run_sync(render)
            return render()

    def user_message(self, content: str, *, last_id: int | None = None) -> list[int]:
        """Return the ids after an assistant's turn: a user's message and a new generation prompt.

        `last_id` is as in `observation()`.

        Raises:
            RequestError: The template does not write a user's message after an assistant's turn.
        """
        try:
            return self.continuation([{"role": "user", "content": content}], last_id=last_id)
        except RequestError as error:
            raise RequestError(str(error).replace("messages:", "reply:", 1)) from error

    def messages_of(self, turns: Iterable[Turn]) -> list[Message]:
        """Return a trajectory's turns as messages, to continue the conversation after it.

        Only for a new prompt: calls and the text after them are rendered again by the template.
        """
        messages: list[Message] = []
        thought = self.opened_thought
        for turn in turns:
            if turn.end is TurnEnd.THOUGHT:  # the next turn goes on with this message
                thought += turn.text + self.decode(turn.observation_ids)
                continue
            text = turn.text
            for token in self._stops:
                text = text.removesuffix(token)
            message: dict[str, object] = {
                "role": "assistant",
                **self.family.message_of(thought + text, has_calls=bool(turn.calls)),
            }
            thought = self.opened_thought
            if turn.calls:
                message["tool_calls"] = [
                    function_call(self.family.call_id(call), call.name, call.arguments)
                    for call in turn.calls
                ]
            messages.append(message)
            ids = {call.id: self.family.call_id(call) for call in turn.calls}
            messages += [
                tool_message(ids.get(result.call_id, result.call_id), result.content)
                for result in turn.results
            ]
        return messages

    def _is_cut(self, last_id: int, end_token: str) -> bool:
        """Return whether a turn whose last token is `last_id` still lacks its end."""
        if last_id == self.token_id(end_token):
            return False
        return self._end_opens_next or last_id not in self.stop_ids

    def _find_end_token(self) -> str:
        """Return the configured end token, or the one that the template writes."""
        configured = self._configured_end
        if configured is not None and self.token_id(configured) is None:
            raise ModelError(f"chat.end_token: the tokenizer has no token {configured!r}")
        mark = Placeholders()
        reply = {"role": "assistant", "content": mark("reply")}
        self._end_opens_next = False
        try:
            tail = mark.split(self._render([QUESTION, reply]))[-1]
            match = self._encoder.control_re.search(tail)
            if not tail.strip() and configured is None:
                # In some families, the token that opens the next message ends a turn.
                self._end_opens_next = True
                text = self._render([QUESTION, reply, {"role": "user", "content": mark("next")}])
                match = self._encoder.control_re.search(mark.split(text)[2])
        except Exception as error:  # as in prompt()
            raise ModelError(f"the chat template cannot be rendered: {error}") from error
        if configured is not None:
            if configured not in tail:
                raise ModelError(
                    f"chat.end_token: the chat template does not end a turn with {configured!r}: "
                    f"after an assistant's message it writes {tail!r}"
                )
            return configured
        if match is None:
            raise ModelError(
                "the chat template does not end a turn with a control token of the tokenizer: "
                f"after an assistant's message it writes {tail!r}. Set chat.template to a template "
                "that does"
            )
        return match.group()


def _first_refused(render: Callable[[int], str], num_messages: int) -> int:
    """Return the index of the first message with which a template cannot render a conversation."""

    def is_refused(num: int) -> bool:
        try:
            render(num)
        except Exception:  # as in prompt()
            return True
        return False

    return bisect.bisect_left(range(1, num_messages), True, key=is_refused)


def _opening_tag(text: str) -> str:
    """Return the tag of reasoning with which a text ends, or an empty string."""
    match = _OPENED_RE.search(text)
    return match.group() if match else ""
