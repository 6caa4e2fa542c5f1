"""Sessions: histories of a client become branches of exact ids, each sampled token once."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import Budget
from agentloop.agent.sessions import ModelSession, TurnRequest
from agentloop.agent.sessions.history import keys_of
from agentloop.agent.tools import CallerTool
from agentloop.errors import RequestError, ServerError, ServerUnavailable
from agentloop.events import (
    ClientAwaited,
    Event,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TurnFinished,
    TurnStarted,
)
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter, chunk_frame, completion
from agentloop.token_records import KeptIds, RoutedExperts
from agentloop.trajectory import Message, StopReason, Trajectory
from tests.support import (
    END,
    TEMPLATE,
    ScriptedEngine,
    Step,
    call_text,
    chat_format,
    chunks,
    template,
    tokenizer,
    written,
)

CHAT = chat_format()
TOOL = CallerTool({"type": "function", "function": {"name": "add", "parameters": {}}})


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(call: Any, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def reply(text: str) -> list[Chunk]:
    return chunks(written(CHAT, text + END))


def as_message(trajectory: Trajectory) -> Message:
    writer = ChunkWriter(
        chunk_frame("c", "m"), 0, chat=CHAT, has_caller_tools=True, shows_malformed=True
    )
    return completion([(writer, trajectory)])["choices"][0]["message"]


class Client:
    """A session with a scripted engine, asked as a client would."""

    def __init__(self, *turns: Sequence[Step], **options: Any) -> None:
        self.engine = ScriptedEngine(*turns)
        self.events: list[Event] = []
        self.session = ModelSession(
            "s",
            self.engine,
            **{"sampling": Sampling(), "chat": CHAT, **options},
            budget=Budget(),
            emit=self.events.append,
        )

    async def ask(self, *messages: Message, **options: Any) -> Any:
        """Return the message that a client gets, as it would send it back."""
        trajectory = await self.session.complete(TurnRequest(messages, **options), as_message)
        return copy.deepcopy(as_message(trajectory))

    @property
    def branches(self) -> list[Trajectory]:
        return self.session.trajectories

    @property
    def reasons(self) -> list[str]:
        return [branch.reason for branch in self.session.branches]


async def test_conversation_is_one_branch_of_exact_ids() -> None:
    client = Client(reply("one"), reply("two"), reply("three"))
    history = [user("a")]
    for text in ("b", "c", "d"):
        history.append(await client.ask(*history))
        history.append(user(text))
    (record,) = client.branches
    assert [len(turn.output_ids) for turn in record.turns] == [
        len(reply(t)[0].ids) for t in ("one", "two", "three")
    ]
    assert record.ids == CHAT.prompt(history[:-1])[: len(record.ids)]
    # Each prompt is the previous one, the sampled ids and what is new.
    for before, after in zip(client.engine.asked, client.engine.asked[1:], strict=False):
        assert after.ids[: len(before.ids)] == before.ids
    assert [generation.key for generation in client.engine.asked] == ["s"] * 3
    assert record.mask.count(1) == record.num_sampled_tokens


async def test_calls_and_their_responses_go_on_from_the_sampled_ids() -> None:
    written_oddly = '<tool_call>\n{"name":"add",  "arguments":{"b":2,"a":1}}\n</tool_call>'
    client = Client(reply("I add." + written_oddly), reply("3"))
    first = await client.ask(user("1+2"), tools=[TOOL])
    (call,) = first["tool_calls"]
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=2)
    del first["content"]
    first["content"] = "I add."
    answer = await client.ask(user("1+2"), first, tool(call, "3"), tools=[TOOL])
    assert answer["content"] == "3"
    (record,) = client.branches
    assert CHAT.decode(record.turns[0].output_ids).startswith("I add.<tool_call>")
    assert record.turns[0].observation_ids == CHAT.observation(["3"], record.turns[0].calls)
    assert record.stop_reason is StopReason.ANSWERED


async def test_edited_answer_begins_a_branch_after_the_previous_turn() -> None:
    client = Client(reply("one"), reply("two"), reply("three"))
    first = await client.ask(user("a"))
    second = await client.ask(user("a"), first, user("b"))
    edited = {**second, "content": "something else"}
    await client.ask(user("a"), first, user("b"), edited, user("c"))
    main, branch = client.branches
    assert [len(branch.turns) for branch in client.branches] == [2, 1]
    assert branch.prompt_ids[: len(main.prompt_ids)] == main.prompt_ids
    assert "something else" in CHAT.decode(branch.prompt_ids)
    assert branch.prompt_ids[len(main.prompt_ids) :][: len(main.turns[0].output_ids)] == (
        main.turns[0].output_ids
    )
    assert client.reasons == ["", "messages[3] differs from what came there before"]
    assert branch.mask[: len(branch.prompt_ids)] == [0] * len(branch.prompt_ids)


async def test_asking_again_begins_a_branch_that_shares_its_past() -> None:
    client = Client(reply("one"), reply("two"), reply("other"))
    first = await client.ask(user("a"))
    await client.ask(user("a"), first, user("b"))
    await client.ask(user("a"), first, user("b"))
    main, branch = client.branches
    assert main.turns[-1].output_ids != branch.turns[-1].output_ids
    assert branch.prompt_ids == main.ids[: -len(main.turns[-1].output_ids)]
    assert client.reasons[1] == "the same history was asked again"


async def test_client_goes_on_from_the_sibling_whose_calls_it_answers() -> None:
    call = call_text("add", {"a": 1})
    client = Client(reply(call), reply(call), reply("from the first"), reply("from the second"))
    first = await client.ask(user("a"), tools=[TOOL])
    second = await client.ask(user("a"), tools=[TOOL])
    assert first["tool_calls"][0]["id"] != second["tool_calls"][0]["id"]
    await client.ask(user("a"), first, tool(first["tool_calls"][0], "x"), tools=[TOOL])
    await client.ask(user("a"), second, tool(second["tool_calls"][0], "x"), tools=[TOOL])
    assert [CHAT.decode(first.turns[-1].output_ids) for first in client.branches] == [
        f"from the first{END}",
        f"from the second{END}",
    ]


async def test_whitespace_that_the_template_drops_is_no_edit() -> None:
    trimmed = chat_format_that("message.content.replace(' ', '')")
    engine = ScriptedEngine(
        *(chunks(written(trimmed, f"{text}{END}")) for text in ("o n e", "two"))
    )
    session = ModelSession("s", engine, trimmed, sampling=Sampling(), budget=Budget())

    def message(trajectory: Trajectory) -> Message:
        return {"role": "assistant", "content": trajectory.turns[-1].text.removesuffix(END)}

    await session.complete(TurnRequest([user("a")]), message)
    history = [user("a"), {"role": "assistant", "content": "one"}, user("b")]
    await session.complete(TurnRequest(history), message)
    assert len(session.branches) == 1


async def test_space_around_a_message_is_no_edit() -> None:
    call = call_text("add", {"a": 1})
    client = Client(reply("I add." + call), reply("two"))
    first = await client.ask(user("a"), tools=[TOOL])
    # As Inspect joins a thought and an answer.
    sent = {**first, "content": "\nI add."}
    await client.ask(user("a"), sent, tool(first["tool_calls"][0], "x"), tools=[TOOL])
    assert len(client.branches) == 1


async def test_message_with_calls_is_compared_as_the_template_writes_it() -> None:
    lowercase = chat_format_that("message.content.lower()")
    call = call_text("add", {"a": 1})
    engine = ScriptedEngine(
        *(chunks(written(lowercase, f"{text}{END}")) for text in ("I add." + call, "two"))
    )
    session = ModelSession("s", engine, lowercase, sampling=Sampling(), budget=Budget())
    function = {"name": "add", "arguments": '{"a": 1}'}

    def message(trajectory: Trajectory) -> Message:
        calls = [{"id": call.id, "function": function} for call in trajectory.turns[-1].calls]
        return {"role": "assistant", "content": "I add.", "tool_calls": calls}

    tools = [TOOL]
    trajectory = await session.complete(TurnRequest([user("a")], tools=tools), message)
    sent = {**message(trajectory), "content": "i add."}
    history = [user("a"), sent, tool(sent["tool_calls"][0], "x")]
    await session.complete(TurnRequest(history, tools=tools), message)
    assert len(session.branches) == 1


def chat_format_that(content: str) -> ChatFormat:
    """Return a format whose template writes this as the content of a message."""
    source = TEMPLATE.replace("+ message.content }}", f"+ {content} }}}}")
    assert source != TEMPLATE
    return ChatFormat(tokenizer(), template(source), end_token=END)


@pytest.mark.parametrize(
    ("reasoning", "is_edit"),
    [(None, False), ("thought", False), (" thought\n", False), ("another", True)],
)
async def test_only_changed_reasoning_is_an_edit(reasoning: str | None, is_edit: bool) -> None:
    client = Client(reply("<think>thought</think>one"), reply("two"))
    first = await client.ask(user("a"))
    assert first.pop("reasoning_content") == "thought"
    if reasoning is not None:
        first["reasoning_content"] = reasoning
    await client.ask(user("a"), first, user("b"))
    assert len(client.branches) == 1 + is_edit


async def test_other_tools_begin_a_branch() -> None:
    client = Client(reply("one"), reply("two"))
    first = await client.ask(user("a"))
    await client.ask(user("a"), first, user("b"), tools=[TOOL])
    assert client.reasons[1].startswith("the tools, the template's variables")


async def test_failed_turn_is_taken_back_and_can_be_asked_again() -> None:
    client = Client(
        reply("one"), [*chunks([1, 2], end=None), ServerUnavailable("gone")], reply("two")
    )
    first = await client.ask(user("a"))
    with pytest.raises(ServerError, match="gone"):
        await client.ask(user("a"), first, user("b"))
    assert [len(branch.turns) for branch in client.branches] == [1]
    assert client.branches[0].turns[0].observation_ids == []
    await client.ask(user("a"), first, user("b"))
    assert [len(branch.turns) for branch in client.branches] == [2]
    assert client.session.num_cut == 1


async def test_first_turn_that_fails_leaves_no_branch() -> None:
    client = Client([ServerUnavailable("gone")], reply("one"))
    with pytest.raises(ServerError):
        await client.ask(user("a"))
    assert client.branches == []
    await client.ask(user("a"))
    assert len(client.branches) == 1
    kinds = [
        type(event)
        for event in client.events
        if isinstance(event, RolloutStarted | RolloutAbandoned)
    ]
    assert kinds == [RolloutStarted, RolloutAbandoned, RolloutStarted]


async def test_name_of_branch_taken_back_is_used_again() -> None:
    """Its seed is another one, or what made its client leave might be sampled again."""
    client = Client(reply("main"), [ServerUnavailable("lost")], reply("one"), reply("two"))
    await client.ask(user("a"))
    with pytest.raises(ServerError):
        await client.ask(user("helper 1"))
    await client.ask(user("helper 1"))
    await client.ask(user("helper 2"))
    assert [record.id for record in client.branches] == ["s", "s+1", "s+2"]
    seeds = [generation.sampling for generation in client.engine.asked]
    assert len({repr(sampling) for sampling in seeds}) == 1  # without a seed of the session
    client = Client(
        *(reply("main"), [ServerUnavailable("lost")], reply("one")), sampling=Sampling(seed=1)
    )
    await client.ask(user("a"))
    for _ in range(2):
        with suppress(ServerError):
            await client.ask(user("helper 1"))
    assert len({generation.sampling.seed for generation in client.engine.asked}) == 3


async def test_openings_compare_tools_and_system_message() -> None:
    client = Client(*map(reply, ("one", "two", "three", "four", "five")))

    def system(text: str) -> Message:
        return {"role": "system", "content": text}

    first = await client.ask(system("Code."), user("a"))
    await client.ask(system("Code."), user("b"))
    await client.ask(system("Test."), user("b"))
    await client.ask(system("Code."), user("b"), tools=[TOOL])
    await client.ask(system("Code."), user("a"), {**first, "content": "edited"}, user("c"))
    coder, again, tester, other_tools, edited = client.session.openings.values()
    assert coder == again
    assert len({coder, tester, other_tools}) == 3
    assert edited == coder  # nothing before it was sampled


async def test_request_right_after_stop_requests_is_recorded() -> None:
    has_begun = anyio.Event()
    may_end = anyio.Event()

    async def hang() -> None:
        has_begun.set()
        await anyio.sleep_forever()

    cut: list[Step] = [*chunks(written(CHAT, "cut"), end=None), hang]
    slow: list[Step] = [*chunks(written(CHAT, "an"), end=None), may_end.wait, *reply("other")]
    client = Client(reply("one"), cut, slow, reply("three"), is_rollout=True)
    first = await client.ask(user("a"))
    history = [user("a"), first, user("c")]

    async def ask_and_be_stopped() -> None:
        with pytest.raises(RequestError, match="its requests were stopped"):
            await client.ask(user("a"), first, user("b"))
        may_end.set()

    async def ask_later() -> None:
        history.append(await client.ask(*history))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_and_be_stopped)
        await has_begun.wait()
        tasks.start_soon(ask_later)
        client.session.stop_requests()
    assert history[-1]["content"] == "another"
    await client.ask(*history, user("d"))
    assert "another" in CHAT.decode(client.engine.asked[-1].ids)
    assert [
        CHAT.decode(turn.output_ids) for record in client.branches for turn in record.turns
    ] == [*("one" + END, "another" + END, "three" + END), "cut"]


async def test_turn_reward_set_while_next_turn_streams_is_kept() -> None:
    has_begun, may_end = anyio.Event(), anyio.Event()

    async def wait() -> None:
        has_begun.set()
        await may_end.wait()

    slow: list[Step] = [*chunks(written(CHAT, "tw"), end=None), wait, *reply("o")]
    client = Client(reply("one"), slow, reply("three"), is_rollout=True)
    first = await client.ask(user("a"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask, user("a"), first, user("b"))
        await has_begun.wait()
        (record,) = client.branches
        assert record.turns[0].observation_ids == []  # the request may be taken back
        record.turns[0].reward = 1.0
        may_end.set()
    (record,) = client.branches
    assert [turn.reward for turn in record.turns] == [1.0, None]
    assert record.turns[0].observation_ids


async def test_client_that_leaves_takes_its_turn_with_it() -> None:
    started = anyio.Event()

    async def hang() -> None:
        started.set()
        await anyio.sleep_forever()

    client = Client(reply("one"), [*chunks([1, 2], end=None), hang], reply("two"))
    first = await client.ask(user("a"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask, user("a"), first, user("b"))
        await started.wait()
        tasks.cancel_scope.cancel()
    assert [len(branch.turns) for branch in client.branches] == [1]
    await client.ask(user("a"), first, user("b"))
    assert [len(branch.turns) for branch in client.branches] == [2]


async def test_parallel_requests_from_one_turn_are_branches() -> None:
    gates = [anyio.Event(), anyio.Event()]
    client = Client(reply("one"), [gates[0].wait, *reply("x")], [gates[1].wait, *reply("y")])
    first = await client.ask(user("a"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask, user("a"), first, user("b"))
        tasks.start_soon(client.ask, user("a"), first, user("c"))
        await anyio.wait_all_tasks_blocked()
        for gate in reversed(gates):
            gate.set()
    assert sorted(len(branch.turns) for branch in client.branches) == [1, 2]
    assert sum(branch.num_sampled_tokens for branch in client.branches) == sum(
        len(reply(text)[0].ids) for text in ("one", "x", "y")
    )


async def test_delivery_that_failed_can_be_discarded() -> None:
    client = Client(reply("one"), reply("two"), reply("three"))
    first = await client.ask(user("a"))
    lost = await client.session.complete(TurnRequest([user("a"), first, user("b")]), as_message)
    client.session.discard(lost)
    assert [len(branch.turns) for branch in client.branches] == [1]
    await client.ask(user("a"), first, user("b"))
    assert [len(branch.turns) for branch in client.branches] == [2]


async def test_closing_ends_its_branches_and_frees_their_cache() -> None:
    client = Client(reply("one"))
    await client.ask(user("a"))
    (record,) = client.session.close()
    assert record.stop_reason is StopReason.ANSWERED
    assert client.engine.forgotten == ["s"]
    assert isinstance(client.events[-1], RolloutFinished)
    with pytest.raises(RequestError, match="closed"):
        await client.ask(user("a"))


async def test_full_session_is_refused() -> None:
    client = Client(reply("one"), reply("two"), max_tokens=5)
    await client.ask(user("a"))
    with pytest.raises(RequestError, match=r"session: it holds \d+ tokens"):
        await client.ask(user("b"))


async def test_turns_and_branches_differ_in_seed_unless_it_is_set() -> None:
    client = Client(reply("one"), reply("two"), reply("three"), sampling=Sampling(seed=1))
    await client.ask(user("a"))
    await client.ask(user("a"))
    await client.ask(user("a"), sampling=Sampling(seed=7), has_seed=True)
    seeds = [generation.sampling.seed for generation in client.engine.asked]
    assert len({1, *seeds}) == 4
    assert seeds[2] == 7


# --- any client -----------------------------------------------------------------------------------

TEXTS = st.sampled_from(["a", "b", "hello", "é\n", "<tool_call>", END, "  x "])
ACTIONS = st.sampled_from(["go on", "retry", "edit", "compact", "back", "fork", "drop", "rewrite"])


@pytest.mark.timeout(120)
@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(ACTIONS, TEXTS, st.booleans()), max_size=12), st.randoms())
def test_each_sampled_token_is_an_output_exactly_once(
    actions: list[tuple[str, str, bool]], random: Any
) -> None:
    anyio.run(_play, actions, random)


async def _play(actions: list[tuple[str, str, bool]], random: Any) -> None:
    texts = [f"answer {index} {text}" for index, (_, text, _) in enumerate(actions)] + ["first"]
    scripts = []
    for (_, _, calls), text in zip([*actions, ("", "", False)], texts, strict=True):
        call = call_text("add", {"b": 1, "a": text}) if calls else ""
        scripts.append(chunks([*CHAT.encode(text), *written(CHAT, call + END)]))
    client = Client(*scripts)
    histories: list[list[Message]] = [[user("q"), await client.ask(user("q"), tools=[TOOL])]]
    for action, text, _ in actions:
        history = copy.deepcopy(random.choice(histories))
        match action:
            case "retry":
                history = history[:-1]
            case "edit":
                history[-1] = {"role": "assistant", "content": f"edited {text}"}
            case "compact":
                history = [user(f"summary {text}")]
            case "back":
                history = history[: random.randrange(1, len(history) + 1)]
            case "drop":
                history[-1] = {k: v for k, v in history[-1].items() if k != "reasoning_content"}
            case "rewrite":
                for call in history[-1].get("tool_calls") or ():
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(arguments, indent=3)
        if history[-1]["role"] == "assistant":
            history += [tool(single, text) for single in history[-1].get("tool_calls") or ()] or [
                user(text)
            ]
        history.append(await client.ask(*history, tools=[TOOL]))
        histories.append(history)
    sampled = [
        [id for step in script for id in step.ids] for script in scripts[: len(client.engine.asked)]
    ]
    outputs = [turn.output_ids for record in client.branches for turn in record.turns]
    assert sorted(outputs) == sorted(sampled)
    # What the engine was asked to continue is what the record says came before.
    prompts = sorted(single.ids for single in client.engine.asked)
    recorded = []
    for record in client.branches:
        ids = list(record.prompt_ids)
        for turn in record.turns:
            recorded.append(list(ids))
            ids += [*turn.output_ids, *turn.observation_ids]
    assert sorted(recorded) == prompts
    simple = all(action in ("go on", "drop", "rewrite", "fork") for action, _, _ in actions)
    if simple and len(histories) <= 2:
        assert len(client.branches) == 1


@pytest.mark.parametrize(("num_requests", "waited_s"), [(1, 5.0), (2, 0.0)])
async def test_only_a_lone_request_counts_as_waiting_for_a_server(
    monkeypatch: pytest.MonkeyPatch, num_requests: int, waited_s: float
) -> None:
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s, time=lambda: now_s)
    monkeypatch.setattr("agentloop.agent.sessions.session.time", clock)
    sampling = anyio.Event()
    turn: list[Step] = [sampling.wait, *reply("one")]
    client = Client(*[turn] * num_requests)
    generate, free = client.engine.generate, anyio.Event()

    async def generate_when_free(*arguments: Any, **options: Any) -> None:
        await free.wait()
        await generate(*arguments, **options)

    monkeypatch.setattr(client.engine, "generate", generate_when_free)
    async with anyio.create_task_group() as group:
        for _ in range(num_requests):
            group.start_soon(client.ask, user("a"))
        await anyio.wait_all_tasks_blocked()
        assert client.session.queued_s == 0.0
        now_s += 5.0
        assert client.session.queued_s == waited_s
        free.set()
        await anyio.wait_all_tasks_blocked()
        now_s += 50.0  # the model samples: that is the rollout's own time
        sampling.set()
    assert client.session.queued_s == waited_s


@pytest.mark.parametrize("is_read", [True, False])
async def test_tokens_read_before_a_failure_stay_in_a_branch(is_read: bool) -> None:
    cut = written(CHAT, "two")
    client = Client(
        reply("one"), [*chunks(cut, end=None), ServerUnavailable("gone")], reply("two"), reply("3")
    )
    first = await client.ask(user("a"))
    request = TurnRequest([user("a"), first, user("b")])
    reader = [client.events.append] if is_read else []
    with pytest.raises(ServerError, match="gone"):
        await client.session.complete(request, as_message, *reader)
    second = await client.ask(*request.messages)
    await client.ask(*request.messages, second, user("c"))
    main, *side_branches = client.branches
    assert [len(turn.output_ids) for turn in main.turns] == [
        len(reply(text)[0].ids) for text in ("one", "two", "3")
    ]
    assert [[turn.output_ids for turn in branch.turns] for branch in side_branches] == [
        [cut]
    ] * is_read
    if is_read:
        assert side_branches[0].prompt_ids == client.engine.asked[1].ids
        assert client.reasons[1] == "the infrastructure failed before the end of the message"


async def test_repeated_first_message_says_that_it_was_cut_off() -> None:
    client = Client([*chunks([5, 6], end=None), ServerUnavailable("gone")], reply("one"))
    with pytest.raises(ServerError):
        await client.session.complete(TurnRequest([user("a")]), as_message, client.events.append)
    await client.ask(user("a"))
    assert client.reasons == ["", "the same history was asked again"]


@pytest.mark.parametrize("has_answer", [True, False])
async def test_unfinished_message_is_kept_when_its_client_is_stopped(has_answer: bool) -> None:
    cut = written(CHAT, "endless")
    endless: list[Step] = [*chunks(cut, end=None), anyio.sleep_forever]
    client = Client(*([reply("one")] if has_answer else []), endless, is_rollout=True)
    history: list[Message] = [user("a")]
    if has_answer:
        history += [await client.ask(*history), user("b")]
    assert not client.session.stop_requests()

    async def ask() -> None:
        with pytest.raises(RequestError, match="were stopped"):
            await client.ask(*history)

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert client.session.stop_requests()
        assert client.branches[-1].turns[-1].output_ids == cut
    assert client.branches[-1].prompt_ids == client.engine.asked[-1].ids
    assert len(client.branches) == 1 + has_answer
    assert client.session.is_idle


@pytest.mark.parametrize("asks_again", [True, False])
async def test_abandoned_message_is_kept_if_there_is_nothing_else(asks_again: bool) -> None:
    cut = written(CHAT, "endless")
    client = Client([*chunks(cut, end=None), anyio.sleep_forever], reply("one"), is_rollout=True)
    async with anyio.create_task_group() as group:
        group.start_soon(client.ask, user("a"))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert client.branches == []
    if asks_again:
        await client.ask(user("a"))
    client.session.stop_requests()
    (record,) = client.branches
    assert record.turns[0].output_ids == (reply("one")[0].ids if asks_again else cut)


@pytest.mark.parametrize(
    ("message", "is_read"),
    [
        ({"cache_control": {"type": "ephemeral"}}, False),
        ({"mood": "glad"}, True),
        ({"mood": None}, False),
    ],
)
async def test_message_fields_that_the_template_reads_are_compared(
    message: Message, is_read: bool
) -> None:
    source = TEMPLATE.replace("+ message.role +", "+ message.role + (message.mood or '') +")
    chat = ChatFormat(tokenizer(), template(source), end_token=END)
    assert chat.reads("user", "mood")
    client = Client(reply("one"), reply("two"), chat=chat)
    first = await client.ask(user("a"))
    await client.ask({**user("a"), **message}, first, user("b"))
    assert len(client.branches) == 1 + is_read


async def test_history_that_was_asked_before_is_not_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []

    def count_compared(
        messages: Sequence[Message], reads: Any = None, begin: int = 0
    ) -> list[bytes]:
        compared.append(len(messages) - begin)
        return keys_of(messages, begin=begin)

    monkeypatch.setattr("agentloop.agent.sessions.tree.keys_of", count_compared)
    client = Client(*(reply(str(number)) for number in range(6)))
    history: list[Message] = [user("a")]
    for number in range(5):
        history += [await client.ask(*history), user(f"b{number}")]
    assert max(compared) == 2  # an answer and what follows it
    assert len(client.branches) == 1
    await client.ask({**history[0], "content": "x"}, *history[1:])
    assert compared[-2] == len(history)


async def test_branch_waits_for_its_client_after_messages_and_failures() -> None:
    client = Client(reply("1"), [ServerUnavailable("gone")], reply("2"))
    first = await client.ask(user("a"))
    history = [user("a"), first, user("b")]
    with pytest.raises(ServerError):
        await client.ask(*history)
    await client.ask(*history)
    kinds = (TurnStarted, TurnFinished, ClientAwaited)
    event_types = [type(event) for event in client.events if isinstance(event, kinds)]
    assert event_types == 3 * [TurnStarted, TurnFinished, ClientAwaited]
    (record,) = client.branches
    first, second = record.turns
    assert (
        first.started_s <= first.ended_s <= second.started_s <= second.ended_s <= record.elapsed_s
    )


async def test_each_message_asks_for_the_experts_that_its_branch_lacks() -> None:
    first = [replace(reply("one")[0], experts=RoutedExperts(0, 2, bytes(14)))]
    client = Client(first, reply("two"), reply("three"), reply("four"))
    answer = await client.ask(user("a"))
    second = await client.ask(user("a"), answer, user("b"))
    await client.ask(user("a"), answer, user("b"), second, user("c"))
    await client.ask(user("d"))
    assert [asked.experts_from for asked in client.engine.asked] == [0, 7, 7, 0]


async def test_branches_keep_the_kept_ids_of_their_turns() -> None:
    def kept(made: list[Chunk]) -> list[Chunk]:
        return [replace(chunk, kept=[[id, id + 1] for id in chunk.ids]) for chunk in made]

    sampling = Sampling(top_p=0.9, top_k=20).for_training()
    client = Client(kept(reply("one")), kept(reply("two")), kept(reply("three")), sampling=sampling)
    first = await client.ask(user("a"))
    await client.ask(user("a"), first, user("b"))
    await client.ask(user("a"), first, user("c"))
    assert [len(record.turns) for record in client.branches] == [2, 1]
    for record in client.branches:
        expected = [
            [id, id + 1] if is_sampled else []
            for id, is_sampled in zip(record.ids, record.mask, strict=True)
        ]
        assert record.kept == KeptIds(expected)
