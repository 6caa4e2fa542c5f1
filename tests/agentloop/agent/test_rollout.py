"""Rollouts: exact, bounded, and without leftovers wherever they are cut off."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.constraints import OutputRules
from agentloop.agent.rollout import Budget, Rollout, TurnOptions
from agentloop.agent.tools import CallerTool, RunTool, ToolOutput
from agentloop.errors import PromptTooLong, RequestError, ServerUnavailable
from agentloop.events import (
    CallFinished,
    CallStarted,
    Event,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
)
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.token_records import KeptIds, RoutedExperts
from agentloop.trajectory import (
    StopReason,
    ToolCallStatus,
    Trajectory,
    TurnEnd,
    VersionSpan,
)
from tests.agentloop.agent.test_tools import Stateful
from tests.patience import patient
from tests.support import (
    END,
    TEMPLATE,
    ScriptedEngine,
    Step,
    call_text,
    chat_format,
    chunks,
    logprob,
    spans_cover,
    template,
    tokenizer,
    written,
)

CHAT = chat_format()
ASKED = [{"role": "user", "content": "What is 37 times 48?"}]


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return a * b


async def echo(text: str) -> str:
    """Say it again."""
    return text


def says(text: str, *, end: TurnEnd = TurnEnd.STOP) -> list[Step]:
    """Return the steps of a turn with one token per frame."""
    ids = written(CHAT, text + (END if end is TurnEnd.STOP else ""))
    return list(chunks(ids, range(1, len(ids)), end=end))


def rollout(engine: ScriptedEngine, tools: Sequence[Any] = (), **options: Any) -> Rollout:
    return Rollout(engine=engine, chat=CHAT, messages=ASKED, tools=tools, **options)


def check(trajectory: Trajectory, engine: ScriptedEngine) -> None:
    """Check the invariants of every trajectory."""
    ids = trajectory.ids
    lengths = {len(x) for x in (trajectory.mask, trajectory.logprobs, trajectory.versions)}
    assert lengths == {len(ids)}
    for bit, logprob_, version in zip(
        trajectory.mask, trajectory.logprobs, trajectory.versions, strict=True
    ):
        assert (version is not None) == bool(bit)
        assert bit or logprob_ == 0.0
    at = len(trajectory.prompt_ids)
    for turn, generation in zip(trajectory, engine.asked, strict=False):
        assert generation.ids == ids[:at]  # each prompt extends the last one's ids
        assert len(turn.logprobs) == len(turn.output_ids)
        assert spans_cover(turn.versions, len(turn.output_ids))
        assert turn.text == CHAT.decode(turn.output_ids)
        calls = [call.id for call in turn.calls]
        assert [r.call_id for r in turn.results] == [
            i for i in calls if i in {r.call_id for r in turn.results}
        ]
        assert len(set(calls)) == len(calls)
        at += len(turn.output_ids) + len(turn.observation_ids)
    assert sum(trajectory.mask) == trajectory.num_sampled_tokens
    assert engine.num_open == 0
    assert engine.forgotten == [trajectory.id]
    assert trajectory.to_dict_per_token()["ids"] == ids


async def play(engine: ScriptedEngine, tools: Sequence[Any] = (), **options: Any) -> Trajectory:
    """Run a rollout, and check its record."""
    trajectory = await rollout(engine, tools, **options).run()
    check(trajectory, engine)
    return trajectory


async def test_question_is_answered() -> None:
    trajectory = await play(ScriptedEngine(says("It is 1776.")))
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.text == f"It is 1776.{END}"
    assert trajectory.turns[0].end is TurnEnd.STOP
    assert trajectory.turns[0].logprobs == [
        logprob(i) for i in range(trajectory.num_sampled_tokens)
    ]


async def test_next_turn_reads_the_result_of_a_call() -> None:
    engine = ScriptedEngine(says(call_text("multiply", {"a": 37, "b": 48})), says("It is 1776."))
    trajectory = await play(engine, [multiply])
    (result,) = trajectory.results
    assert (result.status, result.content) == (ToolCallStatus.OK, "1776")
    assert trajectory.turns[0].observation_ids == CHAT.observation(["1776"])
    assert result.dispatched_s <= result.started_s <= result.ended_s <= trajectory.elapsed_s


async def test_conversation_goes_on_while_the_user_replies() -> None:
    engine = ScriptedEngine(
        says("Is it 50?"), says(call_text("multiply", {"a": 5, "b": 15})), says("75?"), says("62?")
    )
    replies: list[str | None] = ["higher", "lower", None]
    heard: list[str] = []

    async def reply(answer: str) -> str | None:
        heard.append(answer)
        return replies[len(heard) - 1]

    trajectory = await play(engine, [multiply], reply=reply)
    assert heard == ["Is it 50?", "75?", "62?"]
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.answer == "62?"
    observed = [turn.observation_ids for turn in trajectory]
    questions = [CHAT.user_message(text) for text in ("higher", "lower")]
    assert observed == [questions[0], CHAT.observation(["75"]), questions[1], []]


@pytest.mark.parametrize(
    ("budget", "stop_reason"),
    [
        (Budget(max_turns=2), StopReason.TURN_BUDGET),
        (Budget(max_response_tokens=40), StopReason.TOKEN_BUDGET),
    ],
)
async def test_user_hears_the_last_answer_within_the_budget(
    budget: Budget, stop_reason: StopReason
) -> None:
    heard: list[str] = []

    async def reply(answer: str) -> str:
        heard.append(answer)
        return "higher" * len(heard) ** 6  # the second one exceeds the budget of tokens

    engine = ScriptedEngine(says("50?"), says("75?"))
    trajectory = await play(engine, reply=reply, budget=budget)
    assert (heard, trajectory.stop_reason) == (["50?", "75?"], stop_reason)


async def test_error_of_the_user_is_raised_and_leaves_nothing_behind() -> None:
    async def reply(answer: str) -> str:
        raise KeyError(answer)

    events: list[Event] = []
    engine = ScriptedEngine(says("50?"))
    with pytest.raises(KeyError, match="50"):
        await rollout(engine, reply=reply, emit=events.append).run()
    assert engine.num_open == 0
    assert isinstance(events[-1], RolloutAbandoned)


async def test_events_are_emitted_in_order() -> None:
    events: list[Event] = []
    engine = ScriptedEngine(says(call_text("echo", {"text": "x"})), says("done"))
    await rollout(engine, [echo], emit=events.append).run()
    event_types = [type(event) for event in events if not isinstance(event, TokensSampled)]
    first = [TurnStarted, TurnPlaced, CallStarted, TurnSampled, CallFinished, TurnFinished]
    last = [TurnStarted, TurnPlaced, TurnSampled, TurnFinished]
    assert event_types == [RolloutStarted, *first, *last, RolloutFinished]
    text = "".join(event.text for event in events if isinstance(event, TokensSampled))
    assert text == f"{call_text('echo', {'text': 'x'})}{END}done{END}"


async def test_call_starts_while_its_turn_is_generated() -> None:
    started = anyio.Event()

    async def ping() -> str:
        """Say that it runs."""
        started.set()
        return "pong"

    async def until_started() -> None:
        with anyio.fail_after(patient(15)):
            await started.wait()  # the turn cannot end before the call has begun

    first, *later = says(" and then some text")
    engine = ScriptedEngine(
        [*says(call_text("ping", {}), end=TurnEnd.LENGTH)[:-1],
         *chunks(written(CHAT, "</tool_call>"), end=None), until_started, first, *later],
        says("done"),
    )  # fmt: skip
    trajectory = await rollout(engine, [ping]).run()
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.results[0].dispatched_s <= trajectory.turns[0].generated_s


async def test_calls_of_a_turn_run_concurrently_with_ordered_results() -> None:
    finished: list[int] = []
    gates = [anyio.Event() for _ in range(3)]

    async def wait(n: int) -> int:
        """Wait for all that come later."""
        if n < 2:
            await gates[n + 1].wait()
        finished.append(n)
        gates[n].set()
        return n

    engine = ScriptedEngine(
        says("\n".join(call_text("wait", {"n": n}) for n in range(3))), says("done")
    )
    trajectory = await play(engine, [wait])
    assert finished == [2, 1, 0]
    assert [result.content for result in trajectory.results] == ["0", "1", "2"]
    assert trajectory.turns[0].observation_ids == CHAT.observation(["0", "1", "2"])


Script = list[tuple[list[tuple[str, int]], str]]  # per turn: calls with their delays, and text

scripts: st.SearchStrategy[Script] = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.sampled_from(["later", "nope", "fail"]), st.integers(0, 3)), max_size=3
        ),
        st.text("ab é\n", max_size=6),
    ),
    min_size=1,
    max_size=3,
)


def turn_text(calls: list[tuple[str, int]], text: str) -> str:
    return text + "".join(call_text(name, {"n": n}) for name, n in calls) + text


@settings(max_examples=40, deadline=None)
@given(scripts, st.lists(st.integers(0, 150), max_size=12), st.booleans(), st.integers(8, 30))
async def test_trajectory_equals_that_of_serial_execution(
    script: Script, cuts: list[int], with_text: bool, limit: int
) -> None:
    async def later(n: int) -> str:
        """Answer some time later."""
        for _ in range(n):
            await anyio.lowlevel.checkpoint()
        return "é" * n * 10

    async def fail(n: int) -> None:
        """Fail."""
        raise ValueError(n)

    def steps(ids: list[int], cuts: Sequence[int]) -> list[Step]:
        return list(chunks(ids, [min(cut, len(ids)) for cut in cuts]))

    async def run(cuts: Sequence[int]) -> tuple[Trajectory, ScriptedEngine]:
        turns = [written(CHAT, turn_text(*turn) + END) for turn in script]
        turns.append(written(CHAT, f"done{END}"))
        engine = ScriptedEngine(*(steps(ids, cuts) for ids in turns))
        budget = Budget(max_tool_response_tokens=limit)
        made = rollout(engine, [later, fail], with_text=with_text, budget=budget)
        return await made.run(), engine

    serial, _ = await run([])  # all of a turn in one frame: no call starts before its end
    cut, engine = await run(cuts)
    check(cut, engine)
    assert (cut.ids, cut.mask, cut.logprobs) == (serial.ids, serial.mask, serial.logprobs)
    assert cut.stop_reason is serial.stop_reason
    assert [r.content for r in cut.results] == [r.content for r in serial.results]
    assert [r.status for r in cut.results] == [r.status for r in serial.results]


@pytest.mark.parametrize(
    ("text", "error"),
    [("<tool_call>{nope</tool_call>", "not valid JSON"), ('<tool_call>{"name": "multiply"', "")],
)
async def test_malformed_or_unclosed_call_gets_an_error_message(text: str, error: str) -> None:
    trajectory = await play(ScriptedEngine(says(text), says("sorry")), [multiply])
    (result,) = trajectory.results
    assert result.status is ToolCallStatus.MALFORMED
    assert error in result.content
    assert trajectory.stop_reason is StopReason.ANSWERED


async def test_turns_are_bounded() -> None:
    engine = ScriptedEngine(*(says(call_text("echo", {"text": "x"})) for _ in range(3)))
    trajectory = await play(engine, [echo], budget=Budget(max_turns=2))
    assert trajectory.stop_reason is StopReason.TURN_BUDGET
    assert len(trajectory.turns) == len(trajectory.results) == 2
    assert trajectory.turns[-1].observation_ids == []


@pytest.mark.parametrize("spare", [0, 1, 2])
async def test_response_tokens_are_bounded_including_tool_responses(spare: int) -> None:
    text = call_text("echo", {"text": "x"})
    used = len(written(CHAT, text + END)) + len(CHAT.observation(["x"]))
    engine = ScriptedEngine(says(text), says("d", end=TurnEnd.LENGTH))
    budget = Budget(max_response_tokens=used + spare)
    trajectory = await play(engine, [echo], budget=budget)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET
    assert len(trajectory.turns) == (2 if spare else 1)
    assert [generation.max_new_tokens for generation in engine.asked][1:] == (
        [spare] if spare else []
    )
    assert trajectory.num_response_tokens <= used + spare


async def test_context_length_bounds_a_turn() -> None:
    length = len(CHAT.prompt(ASKED)) + 5
    engine = ScriptedEngine(says("abcde", end=TurnEnd.LENGTH), context_length=length)
    trajectory = await rollout(engine).run()
    assert engine.asked[0].max_new_tokens == 5
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET


async def test_prompt_that_is_too_long_is_rejected_before_anything_runs() -> None:
    engine = ScriptedEngine(context_length=len(CHAT.prompt(ASKED)))
    with pytest.raises(PromptTooLong, match="maximum context length is 22"):
        await rollout(engine).run()
    assert engine.asked == []


async def test_sampled_tokens_are_bounded_without_tool_responses() -> None:
    call = says(call_text("echo", {"text": "x"}))
    engine = ScriptedEngine(call, call, says("do", end=TurnEnd.LENGTH))
    budget = Budget(max_sampled_tokens=2 * len(call) + 2)
    trajectory = await play(engine, [echo], budget=budget)
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET
    assert trajectory.num_sampled_tokens == 2 * len(call) + 2 < trajectory.num_response_tokens
    assert [generation.max_new_tokens for generation in engine.asked] == [
        2 * len(call) + 2,
        len(call) + 2,
        2,
    ]


async def test_no_turn_starts_without_budget_for_a_token() -> None:
    call = says(call_text("echo", {"text": "x"}))
    engine = ScriptedEngine(call)
    trajectory = await rollout(engine, [echo], budget=Budget(max_sampled_tokens=len(call))).run()
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.TOKEN_BUDGET, 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=8), st.booleans())
async def test_stop_sequence_ends_turn_at_its_last_token(cuts: list[int], with_text: bool) -> None:
    ids = written(CHAT, f"hello world, what STOP hello{END}")
    num = next(n for n in range(len(ids)) if "STOP" in CHAT.decode(ids[:n]))
    engine = ScriptedEngine([*chunks(ids, [min(cut, len(ids)) for cut in cuts])])
    options = TurnOptions(stop=("never", "STOP"))
    trajectory = await play(engine, options=options, with_text=with_text)
    (turn,) = trajectory.turns
    assert turn.output_ids == ids[:num]
    assert (trajectory.stop_reason, turn.end) == (StopReason.STOP_SEQUENCE, TurnEnd.STOP)
    assert trajectory.answer == "hello world, what"


async def test_stop_sequence_frees_the_server_at_once() -> None:
    engine = ScriptedEngine([*says("a STOP b")[:-2], anyio.sleep_forever])
    trajectory = await play(engine, options=TurnOptions(stop=("STOP",)))
    assert trajectory.stop_reason is StopReason.STOP_SEQUENCE


async def test_stop_sequences_in_calls_or_across_turns_are_ignored() -> None:
    engine = ScriptedEngine(says(f"ST{call_text('echo', {'text': 'STOP'})}"), says("OP it is"))
    options = TurnOptions(stop=("STOP",))
    trajectory = await rollout(engine, [echo], options=options).run()
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.answer == "OP it is"


@pytest.mark.parametrize("end", [TurnEnd.STOP, TurnEnd.LENGTH])
async def test_stop_sequence_completed_by_the_end_of_the_turn(end: TurnEnd) -> None:
    """The text held back may have been the beginning of a tag."""
    engine = ScriptedEngine(says("1 <", end=end))
    trajectory = await rollout(engine, options=TurnOptions(stop=("<",))).run()
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.STOP_SEQUENCE, "1")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 120), max_size=8))
@pytest.mark.parametrize("whose", ["agent", "caller"])
@pytest.mark.parametrize("tags", [True, False])
async def test_single_call_ends_a_turn_after_its_first_call(
    whose: str, tags: bool, cuts: list[int]
) -> None:
    chat = chat_format(tags=tags)
    first_call, second_call = (call_text("echo", {"text": text}) for text in "ab")
    ids = written(chat, f"so {first_call} {second_call}{END}")
    first = len(written(chat, f"so {first_call}"))
    engine = ScriptedEngine(
        [*chunks(ids, [min(cut, len(ids)) for cut in cuts])], list(chunks(written(chat, END)))
    )
    schema = {"type": "function", "function": {"name": "echo"}}
    tools: list[Any] = [echo] if whose == "agent" else [CallerTool(schema)]
    trajectory = await Rollout(
        engine, chat, ASKED, tools, options=TurnOptions(single_call=True)
    ).run()
    turn = trajectory.turns[0]
    assert [call.arguments for call in turn.calls] == [{"text": "a"}]
    assert len(turn.results) == 1
    if tags:
        assert turn.output_ids == ids[:first]
    if whose == "caller":
        assert trajectory.stop_reason is StopReason.CALLER_TOOLS
        return
    # The next prompt is as if the model had ended its turn itself; what it has not sampled is
    # not in the loss.
    assert turn.observation_ids == [chat.end_id, *chat.observation(["a"])]
    assert engine.asked[1].ids == trajectory.ids[: len(engine.asked[1].ids)]
    assert trajectory.stop_reason is StopReason.ANSWERED


async def test_single_call_leaves_a_finished_turn_unchanged() -> None:
    text = call_text("echo", {"text": "x"})
    engine = ScriptedEngine([*chunks(written(CHAT, text + END)[:-1], end=TurnEnd.LENGTH)])
    options = TurnOptions(single_call=True)
    trajectory = await rollout(engine, [echo], options=options, budget=Budget(max_turns=1)).run()
    assert trajectory.turns[0].end is TurnEnd.STOP
    assert trajectory.stop_reason is StopReason.TURN_BUDGET


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 200), max_size=8), limit=st.sampled_from([None, 1, 2, 3]))
async def test_calls_beyond_limit_of_a_turn_are_ignored(cuts: list[int], limit: int | None) -> None:
    """Their text stays, as the model wrote it, but they neither run nor get a response."""
    broken = "<tool_call>\n{broken\n</tool_call>"
    written_calls = [call_text("echo", {"text": "a"}), broken, call_text("echo", {"text": "c"})]
    ids = written(CHAT, f"so {' '.join(written_calls)}{END}")
    engine = ScriptedEngine(
        [*chunks(ids, [min(cut, len(ids)) for cut in cuts])], list(chunks(written(CHAT, END)))
    )
    trajectory = await play(engine, [echo], budget=Budget(max_calls_per_turn=limit))
    turn = trajectory.turns[0]
    assert turn.output_ids == ids
    expected = [ToolCallStatus.OK, ToolCallStatus.MALFORMED, ToolCallStatus.OK][:limit]
    assert [result.status for result in turn.results] == expected
    assert turn.observation_ids == CHAT.observation([result.content for result in turn.results])
    assert trajectory.stop_reason is StopReason.ANSWERED


async def test_call_left_open_beyond_the_limit_is_ignored() -> None:
    call = call_text("echo", {"text": "a"})
    engine = ScriptedEngine(says(f"{call}<tool_call>"), says("done"))
    trajectory = await rollout(engine, [echo], budget=Budget(max_calls_per_turn=1)).run()
    assert [result.content for result in trajectory.turns[0].results] == ["a"]


async def test_response_is_cut_by_characters_and_then_by_tokens() -> None:
    text = "x" * 30 + "y" * 30
    engine = ScriptedEngine(says(call_text("echo", {"text": text})), says("done"))
    budget = Budget(max_tool_response_chars=8)
    trajectory = await rollout(engine, [echo], budget=budget).run()
    (turn, _) = trajectory.turns
    assert turn.observation_ids == CHAT.observation(["xxxx...(truncated)...yyyy"])
    assert turn.results[0].content == text  # the record keeps all of it


async def test_feedback_is_in_the_wording_of_the_rollout() -> None:
    engine = ScriptedEngine(
        says("<tool_call>\n{broken\n</tool_call>" + call_text("find", {})), says("done")
    )
    trajectory = await rollout(engine, [echo], tool_format="release").run()
    decoding, unknown = (result.content for result in trajectory.turns[0].results)
    assert decoding.startswith("Failed to decode tool call: Expecting property name")
    assert unknown == "Error when executing tool: 'find'"


async def test_only_the_first_turn_must_call() -> None:
    engine = ScriptedEngine(says(call_text("echo", {"text": "x"})), says("done"))
    options = TurnOptions(rules=OutputRules("required"))
    trajectory = await play(engine, [echo], options=options)
    assert [bool(generation.parameters) for generation in engine.asked] == [True, False]
    assert trajectory.answer == "done"


@pytest.mark.parametrize("rules", [OutputRules("required"), OutputRules("echo"), OutputRules()])
async def test_forced_call_is_found_however_its_markers_are_spelled(rules: OutputRules) -> None:
    """A grammar admits every spelling. In a free turn, only the tokens of markers are markers."""
    spelled = [*CHAT.encode(call_text("echo", {"text": "x"})), *written(CHAT, END)]
    assert CHAT.token_id("<tool_call>") not in spelled
    engine = ScriptedEngine([*chunks(spelled, range(1, len(spelled)))], says("done"))
    trajectory = await play(engine, [echo], options=TurnOptions(rules=rules))
    results = [(result.name, result.content) for result in trajectory.turns[0].results]
    assert results == ([("echo", "x")] if rules.tool else [])


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        (OutputRules("required"), "^tool_choice: a tool's parameters cannot be enforced: Failed"),
        (OutputRules(schema={}), "^response_format: its schema or a tool's .*: Failed to"),
    ],
)
async def test_refused_grammar_names_its_field(rules: OutputRules, error: str) -> None:
    engine = ScriptedEngine([RequestError("Failed to compile structural_tag grammar: nope")])
    with pytest.raises(RequestError, match=error):
        await rollout(engine, [echo], options=TurnOptions(rules=rules)).run()


async def test_another_refusal_stays_as_it_is() -> None:
    engine = ScriptedEngine([RequestError("ids: too many")])
    with pytest.raises(RequestError, match=r"^ids: too many$"):
        await rollout(engine, [echo], options=TurnOptions(rules=OutputRules("echo"))).run()


async def test_ignore_end_uses_the_whole_budget() -> None:
    text = call_text("echo", {"text": "x"})
    engine = ScriptedEngine(says(f"{text}{END}{text}", end=TurnEnd.LENGTH))
    trajectory = await play(engine, [echo], options=TurnOptions(ignore_end=True))
    assert trajectory.calls == []  # they could not be answered
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET
    assert engine.asked[0].stop_ids == ()
    assert engine.asked[0].sampling.to_sglang(max_new_tokens=3, stop_ids=())["ignore_eos"]


@pytest.mark.parametrize("with_text", [True, False])
async def test_frames_for_each_token_need_a_reader(with_text: bool) -> None:
    engine = ScriptedEngine(says("hi"))
    await rollout(engine, with_text=with_text).run()
    assert (engine.asked[0].stream_interval == 1) is with_text


async def test_answer_is_the_content_of_the_last_turn() -> None:
    text = "\n<answer>\n\\boxed{4}\n</answer>"
    engine = ScriptedEngine(
        says(f"Wait.{call_text('echo', {'text': 'x'})}"), says(f"<think>so</think>{text}")
    )
    trajectory = await rollout(engine, [echo]).run()
    assert trajectory.answer == "\\boxed{4}"
    assert trajectory.text == f"<think>so</think>{text}{END}"
    assert trajectory.to_dict()["answer"] == trajectory.answer


async def test_reasoning_that_is_cut_off_is_not_an_answer() -> None:
    thinking = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
    chat = ChatFormat(tokenizer(), template(thinking), end_token=END)
    ids = written(chat, "it may be 4")
    engine = ScriptedEngine([*chunks(ids, end=TurnEnd.LENGTH)])
    assert (await Rollout(engine, chat, ASKED).run()).answer == ""


async def test_turn_records_the_likeliest_tokens() -> None:
    ids = written(CHAT, "hello" + END)
    top = [[(-0.1, 5), (-2.0, 6)] for _ in ids]
    (chunk,) = chunks(ids)
    engine = ScriptedEngine([replace(chunk, top_logprobs=top, cached_tokens=7)])
    trajectory = await rollout(engine, options=TurnOptions(num_top_logprobs=2)).run()
    assert engine.asked[0].num_top_logprobs == 2
    assert trajectory.turns[0].top_logprobs == top
    assert trajectory.turns[0].cached_tokens == 7


async def test_length_of_a_turn_is_bounded() -> None:
    engine = ScriptedEngine(says("abc", end=TurnEnd.LENGTH))
    trajectory = await rollout(engine, budget=Budget(max_turn_tokens=3)).run()
    assert engine.asked[0].max_new_tokens == 3
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET


@pytest.mark.parametrize("where", ["generating", "tool", "opening"])
async def test_timeout_applies_everywhere(where: str) -> None:
    tool = Stateful(hang_at={"tool": "run", "opening": "open"}.get(where, ""))
    script: list[Step] = [anyio.sleep_forever] if where == "generating" else []
    engine = ScriptedEngine([*script, *says(call_text("stateful", {}))], says("done"))
    trajectory = await play(engine, [tool], budget=Budget(timeout_s=0.1))
    assert trajectory.stop_reason is StopReason.TIME_BUDGET
    assert (tool.num_open, tool.running) == (0, 0)


@pytest.mark.parametrize("answers_first", [True, False])
async def test_running_out_of_tokens_cancels_the_calls_of_the_turn(answers_first: bool) -> None:
    """The record does not depend on whether a call finished before the cut."""
    tool = Stateful(hang_at="" if answers_first else "run")
    waits: list[Step] = [anyio.wait_all_tasks_blocked]
    call = written(CHAT, call_text("stateful", {}))
    after = chunks(written(CHAT, " and"), end=TurnEnd.LENGTH, offset=len(call))
    trajectory = await play(ScriptedEngine([*chunks(call, end=None), *waits, *after]), [tool])
    assert trajectory.stop_reason is StopReason.TOKEN_BUDGET
    assert len(trajectory.calls) == 1
    assert trajectory.results == []
    assert (tool.num_open, tool.running) == (0, 0)


async def test_lost_server_is_an_infrastructure_failure() -> None:
    script: list[Step] = [*says("It is", end=TurnEnd.LENGTH)[:-1], ServerUnavailable("gone")]
    trajectory = await play(ScriptedEngine(script))
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE
    assert trajectory.error == "gone"
    assert trajectory.turns[0].end is TurnEnd.ABORT


@pytest.mark.parametrize("end", [None, TurnEnd.ABORT])
async def test_turn_without_an_end_is_not_an_answer(end: TurnEnd | None) -> None:
    trajectory = await play(ScriptedEngine(list(chunks(written(CHAT, "It is"), end=end))))
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE


class LostError(Exception):
    """A programming error."""


class Broken(Stateful):
    """A tool with a bug in its own code."""

    name = "broken"
    schema: Mapping[str, Any] = {"type": "function", "function": {"name": name}}

    async def _maybe(self, point: str) -> None:
        if point == "run":
            raise LostError


async def test_call_lost_to_the_infrastructure_ends_the_rollout_unscored() -> None:
    class Lost:
        name = "lost"
        schema: Mapping[str, Any] = {"type": "function", "function": {"name": name}}

        @asynccontextmanager
        async def open(self) -> AsyncIterator[RunTool]:
            async def run(arguments: Mapping[str, Any], /) -> ToolOutput:
                return ToolOutput(ToolCallStatus.INFRASTRUCTURE, "worker died")

            yield run

    engine = ScriptedEngine([*says(call_text("lost", {}))[:-1], anyio.sleep_forever])
    trajectory = await play(engine, [Lost()])
    assert trajectory.stop_reason is StopReason.INFRASTRUCTURE
    assert trajectory.error == "lost: worker died"


async def test_programming_error_is_raised_unchanged() -> None:
    engine = ScriptedEngine([*says(call_text("broken", {}))[:-1], anyio.sleep_forever])
    events: list[Event] = []
    tool = Broken()
    with pytest.raises(LostError):
        await rollout(engine, [tool], emit=events.append).run()
    assert isinstance(events[-1], RolloutAbandoned)
    assert (tool.num_open, engine.num_open, len(engine.forgotten)) == (0, 0, 1)


@pytest.mark.parametrize("early", [True, False])
async def test_request_error_is_raised_unwrapped(early: bool) -> None:
    script: list[Step] = [*([] if early else says("hm")[:1]), RequestError("ids: bad")]
    engine = ScriptedEngine(script)
    with pytest.raises(RequestError, match="ids: bad"):
        await rollout(engine).run()
    assert (engine.num_open, len(engine.forgotten)) == (0, 1)


async def test_bad_request_starts_nothing() -> None:
    engine = ScriptedEngine()
    events: list[Event] = []
    with pytest.raises(RequestError, match="two are named 'echo'"):
        await rollout(engine, [echo, echo], emit=events.append).run()
    assert events == []


def hook(at: anyio.Event) -> Callable[[], Any]:
    async def hang() -> None:
        at.set()
        await anyio.sleep_forever()

    return hang


@pytest.mark.parametrize("where", ["before", "amid", "tool", "opening", "second turn"])
async def test_cancellation_at_any_point_leaves_nothing_behind(where: str) -> None:
    tool = Stateful(hang_at={"tool": "run", "opening": "open"}.get(where, ""))
    cancel_point = hook(tool.at)
    first = says(call_text("stateful", {}))
    if where == "before":
        first.insert(0, cancel_point)
    elif where == "amid":
        first.insert(5, cancel_point)
    second: list[Step] = [cancel_point] if where == "second turn" else says("done")
    engine = ScriptedEngine(first, second)
    events: list[Event] = []
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rollout(engine, [tool], emit=events.append).run)
            with anyio.fail_after(patient(15)):
                await tool.at.wait()
            scope.cancel()
    assert (tool.num_open, tool.running, engine.num_open) == (0, 0, 0)
    assert len(engine.forgotten) == 1
    assert isinstance(events[0], RolloutStarted)
    assert isinstance(events[-1], RolloutAbandoned)


@pytest.mark.parametrize(
    "where", ["before", "waiting", "sampling", "tool", "opening", "second turn"]
)
async def test_cancel_sets_the_stop_reason_and_leaves_nothing_behind(where: str) -> None:
    tool = Stateful(hang_at={"tool": "run", "opening": "open"}.get(where, ""))
    cancel_point = hook(tool.at)
    first = says(call_text("stateful", {}))
    if where == "waiting":  # no token has come
        first.insert(0, cancel_point)
    elif where == "sampling":
        first.insert(5, cancel_point)
    engine = ScriptedEngine(first, [cancel_point] if where == "second turn" else says("done"))
    events: list[Event] = []
    made = rollout(engine, [tool], emit=events.append)
    trajectories: list[Trajectory] = []

    async def run() -> None:
        trajectories.append(await made.run())

    with anyio.fail_after(patient(15)):
        if where == "before":
            made.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            if where != "before":
                await tool.at.wait()
            made.cancel()
            made.cancel()  # a person may press twice
    (trajectory,) = trajectories
    check(trajectory, engine)
    assert trajectory.stop_reason is StopReason.CANCELLED
    assert trajectory.stop_reason.is_unscorable
    assert trajectory.error is None
    assert (tool.num_open, tool.running) == (0, 0)
    assert isinstance(events[0], RolloutStarted)
    assert isinstance(events[-1], RolloutFinished)
    assert sum(isinstance(event, RolloutFinished | RolloutAbandoned) for event in events) == 1
    if where == "before":
        assert (engine.asked, trajectory.turns) == ([], [])
    if where == "sampling":
        assert trajectory.turns[0].end is TurnEnd.ABORT
        assert trajectory.num_sampled_tokens == 5


@pytest.mark.parametrize("where", ["after", "answered"])
async def test_late_cancel_does_not_change_the_stop_reason(where: str) -> None:
    engine = ScriptedEngine(says("It is 1776."))
    made = rollout(engine)
    if where == "answered":  # but is not told of yet
        made.emit = lambda event: made.cancel() if isinstance(event, RolloutFinished) else None
    trajectory = await made.run()
    made.cancel()
    assert trajectory.stop_reason is StopReason.ANSWERED


async def test_cancel_within_a_cancelled_scope_abandons_the_rollout() -> None:
    """The caller was cancelled as well, so nobody receives a trajectory."""
    at = anyio.Event()
    engine = ScriptedEngine([hook(at)])
    events: list[Event] = []
    made = rollout(engine, emit=events.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        with anyio.fail_after(patient(15)):
            await at.wait()
        tasks.cancel_scope.cancel()
        made.cancel()
    assert isinstance(events[-1], RolloutAbandoned)
    assert (engine.num_open, len(engine.forgotten)) == (0, 1)


async def test_caller_tools_end_the_rollout() -> None:
    theirs = CallerTool({"type": "function", "function": {"name": "theirs"}})
    text = call_text("theirs", {"q": 1}) + call_text("echo", {"text": "x"})
    trajectory = await play(ScriptedEngine(says(text)), [theirs, echo])
    assert trajectory.stop_reason is StopReason.CALLER_TOOLS
    assert [r.status for r in trajectory.results] == [ToolCallStatus.CALLER, ToolCallStatus.OK]
    assert trajectory.turns[0].observation_ids == []


@pytest.mark.parametrize("length", [40, 41, 5_000, 200_000])
async def test_long_tool_response_keeps_its_head_and_its_tail(length: int) -> None:
    content = "".join(chr(ord("a") + n % 26) for n in range(length))

    async def long() -> str:
        """Say much."""
        return content

    engine = ScriptedEngine(says(call_text("long", {})), says("done"))
    budget = Budget(max_tool_response_tokens=41, max_response_tokens=10_000)
    trajectory = await play(engine, [long], budget=budget)
    before, after = CHAT.decode(CHAT.observation(["@"])).split("@")
    body = CHAT.decode(trajectory.turns[0].observation_ids)
    body = body.removeprefix(before).removesuffix(after)
    ids = CHAT.encode(content)
    if len(ids) <= 41:
        assert body == content
        return
    head, _, after = body.partition("\n[... ")
    note, _, tail = after.partition(" ...]\n")
    assert "left out" in note
    assert CHAT.encode(head) == ids[:21]
    assert CHAT.encode(tail) == ids[-20:]
    assert trajectory.results[0].content == content  # the record has all of it


async def test_cut_response_of_few_long_tokens_says_so() -> None:
    async def line() -> str:
        """Draw a line."""
        return "=" * 100_000

    made = tokenizer(corpus="=" * 2048)  # with tokens of many equals signs
    chat = ChatFormat(made, template(), end_token=END)
    script = [list(chunks(written(chat, f"{text}{END}"))) for text in (call_text("line", {}), "d")]
    engine = ScriptedEngine(*script)
    budget = Budget(max_tool_response_tokens=8)
    trajectory = await Rollout(engine, chat, ASKED, [line], budget=budget).run()
    assert "left out" in chat.decode(trajectory.turns[0].observation_ids)


async def test_surrogates_in_a_result_are_replaced() -> None:
    async def odd() -> str:
        """Give a file name that is no text."""
        return "a\udcffb"

    engine = ScriptedEngine(says(call_text("odd", {})), says("done"))
    trajectory = await rollout(engine, [odd]).run()
    assert trajectory.results[0].content == "a?b"


async def test_versions_change_with_the_weights_within_a_turn() -> None:
    ids = written(CHAT, f"abcdef{END}")
    first, second = ids[:3], ids[3:]
    script = [
        *chunks(first, [1], end=None, version="v1"),
        *chunks(second, [1], version="v2", offset=3),
    ]
    trajectory = await play(ScriptedEngine(list(script)))
    assert trajectory.turns[0].versions == [VersionSpan("v1", 0, 3), VersionSpan("v2", 3, len(ids))]


async def test_servers_version_spans_take_precedence_from_their_start() -> None:
    ids = written(CHAT, f"abcdef{END}")
    *script, last = chunks(ids, range(1, len(ids)), version="seen")
    account = (VersionSpan("v1", 2, 4), VersionSpan("v2", 4, len(ids)))
    end = Chunk(last.ids, last.logprobs, last.version, TurnEnd.STOP, account, cached_tokens=7)
    trajectory = await play(ScriptedEngine([*script, end]))
    assert trajectory.turns[0].versions == [VersionSpan("seen", 0, 2), *account]
    assert trajectory.turns[0].cached_tokens == 7


@pytest.mark.parametrize("options", [{}, {"stop": ("never",)}])  # the latter token by token
async def test_each_turn_asks_for_the_experts_that_no_other_has(options: dict[str, Any]) -> None:
    ids = written(CHAT, "It is 1776." + END)
    recorded = [RoutedExperts(0, 2, bytes(40)), None, RoutedExperts(20, 2, bytes(80))]
    turns = [chunks(ids, [1, 4], end=TurnEnd.STOP) for _ in recorded]
    for turn, experts in zip(turns, recorded, strict=True):
        turn[-1] = replace(turn[-1], experts=experts)
    engine = ScriptedEngine(*turns)
    replies = iter(["And?", "And then?", None])

    async def reply(answer: str) -> str | None:
        return next(replies)

    made = await rollout(engine, reply=reply, options=TurnOptions(**options)).run()
    assert [asked.experts_from for asked in engine.asked] == [0, 20, 20]
    assert [len(span.ids) for span in made.experts] == [40, 80]
    assert made.num_routed == 60


@pytest.mark.parametrize("options", [{}, {"stop": ("never",)}])  # the latter token by token
async def test_kept_ids_of_all_tokens_are_recorded(options: dict[str, Any]) -> None:
    ids = written(CHAT, "It is 1776." + END)
    steps = [
        replace(chunk, kept=[[id, id + 1] for id in chunk.ids])
        for chunk in chunks(ids, [1, 4], end=TurnEnd.STOP)
    ]
    sampling = Sampling(top_p=0.9, top_k=20).for_training()
    engine = ScriptedEngine(steps, [*steps[:1], ServerUnavailable("gone")])
    for num_kept in (len(ids), 1):
        made = await rollout(engine, sampling=sampling, options=TurnOptions(**options)).run()
        (turn,) = made.turns
        assert turn.kept == KeptIds([[id, id + 1] for id in ids[:num_kept]])
        assert len(turn.output_ids) == num_kept
    assert engine.asked[0].sampling.records_kept_ids
