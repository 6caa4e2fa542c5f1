"""The small model's template and tokenizer; needs no torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agentloop.models import SMALL

Message = dict[str, Any]

VOCAB_SIZE = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not "special" in the library's sense, so that decoding keeps them, as with Qwen3.
TAGS = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<reason>", "</reason>", "<answer>", "</answer>"),
)

PYTHON = {
    "type": "function",
    "function": {
        "name": "python_code_with_standard_io",
        "parameters": {"type": "object", "properties": {"code": {}, "input": {}}},
    },
}
BARE = {"name": "jupyter_code", "parameters": {"properties": {"code": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(SMALL)


def render(tokenizer: Any, messages: list[Message], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def user(content: object) -> Message:
    return {"role": "user", "content": content}


def test_question_with_tools_and_generation_prompt(tokenizer: Any) -> None:
    text = render(
        tokenizer, [user("What is 37*48?")], tools=[PYTHON, BARE], add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\n"
        "Tools: python_code_with_standard_io(code, input); jupyter_code(code)<|im_end|>\n"
        "<|im_start|>user\nWhat is 37*48?<|im_end|>\n"
        "<|im_start|>assistant\n<reason>"
    )


def test_no_system_section_without_system_text_or_tools(tokenizer: Any) -> None:
    assert render(tokenizer, [user("hi")], tools=[]) == "<|im_start|>user\nhi<|im_end|>\n"


def test_system_text_stands_before_the_tools(tokenizer: Any) -> None:
    for role in ("system", "developer"):
        text = render(tokenizer, [{"role": role, "content": "Be kind."}, user("hi")], tools=[BARE])
        assert text.startswith(
            "<|im_start|>system\nBe kind.\nTools: jupyter_code(code)<|im_end|>\n"
        )


def test_tool_without_parameters(tokenizer: Any) -> None:
    assert "Tools: now()<|im_end|>" in render(tokenizer, [user("hi")], tools=[{"name": "now"}])


@pytest.mark.parametrize("arguments", [{"a": 3, "b": 4}, '{"a": 3, "b": 4}'])
@pytest.mark.parametrize("content", ["", None])
def test_tool_calls_of_the_openai_kind(tokenizer: Any, arguments: object, content: object) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}] * 2
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    expected = f"<|im_start|>assistant\n{CALL}\n{CALL}<|im_end|>\n"
    assert render(tokenizer, [user("?"), message]).endswith(expected)


def test_reasoning_and_calls_render_as_the_verbatim_text_does(tokenizer: Any) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
    verbatim = f"<reason>I compute 3+4.</reason>\n{CALL}"
    forms: list[Message] = [
        {"content": verbatim},
        {"content": verbatim, "tool_calls": [call]},
        {"content": "<reason>I compute 3+4.</reason>", "tool_calls": [call]},
        {"content": "I compute 3+4.</reason>", "tool_calls": [call]},
        {"content": None, "reasoning_content": "I compute 3+4.", "tool_calls": [call]},
    ]
    texts = {render(tokenizer, [user("?"), {"role": "assistant", **form}]) for form in forms}
    assert texts == {
        f"<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n{verbatim}<|im_end|>\n"
    }


def test_plain_assistant_text_stays_as_it_is(tokenizer: Any) -> None:
    text = render(tokenizer, [user("?"), {"role": "assistant", "content": "It is 7."}, user("!")])
    assert "<|im_start|>assistant\nIt is 7.<|im_end|>\n<|im_start|>user\n!" in text


def test_consecutive_tool_messages_share_one_user_block(tokenizer: Any) -> None:
    tools = [{"role": "tool", "content": text} for text in ("84", "13")]
    text = render(tokenizer, [user("?"), *tools, user("next")])
    assert text == (
        "<|im_start|>user\n?<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n84\n</tool_response>\n"
        "<tool_response>\n13\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nnext<|im_end|>\n"
    )


def test_content_in_parts_and_content_of_none(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "3+4?"}]
    assert render(tokenizer, [user(parts)]) == "<|im_start|>user\nWhat is 3+4?<|im_end|>\n"
    assert render(tokenizer, [user(None)]) == "<|im_start|>user\n<|im_end|>\n"


def test_tags_are_single_tokens_that_decoding_keeps(tokenizer: Any) -> None:
    for tag in TAGS:
        ids = tokenizer.encode(tag)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == tag
    for tag in (PAD, START, END):
        ids = tokenizer.encode(tag)
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    "text", ["", " a  b\n\n\t", "Grüße, 世界 🎈", "\x00\x7f", "x" * 5000, "3.14e-9"]
)
def test_any_text_encodes_and_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < VOCAB_SIZE


def test_digits_are_single_tokens_and_words_ignore_preceding_text(tokenizer: Any) -> None:
    assert len(tokenizer.encode("90817263")) == 8
    alone = tokenizer.encode("multiply")
    for text in ("(multiply(", ' "multiply"', "Tools: multiply(", "_multiply_"):
        ids = tokenizer.encode(text)
        assert any(ids[i : i + len(alone)] == alone for i in range(len(ids)))


def test_shipped_files_agree(tokenizer: Any) -> None:
    config = json.loads((SMALL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == len(tokenizer) == VOCAB_SIZE
    assert config["eos_token_id"] == tokenizer.eos_token_id == tokenizer.encode(END)[0]
    assert (SMALL / "model.safetensors").stat().st_size < 3_000_000
