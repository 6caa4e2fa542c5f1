"""Agents that an endpoint or a script plays: conversations, tools, limits, blame and records."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

import agentloop
from agentloop.agent.rollout import Budget
from agentloop.agent.tools import CallerTool, Tool, as_tool, import_schema_parser
from agentloop.cli.data import filter_solved
from agentloop.cli.env.timing import Activity, Timeline
from agentloop.environments.agent import Agent
from agentloop.environments.endpoint import Endpoint
from agentloop.environments.environment import Environment
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import TasksSettings, read_tasks
from agentloop.errors import InfrastructureFailed, RequestError, ServerUnavailable
from agentloop.events import Event, RolloutStarted, TurnPlaced
from agentloop.inference.sglang.sampling import Sampling
from agentloop.observe.board import Board
from agentloop.observe.exporters.metrics import Metrics
from agentloop.observe.record import RecordReader
from agentloop.observe.stalls import Stalls
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.record import NoReward, RolloutRecord
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.credit.roc import RocSettings
from agentloop.training.rollouts import Rollouts
from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import Message, StopReason, ToolCallStatus, Trajectory, TurnEnd
from tests.agentloop.evaluation.fake_endpoint import Answer, FakeEndpoint, saying
from tests.agentloop.rollouts.test_player import TASK, Model, run
from tests.rollouts import records_of, reward_in
from tests.support import chat_format

pytestmark = pytest.mark.timeout(60)  # the first test imports for seconds


@pytest.fixture(autouse=True, scope="module")
def schema_parser() -> None:
    """Import what makes a tool of a function, which takes seconds, before an environment runs."""
    import_schema_parser()


def calls(*requests: tuple[str, str, str], text: str = "") -> Answer:
    """Return an answer with tool calls: the id, the name and the arguments of each."""
    made = [
        {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
        for key, name, arguments in requests
    ]
    return saying(text, "tool_calls", tool_calls=made)


def endpoint(fake: FakeEndpoint, **options: Any) -> Endpoint:
    usual: dict[str, Any] = {"model": "m", "max_tries": 1}
    return Endpoint(fake.url, **(usual | options))


def double(number: int) -> int:
    """Return twice the number."""
    return 2 * number


def played_by(player: Any, **options: Any) -> tuple[Environment, list[Trajectory]]:
    """Return an environment whose opponent says something, and where its record will be."""
    result: list[Trajectory] = []

    @agentloop.environment
    async def against(task: Any, agent: Agent) -> float:
        await agent.run("Your move?")
        result.append(await agent.other("opponent", player=player).run("And yours?", **options))
        return 1.0

    return against, result


async def play_endpoint(
    *script: Answer, host: Model | None = None, options: Any = None, **conversation: Any
) -> tuple[RolloutRecord, Trajectory, FakeEndpoint]:
    """Return a record whose opponent is an endpoint, and the endpoint's conversation."""
    async with FakeEndpoint(deque(script)).serving() as fake:
        against, result = played_by(endpoint(fake, options=options or {}), **conversation)
        (episode,) = await run(against, host, size=1)
    return episode, result[0], fake


# --- conversations --------------------------------------------------------------------------------


async def test_endpoint_plays_an_agent_with_tools() -> None:
    first = calls(("c1", "double", '{"number": 21}'), text="<think>Hm.</think>Let me see.")
    episode, trajectory, fake = await play_endpoint(
        first, saying("It is 42."), tools=[double], system="Be brief."
    )
    assert trajectory.answer == "It is 42."
    assert [single.content for single in trajectory.results] == ["42"]
    assert trajectory.turns[0].text == "<think>Hm.</think>Let me see."
    assert (trajectory.ids, trajectory.num_sampled_tokens) == ([], 0)
    requests, again = fake.requests
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "And yours?"}]
    assert requests["messages"] == prompt
    assert [tool["function"]["name"] for tool in requests["tools"]] == ["double"]
    assert requests["model"] == "m"
    function = {"name": "double", "arguments": '{"number": 21}'}
    call = {"id": "c1", "type": "function", "function": function}
    assert again["messages"][2:] == [  # without the reasoning
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert trajectory.messages == [
        *again["messages"],
        {"role": "assistant", "content": "It is 42."},
    ]
    opponent = episode.others["opponent"]
    assert not opponent.is_trained
    assert [single.id for single in opponent.trajectories] == ["1-t.0+opponent"]
    assert episode.trained == list(episode.trajectories)
    assert episode.num_sampled_tokens == 1  # the agent's own


async def test_another_models_runtime_plays_an_agent_with_tools() -> None:
    older, newer = Model(), Model()
    against, result = played_by(older, tools=[double], max_tokens=9)
    (episode,) = await run(against, newer, size=1)
    ((_, options),) = older.asked
    assert [tool.name for tool in options["tools"]] == ["double"]
    assert options["budget"].max_response_tokens == 9
    assert len(newer.asked) == 1
    opponent = episode.others["opponent"]
    assert not opponent.is_trained
    assert [single.ids for single in opponent.trajectories] == [result[0].ids]
    assert episode.trained == list(episode.trajectories)


async def test_failing_runtime_of_another_model_is_no_reward() -> None:
    older = Model()
    older.error = ServerUnavailable("gone")
    against, _ = played_by(older)
    (episode,) = await run(against, size=1)
    assert episode.no_reward is NoReward.INFRASTRUCTURE


async def test_endpoint_converses_message_by_message() -> None:
    answers: list[str] = []

    @agentloop.environment
    async def game(task: Any, agent: Agent) -> float:
        opponent = agent.other("opponent", player=endpoint(fake))
        async with opponent.conversation(system="Play.") as talk:
            while not talk.has_ended:
                answers.append(await talk.ask(f"question {len(answers)}"))
        assert talk.trajectory is not None
        return float(talk.trajectory.stop_reason is StopReason.TURN_BUDGET)

    script = deque(saying(str(number)) for number in range(3))
    async with FakeEndpoint(script).serving() as fake:
        player = EnvironmentPlayer(game, Model(), sampling=Sampling())
        (episode,) = await records_of(player, TASK, budget=Budget(max_turns=3))
    assert answers == ["0", "1", "2", ""]
    last = [single["content"] for single in fake.requests[-1]["messages"]]
    assert last == ["Play.", "question 0", "0", "question 1", "1", "question 2"]
    assert reward_in(episode).value == 1.0


async def test_mistakes_in_calls_are_the_players_own() -> None:
    mistakes = calls(("a", "double", "{"), ("b", "halve", "{}"), ("c", "double", '{"number": "x"}'))
    episode, trajectory, fake = await play_endpoint(mistakes, saying("I see."), tools=[double])
    assert [single.status for single in trajectory.results] == [
        ToolCallStatus.MALFORMED,
        ToolCallStatus.UNKNOWN_TOOL,
        ToolCallStatus.BAD_ARGUMENTS,
    ]
    reported = [single["content"] for single in fake.requests[1]["messages"][-3:]]
    assert reported == [single.content for single in trajectory.results]
    assert reported[0].startswith("[malformed tool call]")
    assert reward_in(episode).value == 1.0


async def test_calls_of_a_message_run_concurrently_in_order() -> None:
    done = anyio.Event()

    async def first() -> str:
        """Wait for the second."""
        await done.wait()
        return "1"

    async def second() -> str:
        """Let the first go on."""
        done.set()
        return "2"

    pair = calls(("same", "first", ""), ("same", "second", "{}"))
    _, trajectory, _ = await play_endpoint(pair, tools=[first, second])
    assert [result.content for result in trajectory.results] == ["1", "2"]


async def test_tools_that_the_caller_runs_end_a_conversation() -> None:
    tool = CallerTool({"type": "function", "function": {"name": "move", "parameters": {}}})
    _, trajectory, _ = await play_endpoint(calls(("c", "move", "{}")), tools=[tool])
    assert trajectory.stop_reason is StopReason.CALLER_TOOLS
    assert [call.name for call in trajectory.calls] == ["move"]


async def test_named_tools_are_those_of_the_run() -> None:
    class WithTools(Model):
        def resolve_tools(self, tools: Sequence[Any]) -> list[Tool]:
            return [as_tool({"twice": double}[tool]) for tool in tools]

    call = calls(("c", "double", '{"number": 4}'))
    _, trajectory, _ = await play_endpoint(call, host=WithTools(), tools=["twice"])
    assert trajectory.results[0].content == "8"


async def test_environments_calls_are_sent_as_json_text() -> None:
    @agentloop.environment
    async def game(task: Any, agent: Agent) -> float:
        before = [{"role": "user", "content": "?"}, agentloop.call("double", number=2)]
        await agent.other("opponent", player=endpoint(fake)).chat([*before, {"role": "user"}])
        return 1.0

    async with FakeEndpoint().serving() as fake:
        await run(game, size=1)
    (call,) = fake.requests[0]["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"number": 2}


async def test_script_may_play_an_agent() -> None:
    async def opponent(messages: list[Message]) -> Message | str:
        if messages[-1]["role"] == "user":
            return agentloop.call("double", number=len(messages))
        return f"<think>So</think>It is {messages[-1]['content']}."

    against, result = played_by(opponent, tools=[double])
    (episode,) = await run(against, size=1)
    assert result[0].answer == "It is 2."
    assert not episode.others["opponent"].is_trained
    played = await agentloop.play(against, {}, lambda messages: "e4")
    assert played.reward.value == 1.0
    assert [single["messages"][-1]["content"] for single in played.dialogues] == [
        "e4"
    ]  # the agent's own
    assert result[1].answer == "It is 2."


async def test_player_must_be_one() -> None:
    with pytest.raises(RequestError, match="TypeError: player: expected an endpoint, a runtime or"):
        await run(played_by("http://a/v1")[0])


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "limit", "sent"),
    [
        ({}, None, {}),
        ({"max_tokens": 9}, None, {"max_tokens": 9}),
        ({}, 7, {"max_tokens": 7}),
        ({"max_tokens": 9}, 7, {"max_tokens": 7}),
        ({"max_completion_tokens": 5}, 7, {"max_completion_tokens": 5}),
    ],
)
async def test_limit_of_tokens_is_that_of_a_message(
    options: dict[str, Any], limit: int | None, sent: dict[str, int]
) -> None:
    cut = saying("It is", "length")
    _, trajectory, fake = await play_endpoint(cut, options=options, max_tokens=limit)
    assert {name: fake.requests[0][name] for name in fake.requests[0] if "tokens" in name} == sent
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET
    assert (trajectory.answer, trajectory.turns[0].end) == ("It is", TurnEnd.LENGTH)


@pytest.mark.parametrize(
    ("finish", "more", "stop_reason"),
    [
        ("content_filter", {}, StopReason.CONTENT_FILTER),
        ("length", {"stop_reason": "turn_budget"}, StopReason.TURN_BUDGET),
    ],
)
async def test_what_cuts_off_a_message_ends_the_conversation(
    finish: str, more: dict[str, str], stop_reason: StopReason
) -> None:
    message = {"role": "assistant", "content": "It is"}
    choice = {"message": message, "finish_reason": finish, **more}
    _, trajectory, _ = await play_endpoint(Answer(body={"choices": [choice]}))
    assert (trajectory.stop_reason, trajectory.answer) == (stop_reason, "It is")


async def test_conversation_that_fills_the_context_has_ended() -> None:
    error = {"message": "This model's maximum context length is 100 tokens."}
    full, answer = Answer(400, {"error": error}), calls(("c", "double", '{"number": 1}'))
    record, trajectory, _ = await play_endpoint(answer, full, tools=[double])
    assert (trajectory.stop_reason, record.may_count) == (StopReason.TOKEN_BUDGET, True)
    with pytest.raises(RequestError, match="maximum context length"):  # the task's own fault
        await play_endpoint(full, tools=[double])


async def test_endpoint_that_nobody_may_ask_any_more_refuses_the_task() -> None:
    async with FakeEndpoint().serving() as fake:
        against, _ = played_by(endpoint(fake, max_requests=0))
        with pytest.raises(RequestError, match=r"raised LimitReached: .*\(max_requests\)"):
            await run(against)


# --- who is to blame ------------------------------------------------------------------------------


@pytest.mark.parametrize("hides", [False, True])
async def test_endpoint_that_fails_gives_no_reward(hides: bool) -> None:
    @agentloop.environment
    async def against(task: Any, agent: Agent) -> float:
        await agent.run("?")
        try:
            await agent.other("opponent", player=endpoint(fake)).chat("?")
        except InfrastructureFailed:
            if not hides:
                raise
        return 1.0

    async with FakeEndpoint(deque([Answer(503)] * 2)).serving() as fake:
        for episode in await run(against):  # no RequestError: the task is not refused
            assert reward_in(episode).value is None
            assert reward_in(episode).reason.startswith(f"infrastructure: {fake.url}: 503")
            (failed,) = episode.others["opponent"].trajectories
            assert failed.stop_reason is StopReason.INFRASTRUCTURE
            assert failed.turns[0].end is TurnEnd.ABORT


async def test_endpoint_that_is_late_is_the_infrastructures_fault() -> None:
    async with FakeEndpoint(gate=anyio.Event()).serving() as fake:
        against, _ = played_by(endpoint(fake))
        (episode,) = await run(against, size=1, timeout_s=0.3)
    assert reward_in(episode).reason.startswith("infrastructure: it ran out of time")
    assert fake.num_in_flight == 0


async def test_tool_that_the_infrastructure_fails_gives_no_reward() -> None:
    async def ask() -> str:
        """Ask another agent."""
        raise InfrastructureFailed("gone")

    async with FakeEndpoint(deque([calls(("c", "ask", "{}"))])).serving() as fake:
        against, _ = played_by(endpoint(fake), tools=[ask])
        (episode,) = await run(against, size=1)
    assert reward_in(episode).reason == "infrastructure: ask: gone"


async def test_script_that_raises_is_the_environments_fault() -> None:
    def broken(messages: list[Message]) -> str:
        raise KeyError("board")

    with pytest.raises(RequestError, match="raised KeyError: 'board'"):
        await run(played_by(broken)[0])


async def test_conversation_that_its_environment_stops_is_recorded() -> None:
    @agentloop.environment
    async def race(task: Any, agent: Agent) -> float:
        opponent = agent.other("opponent", player=endpoint(fake))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opponent.run, "?")
            while not fake.num_in_flight:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        await agent.chat("?")
        return 1.0

    async with FakeEndpoint(gate=anyio.Event()).serving() as fake:
        (episode,) = await run(race, size=1)
    (stopped,) = episode.others["opponent"].trajectories
    assert stopped.stop_reason is StopReason.ENVIRONMENT
    assert reward_in(episode).value == 1.0


# --- records --------------------------------------------------------------------------------------


async def trained_on(path: Path) -> tuple[list[dict[str, Any]], list[Event]]:
    """Roll out a group for training whose opponent is an endpoint.

    Returns:
        Its rows as written to a run in `path`, and the events of the opponent's conversations.
    """
    one_at_a_time = anyio.Lock()

    @agentloop.environment
    async def against(task: Any, agent: Agent) -> float:
        await agent.run("?")
        replies = iter(["Sure?", None])
        async with one_at_a_time:
            await agent.other("opponent", player=endpoint(fake)).run(
                "Double 4.", tools=[double], reply=lambda answer: next(replies)
            )
        return float(agent.id.endswith(".1"))

    events: list[Event] = []
    answers = [calls(("c", "double", '{"number": 4}'), text="So"), saying("8."), saying("Yes.")]
    (path / "tasks.jsonl").write_text('{"problem": "Play.", "answer": "-"}\n')
    (task,) = read_tasks(TasksSettings(kind="jsonl", paths=[path / "tasks.jsonl"]))
    async with FakeEndpoint(deque(answers * 2)).serving() as fake:
        player = EnvironmentPlayer(against, Model(), sampling=Sampling(), emit=events.append)
        async with Grader(RewardSettings(function="exact")) as grader:
            rollouts = Rollouts(
                GroupRunner(player, grader), RocSettings(down_sample_to_n=0), seed=0
            )
            group = await rollouts.run(GroupRequest(task, "1", 2, Budget(), 0, Purpose.TRAIN))
    assert group.figures.has_signal
    assert [single.num_tokens for single in group.figures.rollouts] == [1, 1]
    assert [single.num_turns for single in group.figures.rollouts] == [1, 1]
    folder = RunFolder(path / "run", "")
    written, _ = folder.add_group(1, [{"group": 1, **row.to_dict()} for row in group.rows])
    opponents = [
        single for single in events if getattr(single, "rollout_id", "").endswith("+opponent")
    ]
    return folder.read_group(written), opponents


async def test_only_the_agents_own_conversations_are_trained_on(tmp_path: Path) -> None:
    rows, events = await trained_on(tmp_path)
    assert [(row["agent"], row["credit"] is None) for row in rows] == [
        ("", False),
        ("opponent", True),
    ] * 2
    records = [single.record for single in events if isinstance(single, RolloutStarted)]
    opponents = [row["trajectory"] for row in rows if row["agent"]]
    assert [Trajectory.from_dict(single) for single in opponents] == records
    assert not any(record.num_sampled_tokens for record in records)
    # A rollout counts once, though it has a row for each conversation.
    remaining = filter_solved([tmp_path / "tasks.jsonl"], [tmp_path / "run"], solved=2, rollouts=2)
    assert (len(remaining.tasks), remaining.num_too_few) == (1, 0)


async def test_players_conversation_is_observed_like_any_other(tmp_path: Path) -> None:
    _, events = await trained_on(tmp_path)
    board, timeline, stalls = Board(), Timeline(), Stalls()
    metrics = Metrics(list, lambda: 0)
    for event in events:
        for reader in (board, timeline, stalls, metrics):
            reader.on_event(event)
        if isinstance(event, TurnPlaced):
            assert [single.what for single in stalls.waits()] == [
                f"the first token from {event.server}"
            ]
    assert stalls.waits() == []
    assert board.num_in_flight == 0
    rows = [(row.state, row.stop, row.turn, row.calls, row.tokens) for row in board.rows.values()]
    assert rows == [("done", "answered", 3, 1, 21)] * 2  # by its own count
    assert {kind for kind, _, _ in timeline.spans} >= {Activity.MODEL, Activity.TOOLS}
    observed = metrics.render().decode().splitlines()
    assert "agentloop_rollouts_in_flight 0.0" in observed
    assert 'agentloop_rollouts_total{stop_reason="answered"} 2.0' in observed
    assert "agentloop_rollout_tokens_count 0.0" in observed  # not those of the trained model


async def test_page_shows_messages_and_calls_without_ids(tmp_path: Path) -> None:
    _, events = await trained_on(tmp_path)
    record = next(single.record for single in events if isinstance(single, RolloutStarted))
    reported = RecordReader(record, chat_format()).whole()
    assert reported["prompt"] == "user: Double 4."
    first, second, third = reported["turns"]
    assert first["pieces"] == ["So", '{"number": 4}']
    assert [(single["start"], single["end"]) for single in first["calls"]] == [(1, 2)]
    assert [single["content"] for single in first["results"]] == ["8"]
    assert [single["observation"] for single in (first, second, third)] == [
        "tool: 8",
        "user: Sure?",
        "",
    ]
    assert [single["pieces"] for single in (second, third)] == [["8."], ["Yes."]]
