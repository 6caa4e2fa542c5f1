"""Supervised fine-tuning: dialogues become trajectories and are trained on in order."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import Rollout
from agentloop.agent.sandbox_tools import PythonCode
from agentloop.agent.tools import RunTool, ToolOutput
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.environments.tasks.teacher import dialogues
from agentloop.errors import DataError, RunFolderError
from agentloop.events import Event, Measured, ignore
from agentloop.models import SMALL
from agentloop.training.learner_client.batch import Sample
from agentloop.training.learner_client.client import LearnerLost
from agentloop.training.run.folder import RunFolder
from agentloop.training.sft.fine_tuning import (
    Dialogue,
    DialoguesSettings,
    FineTuningPlan,
    SupervisedSettings,
    fine_tune,
    learning_rate,
    lineage,
    read_dialogues,
    read_samples,
    step_plan,
    trajectories_of,
)
from agentloop.trajectory import ToolCallStatus, Trajectory
from tests.agentloop.training.fake_learner import FakeLearner
from tests.fakes import RecordedProgress
from tests.support import (
    END,
    ScriptedEngine,
    call_text,
    chat_format,
    chunks,
    template,
    tokenizer,
    written,
)

FAKE = chat_format()
SHIPPED = ChatFormat.load(SMALL)
RECIPES = Path(__file__).parents[4] / "agentloop" / "cli" / "recipes"
PAPER = ChatFormat(tokenizer(), template((RECIPES / "paper.jinja").read_text("utf-8")))
USER = {"role": "user", "content": "What is 37 times 48?"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"n": {}}}},
}


class Look:
    """A tool that answers call number n with the n-th content."""

    name = "look"
    schema = TOOL

    def __init__(self, contents: Sequence[str]) -> None:
        self.contents = contents

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        async def run(arguments: Mapping[str, Any], /) -> ToolOutput:
            return ToolOutput(ToolCallStatus.OK, self.contents[arguments["n"]])

        yield run


def rolled_out(chat: ChatFormat, stated: Sequence[str], tool: Any) -> Trajectory:
    """Run a rollout in which the model samples these texts, one per turn."""
    turns = [chunks(written(chat, text + END)) for text in stated]
    rollout = Rollout(engine=ScriptedEngine(*turns), chat=chat, messages=[USER], tools=[tool])
    return anyio.run(rollout.run)


def made(
    chat: ChatFormat, messages: Sequence[Any], tools: Sequence[Any] = (TOOL,)
) -> list[Trajectory]:
    dialogue = Dialogue(messages, tools, "here")
    return trajectories_of(chat, dialogue, max_tool_response_tokens=512)


words = st.text("abc 0123,.{}\n<|>_", max_size=20)
results = st.one_of(words, st.sampled_from([END, "<tool_call>", "x" * 3000]))


@pytest.mark.parametrize("chat", [FAKE, SHIPPED, PAPER], ids=["fake", "shipped", "paper"])
@pytest.mark.parametrize("in_content", [True, False])
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(words, st.lists(results, min_size=1, max_size=3)), max_size=3))
def test_dialogue_has_the_ids_and_the_mask_of_its_rollout(
    chat: ChatFormat, in_content: bool, turns: list[tuple[str, list[str]]]
) -> None:
    contents: list[str] = []
    messages: list[dict[str, Any]] = [USER]
    stated: list[str] = []
    for thought, answers in turns:
        numbers = range(len(contents), len(contents) + len(answers))
        contents += answers
        text = f"{chat.opened_thought}{thought.strip()}."
        calls = [call_text("look", {"n": n}) for n in numbers]
        stated.append("\n".join([text, *calls]).removeprefix(chat.opened_thought))
        if in_content:
            messages.append({"role": "assistant", "content": "\n".join([text, *calls])})
        else:
            functions = [{"name": "look", "arguments": json.dumps({"n": n})} for n in numbers]
            tool_calls = [{"type": "function", "function": single} for single in functions]
            messages.append({"role": "assistant", "content": text, "tool_calls": tool_calls})
        messages += [{"role": "tool", "content": answer} for answer in answers]
    stated.append("It is 1776.")
    messages.append({"role": "assistant", "content": f"{chat.opened_thought}It is 1776."})
    (actual,) = made(chat, messages)
    expected = rolled_out(chat, stated, Look(contents))
    assert actual.ids == expected.ids
    assert actual.mask == expected.mask
    assert actual.mask[-1] == 1  # the end token is learned, too
    assert sum(actual.mask) == sum(len(written(chat, text + END)) for text in stated)


def test_teachers_dialogues_are_rollouts_of_the_runtime() -> None:
    """The runtime itself answers calls that are malformed or of an unknown tool."""
    tasks = itertools.islice(TaskSource.open(TasksSettings(levels=[2, 5])), 200)
    for row in dialogues(tasks):
        check_rollout(row, _Replay(row))


class _Replay:
    """A replacement of python_code_with_standard_io that replays the results of a dialogue."""

    name = PythonCode.name
    schema = PythonCode.schema

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.answers = {}
        for turn, result in itertools.pairwise(row["messages"]):
            if result["role"] == "tool" and not result["content"].startswith(("[mal", "[unk")):
                call = turn["content"].split("<tool_call>")[1].removesuffix("</tool_call>")
                self.answers[json.loads(call)["arguments"]["code"]] = result["content"]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        async def run(arguments: Mapping[str, Any], /) -> ToolOutput:
            return ToolOutput(ToolCallStatus.OK, self.answers[arguments["code"]])

        yield run


def check_rollout(row: Mapping[str, Any], tool: Any) -> None:
    (actual,) = made(SHIPPED, row["messages"], row["tools"])
    stated = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
    turns = [chunks(written(SHIPPED, text.removeprefix("<reason>") + END)) for text in stated]
    rollout = Rollout(
        engine=ScriptedEngine(*turns), chat=SHIPPED, messages=row["messages"][:1], tools=[tool]
    )
    expected = anyio.run(rollout.run)
    assert SHIPPED.decode(actual.ids) == SHIPPED.decode(expected.ids)
    assert (actual.ids, actual.mask) == (expected.ids, expected.mask)


def test_each_question_of_a_chat_is_a_separate_rollout() -> None:
    messages = [
        {"role": "system", "content": "Be terse."},
        USER,
        {"role": "assistant", "content": "1776."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So it is."},
    ]
    first, second = made(FAKE, messages)
    assert first.prompt_ids == FAKE.prompt(messages[:2], [TOOL])
    assert second.prompt_ids == FAKE.prompt(messages[:4], [TOOL])
    assert [t.output_ids for t in second] == [written(FAKE, "So it is." + END)]


def test_last_turn_may_end_with_calls_that_nobody_answers() -> None:
    stated = call_text("look", {"n": 1})
    (actual,) = made(FAKE, [USER, {"role": "assistant", "content": stated}])
    assert actual.ids[len(actual.prompt_ids) :] == written(FAKE, stated + END)


def trained_texts(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return what is trained on of each trajectory."""
    return [
        FAKE.decode([id for id, is_trained in zip(each.ids, each.mask, strict=True) if is_trained])
        for each in trajectories
    ]


def test_messages_of_weight_zero_are_context() -> None:
    first, last = ({"role": "assistant", "content": text} for text in ("BAD", "GOOD"))
    (actual,) = made(FAKE, [USER, {**first, "weight": 0}, USER, {**last, "weight": 1}])
    assert trained_texts([actual]) == [f"GOOD{END}"]
    assert "BAD" in FAKE.decode(actual.prompt_ids)
    assert made(FAKE, [USER, {**first, "weight": 0}]) == []


def test_turns_of_weight_zero_among_calls_are_context() -> None:
    def messages(**weight: int) -> list[Any]:
        wrong, right = calling("a"), calling("b")
        return [USER, {**wrong, **weight}, RESULT, right, RESULT, ANSWER]

    (actual,), (complete,) = made(FAKE, messages(weight=0)), made(FAKE, messages())
    assert actual.ids == complete.ids
    assert sum(actual.mask) == sum(complete.mask) - len(complete.turns[0].output_ids)
    assert [turn.calls for turn in actual] == [turn.calls for turn in complete.turns[1:]]


def test_results_are_paired_with_calls_by_their_ids() -> None:
    results = [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ("a", "b")]
    in_order = made(FAKE, [USER, calling("a", "b"), *results, ANSWER])
    swapped = made(FAKE, [USER, calling("a", "b"), *reversed(results), ANSWER])
    assert [each.ids for each in swapped] == [each.ids for each in in_order]


def test_older_form_of_calls_is_the_same() -> None:
    call = {"name": "look", "arguments": '{"n": 0}'}
    older = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look", "content": "ok"},
        ANSWER,
    ]
    newer = [USER, calling("a"), RESULT, ANSWER]
    assert [each.ids for each in made(FAKE, older)] == [each.ids for each in made(FAKE, newer)]


def test_functions_are_the_older_form_of_tools(tmp_path: Path) -> None:
    path = tmp_path / "dialogues.jsonl"
    rows: list[Any] = [{"tools": [TOOL]}, {"functions": [TOOL["function"]], "tools": None}]
    text = "".join(json.dumps({"messages": [USER, ANSWER], **row}) + "\n" for row in rows)
    path.write_text(text, "utf-8")
    newer, older = read_dialogues(DialoguesSettings(paths=[path]))
    assert newer.tools == older.tools == [TOOL]


@pytest.mark.parametrize("spelled", [END, "<|im_start|>", "<tool_response>"])
def test_text_that_the_model_cannot_sample_is_no_control_token(spelled: str) -> None:
    arguments = {"code": f"{spelled}</tool_call>"}
    calls = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
    ids = FAKE.encode_assistant_turn({"role": "assistant", "content": spelled, "tool_calls": calls})
    controls = [i for i in ids if i in FAKE.tokenizer.get_added_tokens_decoder()]
    assert [FAKE.decode([i]) for i in controls] == ["<tool_call>", "</tool_call>", END]
    assert FAKE.decode(ids).count(spelled) == 2 + (spelled == END)


ANSWER = {"role": "assistant", "content": "1776."}
CALLING = {"role": "assistant", "content": call_text("look", {"n": 0})}
RESULT = {"role": "tool", "content": "ok"}


def calling(*ids: str, arguments: Any = None) -> dict[str, Any]:
    """Return a message with calls of `look` with these ids."""
    calls = [
        {
            "id": id,
            "type": "function",
            "function": {"name": "look", "arguments": arguments or {"n": n}},
        }
        for n, id in enumerate(ids)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def of(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("row", "stated"),
    [
        ("{", "line 3: not JSON"),
        (["a"], "line 3: expected an object"),
        ({}, "line 3: field 'messages': expected a list"),
        ({**of(USER, ANSWER), "tools": ["look"]}, "line 3: field 'tools': expected a list"),
        ({**of(USER, ANSWER), "tools": [{"function": "look"}]}, "line 3: field 'tools': "),
        ({**of(USER, ANSWER), "tools": [{"name": "look", "parameters": 1}]}, "field 'tools': "),
        (of(USER), "field 'messages': the last message must be the assistant's"),
        (of(USER, ANSWER, USER), "the last message must be the assistant's"),
        (of(ANSWER), "messages: at least one message is required"),
        (of(USER, "x"), "messages[1]: expected an object, got 'x'"),
        (of(USER, {"role": "assistant", "content": 7}), "messages[1].content: expected a string"),
        (of(USER, ANSWER, ANSWER), "messages[1]: makes 0 calls, followed by 0 results and another"),
        (of(USER, ANSWER, RESULT, ANSWER), "makes 0 calls, followed by 1 result and another turn"),
        (of(USER, CALLING, ANSWER), "messages[1]: makes 1 call, followed by 0 results and another"),
        (of(USER, CALLING, USER, ANSWER), "messages[1]: makes 1 call, followed by 0 results"),
        (of(USER, CALLING, RESULT), "messages[1]: makes 1 call, followed by 1 result and no turn"),
        (of(USER, CALLING, {"role": "tool", "content": ["ok"]}, ANSWER),
         "messages[2].content[0]: expected a text part"),
        (of(USER, {**ANSWER, "weight": 2}),
         "messages[1].weight: expected 0 (not trained on) or 1, got 2"),
        (of({**USER, "weight": 1}, ANSWER),
         "messages[0].weight: only messages of the assistant are trained on"),
        (of(USER, {**ANSWER, "reasoning_content": "Long ago."}),
         "messages[1].reasoning_content: the model's chat template has no place for it"),
        (of(USER, {**ANSWER, "content": None, "refusal": "No."}),
         "messages[1].refusal: the model's chat template has no place for it"),
        (of(USER, calling("a"), {**RESULT, "tool_call_id": "b"}, ANSWER),
         "messages[2].tool_call_id: 'b' is none of a"),
        (of(USER, calling("a", "b"), *[{**RESULT, "tool_call_id": "a"}] * 2, ANSWER),
         "messages[3].tool_call_id: 'a' has a result already"),
        (of(USER, calling("a", arguments='{"n": ')),
         "messages[1].tool_calls[0].function.arguments: expected an object or its JSON text"),
        (of(USER, {"role": "assistant", "function_call": {"name": "look", "arguments": "[1]"}}),
         "messages[1].function_call.arguments: expected an object or its JSON text"),
    ],
)  # fmt: skip
def test_bad_line_is_named(tmp_path: Path, row: Any, stated: str) -> None:
    path = tmp_path / "dialogues.jsonl"
    good = json.dumps({"messages": [USER, ANSWER]})
    bad = row if isinstance(row, str) else json.dumps(row)
    path.write_text(f"{good}\n\n{bad}\n", "utf-8")
    with pytest.raises(DataError) as error:
        read_samples(FAKE, DialoguesSettings(paths=[path]), max_tokens=1000, say=print)
    assert f"{path}: line 3" in str(error.value)
    assert stated in str(error.value)


def test_samples_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "dialogues.jsonl"
    long = {"role": "assistant", "content": "so " * 200}
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, long]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    data = DialoguesSettings(paths=[path])
    samples, num_left_out = read_samples(FAKE, data, max_tokens=150, say=print)
    assert (len(samples), num_left_out) == (1, 1)
    with pytest.raises(DataError, match=r"data.paths: no dialogue has at most 5 tokens"):
        read_samples(FAKE, data, max_tokens=5, say=print)


def test_long_reading_shows_progress() -> None:
    lines: list[str] = []
    data = DialoguesSettings(teacher=2001)
    samples, _ = read_samples(FAKE, data, max_tokens=100_000, say=lines.append)
    assert len(samples) >= 2001
    assert lines == [f"Reading the dialogues: {number} so far" for number in ("1,000", "2,000")]


def test_steps_keep_to_the_budget_and_epochs_to_the_data() -> None:
    lengths = [3, 4, 5, 20, 6, 2, 7]
    steps = step_plan(lengths, epochs=3, batch_tokens=10, seed=1)
    for epoch in (1, 2, 3):
        observed = [i for at, indices in steps if at == epoch for i in indices]
        assert sorted(observed) == list(range(7))
    for _, indices in steps:
        assert sum(lengths[i] for i in indices) <= 10 or indices == [3]
    assert steps == step_plan(lengths, epochs=3, batch_tokens=10, seed=1)
    orders = {str([i for at, some in steps if at == e for i in some]) for e in (1, 2, 3)}
    assert len(orders) == 3


def test_learning_rate_rises_linearly_and_falls_along_a_cosine() -> None:
    rates = [learning_rate(step, 8, peak=1.0, warmup=0.25) for step in range(1, 9)]
    # 2 of 8 steps rise; then (1 + cos(k pi / 7)) / 2 for k = 1 to 6.
    expected = [0.5, 1.0, 0.950484, 0.811745, 0.611260, 0.388740, 0.188255, 0.049516]
    assert rates == pytest.approx(expected, abs=1e-6)
    assert learning_rate(1, 1, peak=0.3, warmup=0) == pytest.approx(0.15)


class PlayedLearner(FakeLearner):
    """A fake learner whose weights are the list of batches, and whose loss is a checksum of
    them. It dies at step `dies`, counted over all processes."""

    def __init__(self, dies: int = 0) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.weights: list[str] = []
        self.num_steps = self.num_restarts = 0
        self._dies = dies
        self._kept: dict[str, list[str]] = {}
        self._newest: str | None = None

    async def handle(self, op: str, **reported: Any) -> dict[str, Any]:
        self.asked.append((op, reported))
        return self._answer(op, reported, Path(reported.get("folder", "")))

    def _answer(self, op: str, reported: dict[str, Any], folder: Path) -> dict[str, Any]:
        match op:
            case "step":
                return self._step(Path(reported["batch"]).read_bytes(), reported["lr"])
            case "save":
                assert reported["beside"]
                folder.mkdir(parents=True)
                (folder / "state.json").write_text(json.dumps({"state": reported["state"]}))
                self._kept[str(folder)], self._newest = list(self.weights), str(folder)
                return {}
            case "saved":
                return {"folder": self._newest, "writing": None, "failed": None}
            case "load":
                self.weights = list(self._kept[str(folder)])
                return dict(json.loads((folder / "state.json").read_text()))
            case "publish":
                folder.mkdir()
                (folder / "published.json").write_text(json.dumps({"version": reported["version"]}))
                return {}
        raise AssertionError(op)

    def _step(self, batch: bytes, lr: float) -> dict[str, Any]:
        from safetensors.numpy import load

        self.num_steps += 1
        if self.num_steps == self._dies:
            raise LearnerLost("step: rank 1 ended")
        self.weights.append(f"{load(batch)['groups'].tolist()} {lr:.6f}")
        digest = hashlib.sha256(repr(self.weights).encode()).hexdigest()
        return {"loss": int(digest[:6], 16) / 1e6}

    async def restart(self) -> None:
        self.num_restarts += 1
        self.weights, self._newest = [], None


SAMPLES = [Sample([9, n], [0, 1], [0.0, 0.0], 0.0, n) for n in range(5)]
SETTINGS = SupervisedSettings(epochs=2, batch_tokens=4, lr=0.1, warmup=0, checkpoint_every=2)


async def tune(
    folder: RunFolder,
    learner: PlayedLearner,
    stated: RecordedProgress | None = None,
    **changed: Any,
) -> Path:
    samples = changed.pop("samples", SAMPLES)
    emit = changed.pop("emit", ignore)
    settings = SETTINGS.model_copy(update=changed)
    plan = FineTuningPlan(settings, samples, folder)
    return await fine_tune(
        plan, learner, report=stated or RecordedProgress(), max_restarts=1, emit=emit
    )


def losses(folder: RunFolder) -> list[tuple[int, float]]:
    return [(row["step"], row["learner/loss"]) for row in folder.metrics()]


async def test_run_trains_records_and_publishes(tmp_path: Path) -> None:
    learner, stated = PlayedLearner(), RecordedProgress()
    folder = RunFolder(tmp_path / "run", "")
    heard: list[Event] = []
    model = await tune(folder, learner, stated, emit=heard.append)
    assert heard == [Measured(row) for row in folder.metrics()]
    op, published = learner.asked[-1]
    assert (op, published) == ("publish", {"folder": str(model), "version": "sft-6"})
    steps = [reported for op, reported in learner.asked if op == "step"]
    assert [reported["lr"] for reported in steps] == [
        learning_rate(n, 6, peak=0.1, warmup=0) for n in range(1, 7)
    ]
    assert [reported["state"]["step"] for reported in steps] == [0, 1, 2, 3, 4, 5]
    batches = [json.loads(single.rpartition(" ")[0]) for single in learner.weights]
    assert [len(batch) for batch in batches] == [2, 2, 1] * 2
    for epoch in (batches[:3], batches[3:]):
        assert sorted(n for batch in epoch for n in batch) == [0, 1, 2, 3, 4]
    saved = [Path(reported["folder"]).name for op, reported in learner.asked if op == "save"]
    assert saved == ["step-00002", "step-00004"], "the last one is the model"
    metrics = folder.metrics()
    assert [(m["step"], m["epoch"]) for m in metrics] == [(n, 1 + n // 4) for n in range(1, 7)]
    assert list((folder.path / "batches").iterdir()) == []
    assert stated.lines[-1] == f"step 6/6, epoch 2: loss {losses(folder)[-1][1]:.4f}"
    assert (
        stated.statuses[-1].step,
        stated.statuses[-1].num_steps,
        stated.statuses[-1].left_s,
    ) == (6, 6, 0)


@pytest.mark.parametrize("dies", range(1, 7))
async def test_lost_learner_is_restarted_with_the_same_result(tmp_path: Path, dies: int) -> None:
    unbroken, broken = (RunFolder(tmp_path / name, "") for name in ("unbroken", "broken"))
    another, learner, stated = PlayedLearner(), PlayedLearner(dies), RecordedProgress()
    await tune(unbroken, another)
    await tune(broken, learner, stated)
    assert learner.num_restarts == 1
    assert (learner.weights, losses(broken)) == (another.weights, losses(unbroken))
    assert learner.num_steps == 6 + 1 + (dies - 1) % 2, "again, what no checkpoint holds"
    assert not [line for line in stated.lines if "had a loss of" in line]
    assert "The learner was lost; restarting it: step: rank 1 ended" in stated.lines


@pytest.mark.parametrize("dies", range(1, 7))
async def test_resumed_run_has_the_same_result(tmp_path: Path, dies: int) -> None:
    """The resumed run's learner does not die any more."""
    unbroken, broken = (RunFolder(tmp_path / name, "") for name in ("unbroken", "broken"))
    another, learner = PlayedLearner(), PlayedLearner(dies)
    await tune(unbroken, another)
    with pytest.raises(LearnerLost):
        await fine_tune(
            FineTuningPlan(SETTINGS, SAMPLES, broken), learner, report=RecordedProgress()
        )
    await learner.restart()
    model = await tune(broken, learner)
    assert (learner.weights, losses(broken)) == (another.weights, losses(unbroken))
    assert FineTuningPlan(SETTINGS, SAMPLES, broken).model == model, "it is done"
    longer = SETTINGS.model_copy(update={"epochs": 3})
    assert FineTuningPlan(longer, SAMPLES, broken).model is None


async def test_run_cannot_be_resumed_with_other_dialogues(tmp_path: Path) -> None:
    folder, learner = RunFolder(tmp_path / "run", ""), PlayedLearner(dies=4)
    with pytest.raises(LearnerLost):
        await fine_tune(
            FineTuningPlan(SETTINGS, SAMPLES, folder), learner, report=RecordedProgress()
        )
    remaining = [*SAMPLES[:-1], Sample([9, 7], [0, 1], [0.0, 0.0], 0.0, 4)]
    for changed in ({"samples": remaining}, {"seed": 1}, {"batch_tokens": 6}):
        with pytest.raises(RunFolderError, match="the batches up to step 2 would differ"):
            await tune(folder, learner, **changed)
    await tune(folder, learner, epochs=3, lr=0.2)
    assert [step for step, _ in losses(folder)] == list(range(1, 10))


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_damaged_model_is_named(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path / "run", "")
    (folder.path / "model").mkdir()
    (folder.path / "model" / "published.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"published\.json: cannot be read: .*; remove "):
        FineTuningPlan(SETTINGS, SAMPLES, folder)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 3),
)
@settings(deadline=None)
def test_equal_lineages_mean_equal_samples_in_equal_steps(
    lengths: list[int], epochs: int, seed: int
) -> None:
    """Lineages are equal as far as samples and steps are, whatever comes after."""
    samples = [Sample([n] * size, [0] * size, [], 0.0, n) for n, size in enumerate(lengths)]
    plans = [step_plan(lengths, epochs=n, batch_tokens=10, seed=seed) for n in (epochs, epochs + 1)]
    short, long = (lineage(samples, plan) for plan in plans)
    assert long[: len(short)] == short
    assert len(set(long)) == len(long) == len(plans[1]) + 1
    changed = [Sample([*s.ids[:-1], 99], s.mask, [], 0.0, s.group) for s in samples]
    remaining = lineage(changed, plans[1])
    assert remaining[0] == long[0]
    assert not set(remaining[1:]) & set(long)
