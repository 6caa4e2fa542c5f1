"""Three dissimilar formats, with real templates, on a real server: XML, harmony and bare JSON.

One small model learns a conversation of each by heart, and one server plays all three.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import openai
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agentloop import Runtime, Sampling, Settings, StopReason
from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.chat_settings import ChatSettings
from agentloop.agent.tools import Tools
from agentloop.agent.truncation import truncate
from agentloop.events import CallStarted, Event, TurnSampled
from agentloop.inference.processes.supervise import ServerSettings, sglang_servers
from agentloop.models import SMALL
from agentloop.sandbox import PoolSettings
from agentloop.serving.access import ServeSettings
from agentloop.serving.app import AgentService, listening
from agentloop.serving.listen import bind
from agentloop.trajectory import ToolCall
from tests.agentloop.agent.real_models import control_tokens, template_of
from tests.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

QUESTION = "What is 37 times 48?"
ANSWER = "It is 1776."
TEMPLATES = {
    "qwen3-coder": "Qwen-Qwen3-Coder-30B-A3B-Instruct",
    "harmony": "openai-gpt-oss-120b",
    "llama-json": "meta-llama-Llama-3.2-3B-Instruct",
}


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: One.
        b: The other.
    """
    return a * b


def settings_of(name: str) -> ChatSettings:
    # The date of a template must not change between training and the test.
    source = template_of(TEMPLATES[name]).replace("strftime_now(", "(")
    return ChatSettings(template=source)


def conversation(chat: ChatFormat) -> tuple[list[int], list[bool]]:
    """The ids of the conversation, and which of them the model samples."""
    arguments = {"a": 37, "b": 48}
    call = {"id": "x", "type": "function", "function": {"name": "multiply", "arguments": arguments}}
    made = ToolCall("x", "multiply", arguments, "", 0, 0)
    prompt = chat.prompt([{"role": "user", "content": QUESTION}], Tools([multiply]).schemas)
    calls = chat.encode_assistant_turn({"role": "assistant", "content": "", "tool_calls": [call]})
    response = chat.observation([truncate(chat, "1776", 512)], [made])
    answer = chat.encode_assistant_turn({"role": "assistant", "content": ANSWER})
    ids = prompt + calls + response + answer
    sampled = [False] * len(prompt) + [True] * len(calls) + [False] * len(response)
    return ids, sampled + [True] * len(answer)


@pytest.fixture(scope="module")
async def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats") / "model"
    hf = PreTrainedTokenizerFast.from_pretrained(SMALL)
    new = {token for name in TEMPLATES.values() for token in control_tokens(template_of(name))}
    hf.add_tokens([AddedToken(token, normalized=False) for token in sorted(new)])
    hf.bos_token = "<s>"
    hf.save_pretrained(folder)
    sequences = [conversation(ChatFormat.load(folder, settings_of(name))) for name in TEMPLATES]
    request = {"vocab_size": len(hf), "sequences": sequences}
    with anyio.fail_after(patient(300)):
        await anyio.run_process(
            [sys.executable, "-m", "tests.integration.overfit", str(folder)],
            input=json.dumps(request).encode(),
        )
    return folder


@pytest.fixture(scope="module")
async def server_url(
    sglang_installed: None, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str]:
    settings = ServerSettings(max_total_tokens=16_384)
    logs = tmp_path_factory.mktemp("log")
    async with sglang_servers(model, settings, log_dir=logs, on_progress=print) as servers:
        yield servers[0].url


@pytest.mark.parametrize("name", list(TEMPLATES))
async def test_openais_client_gets_an_answer_after_a_call(
    name: str, model: Path, server_url: str
) -> None:
    settings = Settings(
        model=str(model),
        servers=[server_url],
        tools=["tests.integration.test_formats:multiply"],
        chat=settings_of(name),
        sandbox=PoolSettings(backend="process"),
        sampling=Sampling(temperature=0),
        serve=ServeSettings(port=0),
    )
    events: list[Event] = []
    async with Runtime(settings) as runtime:
        assert runtime.chat.family.name == name
        trajectory = await runtime.rollout(QUESTION, on_event=events.append)
        assert trajectory.stop_reason is StopReason.ANSWERED
        assert (trajectory.answer, len(trajectory.turns)) == (ANSWER, 2)
        (call,), (result,) = trajectory.calls, trajectory.results
        assert (call.arguments, result.content) == ({"a": 37, "b": 48}, "1776")
        kinds = [type(event) for event in events]
        assert kinds.index(CallStarted) < kinds.index(TurnSampled)  # while the turn streams
        with bind(settings.serve) as bound:
            async with (
                listening(AgentService(runtime, settings), bound) as url,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
            ):
                stated = await client.chat.completions.create(
                    model=f"{runtime.model_name}-agent",
                    messages=[{"role": "user", "content": QUESTION}],
                )
    assert stated.choices[0].message.content == ANSWER
    assert stated.choices[0].finish_reason == "stop"
