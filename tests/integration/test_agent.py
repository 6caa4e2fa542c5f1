"""The loop against the real SGLang and the real sandbox: what a user would see, and exactness."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import anyio
import orjson
import pytest

from agentloop import Budget, Runtime, Sampling, Settings, StopReason, ToolCallStatus
from agentloop.events import CallStarted, Event, TokensSampled, TurnFinished, TurnPlaced
from agentloop.inference.processes.supervise import ServerSettings, sglang_servers
from agentloop.models import SMALL
from agentloop.sandbox import PoolSettings
from agentloop.trajectory import Trajectory

# The first of all tests waits for SGLang, and for the sandbox's image to be made.
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

GREEDY = Sampling(temperature=0)
TOOL_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
async def runtime(docker_engine: None, sglang_url: str) -> AsyncIterator[Runtime]:
    settings = Settings(
        servers=[sglang_url], sandbox=PoolSettings(backend="docker"), tool_timeout_s=TOOL_TIMEOUT_S
    )
    async with Runtime(settings) as runtime:
        yield runtime


@pytest.mark.gate
async def test_question_is_answered_by_a_call_in_a_container(runtime: Runtime) -> None:
    trajectory = await runtime.rollout("What is 37 times 48?", sampling=GREEDY)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert "\\boxed{1776}" in trajectory.text
    (call,) = trajectory.calls
    assert call.name == "python_code_with_standard_io"
    (result,) = trajectory.results
    assert (result.status, result.content) == (ToolCallStatus.OK, "1776")


@pytest.mark.gate
async def test_ids_replayed_as_one_prompt_have_the_same_logprobs(
    runtime: Runtime, sglang_url: str
) -> None:
    trajectory = await runtime.rollout("What is 512 minus 77?", sampling=Sampling(temperature=1))
    assert len(trajectory.turns) > 1
    body = {
        "input_ids": trajectory.ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{sglang_url}/generate", json=body) as response:
            answer = orjson.loads(await response.read())
    replayed = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in replayed] == trajectory.ids
    sampled = [
        (ours, entry[0])
        for ours, mask, entry in zip(trajectory.logprobs, trajectory.mask, replayed, strict=True)
        if mask
    ]
    assert len(sampled) == trajectory.num_sampled_tokens > 0
    assert max(abs(ours - theirs) for ours, theirs in sampled) < 1e-4
    assert set(trajectory.versions) == {None, "default"}


async def test_turns_end_despite_another_end_of_text(
    sglang_installed: None, tmp_path: Path
) -> None:
    """As Qwen3's base models: everything but the template says that a text ends otherwise."""
    model = tmp_path / "base"
    shutil.copytree(SMALL, model)
    for name, reported in (
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
        ("config.json", {"eos_token_id": 0}),
        ("generation_config.json", {"eos_token_id": 0}),
    ):
        config = orjson.loads((model / name).read_bytes()) | reported
        (model / name).write_bytes(orjson.dumps(config))
    settings = Settings(
        model=str(model),
        server=ServerSettings(max_total_tokens=8192),
        sandbox=PoolSettings(backend="process"),
        tool_timeout_s=TOOL_TIMEOUT_S,
    )
    async with Runtime(settings) as runtime:
        assert runtime.chat.stop_ids == (2, 0)
        trajectory = await runtime.rollout("What is 37 times 48?", sampling=GREEDY)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert "\\boxed{1776}" in trajectory.text
    assert [turn.output_ids[-1] for turn in trajectory.turns] == [2, 2]


async def test_notebook_keeps_its_state_over_the_turns(runtime: Runtime) -> None:
    question = "Take 12 times 7, then add 45."
    trajectory = await runtime.rollout(question, tools=["jupyter_code"], sampling=GREEDY)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert {call.name for call in trajectory.calls} == {"jupyter_code"}
    assert "129" in trajectory.text


@pytest.mark.gate
async def test_calls_start_while_the_turn_goes_on(runtime: Runtime) -> None:
    """Three calls and text after them: the first runs before the turn's last token."""
    question = "Compute 12*7, 8+5 and 90-3."
    num_after = 0
    for _ in range(10):  # to a reader that is held up, all of a turn may come as one
        events: list[Event] = []
        trajectory = await runtime.rollout(question, sampling=GREEDY, on_event=events.append)
        first = trajectory.turns[0]
        assert len(first.calls) == 3
        assert [result.content for result in first.results] == ["84", "13", "87"]
        started = next(i for i, event in enumerate(events) if isinstance(event, CallStarted))
        finished = next(i for i, event in enumerate(events) if isinstance(event, TurnFinished))
        tokens_after = [e for e in events[started:finished] if isinstance(e, TokensSampled)]
        num_after = sum(len(event.ids) for event in tokens_after)
        if num_after > 10:
            break
    assert num_after > 10


async def test_response_fills_the_context_to_its_last_token(runtime: Runtime) -> None:
    """What fits by our count must be accepted by the server too."""
    length = runtime.router.context_length
    prompt = runtime.chat.prompt([{"role": "user", "content": ""}])
    overhead = len(prompt) + 40
    trajectory = await runtime.rollout(
        "+" * (length - overhead), budget=Budget(max_response_tokens=100_000, max_turns=1)
    )
    assert trajectory.stop_reason is not StopReason.INFRASTRUCTURE, trajectory.error
    assert len(trajectory.ids) <= length


async def test_groups_of_a_source_come_as_they_finish(runtime: Runtime) -> None:
    numbers = range(20, 26)
    questions = [f"What is {number} times 48?" for number in numbers]
    actual: dict[int, list[Trajectory]] = {}
    events: list[Event] = []
    async with runtime.groups(
        [*questions, "1 + " * 20_000], size=3, sampling=GREEDY, on_event=events.append
    ) as groups:
        async for group in groups:
            actual[group.index] = list(group.trajectories)
            assert (group.error is None) == (group.index < len(numbers))
    for index in range(len(numbers)):
        trajectories = actual[index]
        assert [single.id.rpartition(".")[2] for single in trajectories] == ["0", "1", "2"]
        assert len({single.id.rpartition(".")[0] for single in trajectories}) == 1
        assert all(single.stop_reason is StopReason.ANSWERED for single in trajectories)
        assert len({tuple(single.prompt_ids) for single in trajectories}) == 1
    right = sum(
        f"\\boxed{{{number * 48}}}" in single.text
        for index, number in enumerate(numbers)
        for single in actual[index]
    )
    assert right >= 15, actual
    firsts = [event for event in events if isinstance(event, TurnFinished) and event.turn == 0]
    assert sum(event.record.cached_tokens > 0 for event in firsts) >= 6, "siblings share a prompt"
    assert runtime.router.waits() == []
    assert all(view.num_held_tokens == 0 for view in runtime.router.view())


async def test_remaining_rollouts_stop_once_enough_have_ended(runtime: Runtime) -> None:
    num_calls = 0

    async def multiply(a: int, b: int) -> int:
        """Multiply two integers."""
        nonlocal num_calls
        num_calls += 1
        if num_calls > 5:  # who else streams may well end in the same moment
            await anyio.sleep_forever()
        return a * b

    trajectories = await runtime.run_group(
        "What is 37 times 48?", size=8, enough=2, tools=[multiply], sampling=GREEDY
    )
    stopped = [single for single in trajectories if single.stop_reason is StopReason.STRAGGLER]
    assert 3 <= len(stopped) <= 6
    assert all(single.prompt_ids for single in stopped if single.turns)  # what was sampled is kept
    assert all(view.num_held_tokens == 0 for view in runtime.router.view())


async def test_server_killed_in_mid_stream_loses_nothing(
    docker_engine: None, sglang_url: str, tmp_path: Path
) -> None:
    """The turn goes on at the other server; the ids are those of an undisturbed run."""
    question = "Compute 12*7, 8+5 and 90-3."
    settings = ServerSettings(max_total_tokens=32_768)
    async with sglang_servers(SMALL, settings, log_dir=tmp_path, on_progress=print) as (victim,):
        alone = Settings(
            servers=[sglang_url],
            tools=["python_code_with_standard_io"],
            tool_timeout_s=TOOL_TIMEOUT_S,
        )
        pair = alone.model_copy(update={"servers": [victim.url, sglang_url]})
        async with Runtime(alone) as runtime:
            undisturbed = await runtime.rollout(question, sampling=GREEDY)
        async with Runtime(pair) as runtime:
            placed: list[str] = []
            num_sampled = 0
            killed = False

            def on_event(event: Event) -> None:
                nonlocal killed, num_sampled
                if isinstance(event, TurnPlaced):
                    placed.append(event.server)
                    num_sampled = 0
                elif isinstance(event, TokensSampled) and placed[-1] == victim.url and not killed:
                    num_sampled += len(event.ids)
                    complete = len(undisturbed.turns[event.turn].output_ids)
                    if num_sampled > complete / 2:  # little of it is left to come, or nothing
                        return
                    killed = True
                    assert victim.pid is not None
                    os.killpg(os.getpgid(victim.pid), signal.SIGKILL)

            for _ in range(20):  # of two servers that cost the same, either is taken
                trajectory = await runtime.rollout(question, sampling=GREEDY, on_event=on_event)
                if killed:
                    break
                assert trajectory.ids == undisturbed.ids
    assert [victim.url, sglang_url] in [turn.servers for turn in trajectory.turns]
    assert trajectory.ids == undisturbed.ids
    assert trajectory.stop_reason is StopReason.ANSWERED
