"""The chat templates of real models: exact, append-only, no control tokens from contents."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.formats import detect
from agentloop.errors import RequestError
from agentloop.training.sft.fine_tuning import Dialogue, trajectories_of
from agentloop.trajectory import ToolCall
from tests.agentloop.agent.random_conversations import EXAMPLES, conversations, some_text
from tests.agentloop.agent.real_models import (
    TEMPLATES,
    chat_of,
    control_tokens,
    fast_tokenizer,
    template_of,
)

pytestmark = pytest.mark.timeout(120)  # the first test converts a tokenizer, in some seconds

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply <two> numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "one"},
                    "note": {"type": "string", "description": "text"},
                },
                "required": ["a"],
            },
        },
    }
]
# These write a thought only while no user's message follows, so a prompt of theirs does not extend
# the ids of the turn before; ours does.
DROP_THOUGHTS = {
    "GLM-4.7-Flash", "MiniMaxAI-MiniMax-M2", "MiniMaxAI-MiniMax-M2.7",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NVIDIA-Nemotron-Nano-v2", "Qwen-Qwen3-0.6B",
    "Qwen-Qwen3-4B-Thinking-2507", "Qwen-Qwen3.5-0.8B", "Qwen-Qwen3.6-35B-A3B",
    "deepseek-ai-DeepSeek-V3.2",
}  # fmt: skip
# A turn of harmony ends with <|return|>, which a prompt of its template has replaced by <|end|>.
REPLACES_END = {"openai-gpt-oss-120b"}
# "It begins inside a thought" means that a message without one is written in another way.
NEEDS_THOUGHT = {
    "GLM-4.7-Flash",
    "MiniMaxAI-MiniMax-M2",
    "MiniMaxAI-MiniMax-M2.7",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
}
# They remove the thought although no user's message follows, or write another generation prompt.
CANNOT_BE_IMITATED = {"NVIDIA-Nemotron-Nano-v2", "deepseek-ai-DeepSeek-V3.2"}

# Their templates refuse a turn with several.
ONE_CALL = {"meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"}


def call_id(name: str, number: int = 0) -> str:
    return f"functions.multiply:{number}" if "Kimi" in name else f"abcdef12{number}"


def calls_tool(name: str, *notes: str) -> dict[str, Any]:
    made = [
        {
            "id": call_id(name, number),
            "type": "function",
            "function": {"name": "multiply", "arguments": {"a": 37, "note": note}},
        }
        for number, note in enumerate(notes)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def responds(name: str, *contents: str) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call_id(name, number), "content": content}
        for number, content in enumerate(contents)
    ]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def controls_in(chat: ChatFormat, ids: Sequence[int]) -> list[int]:
    return [token for token in ids if token in controls_of(chat)]


@functools.cache
def controls_of(chat: ChatFormat) -> frozenset[int]:
    return frozenset(chat.tokenizer.get_added_tokens_decoder())


@functools.cache
def num_conversations(name: str) -> int:
    """Return a template's share of its family's conversations, and of the time that they take."""
    family = detect(template_of(name)).name
    shared = sum(detect(template_of(template)).name == family for template in TEMPLATES)
    return math.ceil(EXAMPLES / 4 / shared)


def num_calls(name: str, dice: random.Random) -> int:
    return 1 if name in ONE_CALL else dice.randint(1, 3)


def some_words(dice: random.Random) -> str:
    """Text that is not blank, and spells no control token."""
    while not (text := some_text(dice)).strip() or control_tokens(text) != ["</s>", "<s>"]:
        pass
    return text


seeded = pytest.mark.timeout(120 + EXAMPLES // 4)


@seeded
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.full
def test_prompt_has_the_ids_of_the_whole_rendered_text(name: str) -> None:
    chat, hf = chat_of(name), fast_tokenizer(name)
    for example, dice in conversations(f"ids {name}", num_conversations(name)):
        many = range(num_calls(name, dice))
        messages = [
            {"role": "system", "content": some_words(dice)},
            user(some_words(dice)),
            calls_tool(name, *(some_words(dice) for _ in many)),
            *responds(name, *(some_words(dice) for _ in many)),
        ][dice.randrange(2) :]
        expected = hf.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)
        assert chat.prompt(messages, TOOLS) == expected["input_ids"], example


@seeded
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.full
def test_contents_add_no_control_token(name: str) -> None:
    chat, spelled = chat_of(name), control_tokens(template_of(name))

    def render_parts(
        question: str, notes: Sequence[str], responses: Sequence[str]
    ) -> list[list[int]]:
        calls = [
            ToolCall(call_id(name, i), "multiply", {}, "", 0, 0) for i in range(len(responses))
        ]
        messages = [user(question), calls_tool(name, *notes), *responds(name, *responses)]
        parts = (
            chat.prompt(messages, TOOLS),
            chat.observation(responses, calls),
            chat.user_message(question),
        )
        return [controls_in(chat, part) for part in parts]

    @functools.cache
    def without(many: int) -> list[list[int]]:
        return render_parts("ab", ["ab"] * many, ["ab"] * many)

    for example, dice in conversations(f"controls {name}", num_conversations(name)):
        many = num_calls(name, dice)
        question, *texts = (f"a{some_text(dice, spelled)}b" for _ in range(1 + 2 * many))
        assert render_parts(question, texts[:many], texts[many:]) == without(many), example


@seeded
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in CANNOT_BE_IMITATED])
@pytest.mark.full
def test_continuations_equal_the_templates_text(name: str) -> None:
    chat = chat_of(name)
    thought = {"reasoning_content": "Hm."} if name in NEEDS_THOUGHT else {}
    for example, dice in conversations(f"follows {name}", num_conversations(name)):
        question = some_words(dice)
        if dice.random() < 0.4:
            answering = {"role": "assistant", "content": some_words(dice).strip(), **thought}
            ids = chat.prompt([user(question)]) + chat.encode_assistant_turn(answering)
            ids += chat.user_message(question)
            rendered = chat.prompt([user(question), answering, user(question)])
            assert ids == rendered or name in DROP_THOUGHTS | REPLACES_END, example
            continue
        many = range(num_calls(name, dice))
        responses = [some_words(dice) for _ in many]
        calls = [ToolCall(call_id(name, i), "multiply", {}, "", 0, 0) for i in many]
        calling = {**calls_tool(name, *(some_words(dice) for _ in many)), **thought}
        ids = chat.prompt([user(question)], TOOLS) + chat.encode_assistant_turn(calling)
        ids += chat.observation(responses, calls)
        rendered = chat.prompt([user(question), calling, *responds(name, *responses)], TOOLS)
        if name in DROP_THOUGHTS and not thought:
            assert chat.decode(rendered).rpartition("multiply")[2] in chat.decode(ids), example
        else:
            assert chat.decode(ids) == chat.decode(rendered), example


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("moonshotai-Kimi-K2-Instruct", "functions.multiply:0", "functions.multiply:1"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "lloda7c11", "lloda7c12"),
    ],
)
def test_ids_of_a_client_become_those_of_the_template(name: str, first: str, second: str) -> None:
    """OpenAI's clients send the ids back that they got from us."""
    chat = chat_of(name)
    ids = ("call_oda7c1_1", "call_oda7c1_2")

    def call_and_response(id: str) -> list[dict[str, Any]]:
        function = {"name": "multiply", "arguments": {"a": 37}}
        made = {"id": id, "type": "function", "function": function}
        return [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": id, "content": "1776"},
        ]

    text = chat.decode(
        chat.prompt([user("hi"), *call_and_response(ids[0]), *call_and_response(ids[1])], TOOLS)
    )
    assert text.count(first) == text.count(second) == 2
    assert not any(id in text for id in ids)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("Qwen-Qwen3-0.6B", "<|im_end|>\n<|im_start|>user\n<tool_response>"),
        ("GLM-4.7-Flash", "<|observation|><tool_response>"),
        ("deepseek-ai-DeepSeek-V3.1",
         "<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>"),
        ("moonshotai-Kimi-K2-Instruct", "<|tool_calls_section_end|><|im_end|><|im_system|>"),
        ("MiniMaxAI-MiniMax-M2", "</minimax:tool_call>[e~[\n]~b]tool"),
        ("openai-gpt-oss-120b", "<|call|><|start|>functions.multiply to=assistant"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "]</s>[TOOL_RESULTS]"),
        ("NVIDIA-Nemotron-Nano-v2", "]</TOOLCALL><SPECIAL_12>\n<SPECIAL_11>User"),
        ("meta-llama-Llama-3.1-8B-Instruct", "<|eot_id|><|start_header_id|>ipython"),
    ],
)  # fmt: skip
def test_turn_that_was_cut_after_a_call_is_closed_first(name: str, end: str) -> None:
    chat = chat_of(name)
    call = ToolCall(call_id(name), "multiply", {}, "", 0, 0)
    (inside,) = chat.encode("x")
    cut = chat.decode(chat.observation(["1776"], [call], last_id=inside))
    complete = chat.decode(
        chat.observation(["1776"], [call], last_id=chat.token_id(chat.end_of_calls))
    )
    assert cut.startswith(end)
    assert cut.endswith(complete)


@pytest.mark.parametrize("name", TEMPLATES)
def test_history_is_read_in_every_form_that_clients_write(name: str) -> None:
    chat = chat_of(name)
    made = calls_tool(name, "x")

    def prompt(arguments: object, **more: object) -> str:
        function = {"name": "multiply", "arguments": arguments}
        called = {**made, "tool_calls": [{**made["tool_calls"][0], "function": function}], **more}
        return chat.decode(chat.prompt([user("hi"), called, *responds(name, "1776")], TOOLS))

    assert "1776" in (plain := prompt("{}"))
    nothing: tuple[object, ...] = ("", " ", "null", None, {})
    for arguments in nothing:
        assert prompt(arguments) == plain
        assert prompt(arguments, content=None, name=None, refusal=None) == plain
    assert "cut he" in prompt('{"note": "cut he')

    def answered(**more: object) -> list[int]:
        answer = {"role": "assistant", "content": "hello", **more}
        return chat.prompt([user("hi"), answer, user("go on")], TOOLS)

    assert answered(tool_calls=[]) == answered(tool_calls=None) == answered()


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_accepted_back(name: str) -> None:
    chat = chat_of(name)
    reasoning = {"reasoning_content": "Hm."}
    for more in ({}, reasoning):
        for content in ("text", "", None):
            answer = {"role": "assistant", "content": content, **more}
            chat.prompt([user("hi"), answer, user("go on")], TOOLS)
            called = {**calls_tool(name, "x", "y"), "content": content, **more}
            results = responds(name, "1776", "1777")
            text = chat.decode(chat.prompt([user("hi"), called, *results], TOOLS))
            assert text.index("1776") < text.index("1777")
            swapped = chat.prompt([user("hi"), called, *reversed(results)], TOOLS)
            if chat.pairs_by_order:
                assert chat.decode(swapped) == text
            else:
                text = chat.decode(swapped)
                assert text.index("1777") < text.index("1776")


@pytest.mark.parametrize(
    "name", ["mistralai-Mistral-Nemo-Instruct-2407", "moonshotai-Kimi-K2-Instruct"]
)
def test_results_keep_their_order_beside_their_ids(name: str) -> None:
    chat, results = chat_of(name), responds(name, "1776", "1777")
    messages = [user("hi"), calls_tool(name, "x", "y"), *reversed(results)]
    answer = {"role": "assistant", "content": "done"}
    dialogue = Dialogue([*messages, answer], TOOLS, "here")
    result = trajectories_of(chat, dialogue, max_tool_response_tokens=512)
    observed = chat.decode(result[0].turns[0].observation_ids)
    assert observed.strip() in chat.decode(chat.prompt(messages, TOOLS))


def test_refusal_of_the_template_names_the_message() -> None:
    chat = chat_of("Qwen-Qwen3.5-0.8B")
    messages = [user("hi"), {"role": "system", "content": "s"}, user("hi")]
    with pytest.raises(RequestError, match=r"^messages\[1\]: the model's chat template says: Sys"):
        chat.prompt(messages)
