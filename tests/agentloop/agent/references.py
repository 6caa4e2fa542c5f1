"""Compare the ids of prompts with those of the model makers' own encoders.

    pip install mistral-common openai-harmony && python -m tests.agentloop.agent.references

Random conversations are encoded with the templates of Mistral Nemo and gpt-oss, and by Mistral's
and OpenAI's libraries. mistral-common ships a vocabulary; openai-harmony downloads one, or reads
`o200k_base.tiktoken` from the folder `$TIKTOKEN_ENCODINGS_BASE`, which this needs.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.resources
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.formats import detect
from tests.agentloop.agent import real_models
from tests.agentloop.agent.random_conversations import conversations, some_text
from tests.agentloop.agent.test_real_templates import TOOLS

_HARMONY_RE = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
Token = str | int  # a control token's text, or the rank of another
Messages = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ids with the makers' own encoders.")
    parser.add_argument("--conversations", type=int, default=1000)
    count = parser.parse_args().conversations
    for name, make in (("mistral-common", _mistral), ("openai-harmony", _harmony)):
        chat, rank_of, theirs = make()
        added = chat.tokenizer.get_added_tokens_decoder()
        same = 0
        for example, dice in conversations(name, count):
            messages = _messages(dice)
            ids = chat.prompt(messages, TOOLS)
            ours = [added[id].content if id in added else id for id in ids]
            if ours == (reference := [rank_of(id) for id in theirs(messages)]):
                same += 1
            else:
                _show(example, chat.decode(ids), ours, reference)
        print(f"{name}: {same} of {count} conversations have the same ids", flush=True)


def _messages(dice: random.Random) -> Messages:
    """Return a question, mostly with a call, its response, an answer and another question."""

    def words() -> str:
        text = "".join(char for char in some_text(dice) if char.isprintable()).strip()
        return text or "x"

    function = {"name": "multiply", "arguments": {"a": 37, "note": words()}}
    call = {"id": "abcdef123", "type": "function", "function": function}
    messages: Messages = [
        {"role": "user", "content": f"{words()}."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        # Nemo's template does not quote it, as mistral-common quotes what is not JSON.
        {"role": "tool", "tool_call_id": "abcdef123", "content": str(dice.randint(-9, 10**9))},
        {"role": "assistant", "content": words()},
        # It writes the tools before each question that equals the last one.
        {"role": "user", "content": f"{words()}?"},
    ]
    return messages[: dice.choice((1, 3, 5))]


def _show(example: str, text: str, ours: Sequence[Token], reference: Sequence[Token]) -> None:
    differ = (i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b)
    at = max(next(differ, min(len(ours), len(reference))), 3)
    print(
        f"{example}: {ours[at - 3 : at + 5]}, theirs {reference[at - 3 : at + 5]}: {text[-300:]!r}"
    )


def _chat(name: str, ranks: Iterable[str], pattern: str) -> ChatFormat:
    template = real_models.template_of(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ranks.tiktoken"
        file.write_text("\n".join(ranks), "utf-8")
        backend = TikTokenConverter(str(file), pattern=pattern).converted()
    controls = real_models.control_tokens(template)
    backend.add_tokens([AddedToken(text, normalized=False) for text in controls])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    hf.chat_template = template
    render = functools.partial(real_models._render, hf)
    return ChatFormat(hf.backend_tokenizer, render, family=detect(template))


def _mistral() -> tuple[ChatFormat, Callable[[int], Token], Callable[[Messages], list[int]]]:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    file = importlib.resources.files("mistral_common") / "data" / "tekken_240718.json"
    tekken = json.loads(file.read_text("utf-8"))
    config = tekken["config"]
    first = config["default_num_special_tokens"]
    vocab = tekken["vocab"][: config["default_vocab_size"] - first]
    ranks = (f"{token['token_bytes']} {token['rank']}" for token in vocab)
    chat = _chat("mistralai-Mistral-Nemo-Instruct-2407", ranks, config["pattern"])
    encoder = MistralTokenizer.from_file(str(file))
    pieces = encoder.instruct_tokenizer.tokenizer

    def encode(messages: Messages) -> list[int]:
        request = ChatCompletionRequest.from_openai(_with_text(messages), tools=TOOLS)
        return list(encoder.encode_chat_completion(request).tokens)

    return chat, lambda id: pieces.id_to_piece(id) if id < first else id - first, encode


def _with_text(messages: Messages) -> Messages:
    """Return messages whose calls have arguments as OpenAI's API has them."""
    copied: Messages = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return copied


def _harmony() -> tuple[ChatFormat, Callable[[int], Token], Callable[[Messages], list[int]]]:
    import openai_harmony as harmony

    file = Path(os.environ["TIKTOKEN_ENCODINGS_BASE"]) / "o200k_base.tiktoken"
    ranks = file.read_text("utf-8").split("\n")
    chat = _chat("openai-gpt-oss-120b", filter(None, ranks), _HARMONY_RE)
    encoder = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    today = datetime.date.today().isoformat()
    system = harmony.SystemContent.new().with_conversation_start_date(today)
    tools = [harmony.ToolDescription.new(**_describe(tool)) for tool in TOOLS]
    developer = harmony.DeveloperContent.new().with_function_tools(tools)

    def message_of(message: dict[str, Any]) -> Any:
        role = harmony.Role(message["role"])
        if calls := message.get("tool_calls"):
            function = calls[0]["function"]
            text = json.dumps(function["arguments"], ensure_ascii=False)
            made = harmony.Message.from_role_and_content(role, text).with_channel("commentary")
            return made.with_recipient("functions.multiply").with_content_type("json")
        if role is harmony.Role.TOOL:
            author = harmony.Author.new(role, "functions.multiply")
            made = harmony.Message.from_author_and_content(author, json.dumps(message["content"]))
            return made.with_channel("commentary").with_recipient("assistant")
        made = harmony.Message.from_role_and_content(role, message["content"])
        return made.with_channel("final") if role is harmony.Role.ASSISTANT else made

    def encode(messages: Messages) -> list[int]:
        first = [
            harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system),
            harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer),
        ]
        conversation = harmony.Conversation.from_messages([*first, *map(message_of, messages)])
        return list(
            encoder.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT)
        )

    return chat, lambda id: encoder.decode([id]) if id >= len(ranks) - 1 else id, encode


def _describe(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    return {key: function[key] for key in ("name", "description", "parameters")}


if __name__ == "__main__":
    main()
