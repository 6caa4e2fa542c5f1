"""A run's folder as the page shows it, with any contents."""

from __future__ import annotations

import json
import os
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest

from agentloop.errors import NotThere
from agentloop.observe import archive as archive_module
from agentloop.observe import runs as runs_module
from agentloop.observe.archive import Archive
from agentloop.observe.runs import Origin, curves, origin_of, read_metrics, runs_beside
from agentloop.rollouts.record import ConversationRow, NoReward, TokenCredit
from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import (
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
)
from tests.patience import patient
from tests.support import END, chat_format, written

CHAT = chat_format()


def rollout(key: str, *, reward: float | None = 1.0, created_s: float = 100.0) -> dict[str, Any]:
    """Return a row as the training loop writes it."""
    call = ToolCall("c", "python", {"n": 2**70}, "", 0, 1)
    ids = [written(CHAT, text + END) for text in ("<tool_call>{}</tool_call>", "it is 42")]
    turns = [
        Turn(
            ids[0], [-0.5] * len(ids[0]), end=TurnEnd.STOP, calls=[call],
            results=[ToolResult("c", "python", ToolCallStatus.ERROR, "no", 0.25, 0.5, 1.0)],
            observation_ids=written(CHAT, "no"), servers=["http://a"], started_s=0.0,
            first_token_s=0.125, generated_s=0.25, ended_s=1.0,
        ),
        Turn(
            ids[1], [-0.5] * len(ids[1]), end=TurnEnd.STOP, servers=["http://a", "http://b"],
            started_s=1.0, first_token_s=1.5, generated_s=2.0, ended_s=2.0,
        ),
    ]  # fmt: skip
    made = Trajectory(key, written(CHAT, "why?"), turns, StopReason.ANSWERED, None, created_s, 2.0)
    return ConversationRow(
        task="a/b", rollout=0, reward=reward, answer="42", reason="the same",
        credit=TokenCredit(0.5, 1.0) if reward else None, dropped=None if reward else "no_reward",
        no_reward=None if reward else NoReward.STOPPED, trajectory=made,
    ).to_dict()  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with two groups of two rollouts and two steps."""
    folder = RunFolder(tmp_path / "runs" / "one", "")
    for number in (1, 2):
        rows = [
            rollout(f"{number}-a/b.0", created_s=100.0 + number),
            rollout(f"{number}-a/b.1", reward=None, created_s=100.0 + number),
        ]
        add(folder, number, rows)
    for step in (1, 2):
        folder.add_metrics({"step": step, "reward": step / 4, "version": step - 1})
    return folder


def add(folder: RunFolder, number: int, rows: list[dict[str, Any]]) -> None:
    folder.add_group(number, [{"group": number, "version": 0, **row} for row in rows])


def archive(run: RunFolder) -> Archive:
    return Archive(run.path, {"kind": "view", "title": run.path.name}, CHAT)


async def test_run_is_shown_as_it_was(run: RunFolder) -> None:
    frame = await archive(run).frame()
    assert frame["full"] is True
    assert (frame["about"]["live"], frame["about"]["t0"]) == (False, 101.0)
    assert [row["id"] for row in frame["rollouts"]] == ["1-a/b.0", "1-a/b.1", "2-a/b.0", "2-a/b.1"]
    row = frame["rollouts"][2]
    assert (row["start"], row["end"]) == (1000, 3000)
    assert [(lane, at) for lane, at in row["lanes"]] == [
        ("wait", 1000), ("prefill", 1125), ("decode", 1125), ("tool", 1250),
        ("wait", 2000), ("prefill", 2500), ("decode", 2500),
    ]  # fmt: skip
    assert (row["calls"], row["failed_calls"], row["turn"]) == (1, 1, 2)
    assert row["server"] == "http://b"
    group = frame["groups"][0]
    assert (group["id"], group["task"], group["size"]) == ("1-a/b", "a/b", 2)
    assert (group["mean_reward"], group["kept"], group["has_signal"]) == (1.0, 1, True)
    assert [row["step"] for row in frame["steps"]] == [1, 2]
    assert (frame["now"]["step"], frame["now"]["policy_version"]) == (2, "1")
    orjson.dumps(frame)


async def test_run_says_what_its_time_was_spent_on(run: RunFolder) -> None:
    run.add_metrics({"step": 3, "learn_s": 4.0, "sync_s": 0.0})
    row = rollout("9-a/b.0", created_s=112.0)
    row["trajectory"]["turns"][1]["placed_s"] = 1.25
    add(run, 9, [row])
    spent = (await archive(run).frame())["now"]["spent"]
    # Of 13 s, rollouts ran for 5 and the learner for 4; the rest is not known.
    assert spent["window_s"] == 9.0
    assert spent["seconds"]["learner"] == 4.0
    assert sum(spent["seconds"].values()) == pytest.approx(9.0, abs=0.01)
    assert spent["seconds"]["tool"] == pytest.approx(2 * spent["seconds"]["queue"])
    assert spent["sentence"].startswith("Servers wait for the learner: 4.0 of 9.0 s")


async def test_step_that_has_published_has_the_next_version(run: RunFolder) -> None:
    """Also if no folder has its weights, as with weights.transport=broadcast."""
    run.add_metrics({"step": 3, "version": 6, "weights/publish_s": 0.1})
    assert (await archive(run).frame())["now"]["policy_version"] == "7"


async def test_run_has_the_percentiles_of_all_its_turns_and_calls(run: RunFolder) -> None:
    add(run, 9, [row := rollout("9-a/b.0")])
    latency = (await archive(run).frame())["now"]["latency"]
    assert "window_s" not in latency  # of the whole run
    turns = [turn for turn in row["trajectory"]["turns"] if turn["first_token_s"] is not None]
    assert latency["of"]["first_token"]["num"] >= len(turns)
    assert latency["of"]["call"]["p50"] > 0


async def test_supervised_start_is_shown_and_compared(run: RunFolder) -> None:
    before = (await archive(run).frame())["steps"]
    RunFolder(run.path / "sft").add_metrics({"step": 1, "learner/loss": 2.0})
    expected = [{"start/step": 1, "start/learner/loss": 2.0}, *before]
    assert (await archive(run).frame())["steps"] == expected
    assert (await archive(run).curves(run.path.name))["rows"] == expected


async def test_rollouts_and_groups_can_be_opened(run: RunFolder) -> None:
    at = archive(run)
    rollout = await at.rollout("1-a/b.0")
    assert (rollout["group"], rollout["task"], rollout["reward"], rollout["state"]) == (
        "1-a/b", "a/b", 1.0, "done",
    )  # fmt: skip
    assert rollout["prompt"] == "why?"
    assert ["".join(turn["pieces"]) for turn in rollout["turns"]] == [
        f"<tool_call>{{}}</tool_call>{END}", f"it is 42{END}",
    ]  # fmt: skip
    assert [event async for event in at.rollout_events("1-a/b.0")] == [("end", rollout)]
    group = await at.group("1-a/b")
    assert group["prompt"] == "why?"
    assert [(row["id"], row["kept"], row["dropped"]) for row in group["rollouts"]] == [
        ("1-a/b.0", True, None), ("1-a/b.1", False, "no_reward"),
    ]  # fmt: skip
    assert [row["no_reward"] for row in group["rollouts"]] == [None, "stopped"]
    assert (await at.rollout("1-a/b.1"))["no_reward"] == "stopped"


async def test_other_run_is_read_by_the_same_task(run: RunFolder) -> None:
    second = RunFolder(run.path.with_name("two"), "")
    second.add_metrics({"step": 1, "reward": 0.5})
    add(second, 7, [{**rollout("7-a/b.0"), "parts": {"found": 0.5}}])
    add(second, 8, [{**rollout("8-c.0"), "task": "c"}])
    shown = Archive(run.path, {}, CHAT, open_run=lambda folder: Archive(folder, {}, CHAT))
    group = await shown.group("two//1-a/b")
    assert group["id"] == "two//7-a/b"
    assert [(row["id"], row["parts"]) for row in group["rollouts"]] == [
        ("two//7-a/b.0", {"found": 0.5})
    ]
    member = await shown.rollout("two//7-a/b.0")
    assert (member["id"], member["group"]) == ("two//7-a/b.0", "two//7-a/b")
    assert member["parts"] == {"found": 0.5}
    add(run, 9, [{**rollout("9-d.0"), "task": "d"}])
    with pytest.raises(NotThere, match="two has no rollout of this task"):
        await shown.group("two//9-d")
    for name in ("..//1-a/b", "one//1-a/b", "nosuch//1-a/b"):
        with pytest.raises(NotThere, match="not found"):
            await shown.group(name)


async def test_endpoints_answer_is_shown_without_ids(run: RunFolder) -> None:
    turn = Turn(text="<think>Hm.</think>\nit is 42", end=TurnEnd.STOP, generated_s=1.0, ended_s=1.0)
    made = Trajectory("3-c.0", [], [turn], StopReason.ANSWERED, None, 100.0, 1.0)
    add(run, 3, [rollout("3-c.0") | {"trajectory": made.to_dict(), "figures": {"num_tokens": 59}}])
    at = archive(run)
    assert (await at.frame())["rollouts"][-1]["tokens"] == 59
    assert (await at.rollout("3-c.0"))["turns"][0]["pieces"] == [
        "<think>", "Hm.", "</think>", "\nit is 42",
    ]  # fmt: skip


async def test_tokens_of_another_agent_are_unknown(run: RunFolder) -> None:
    """`figures` are those of the sample, which the model under evaluation has generated."""
    turn = Turn(text="e4", end=TurnEnd.STOP, generated_s=1.0, ended_s=1.0)
    messages: list[Any] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "e4"}]
    made = Trajectory("3-c.0+x", [], [turn], StopReason.ANSWERED, None, 100.0, 1.0, "e4", messages)
    row = rollout("3-c.0") | {"trajectory": made.to_dict(), "figures": {"num_tokens": 59}}
    add(run, 3, [row])
    at = archive(run)
    assert (await at.frame())["rollouts"][-1]["tokens"] is None
    assert (await at.rollout("3-c.0+x"))["prompt"] == "user: ?"


async def test_without_a_model_text_is_shown_by_turn(run: RunFolder) -> None:
    at = Archive(run.path, {}, None)
    rollout = await at.rollout("1-a/b.0")
    assert len(rollout["turns"][0]["pieces"]) == len(rollout["turns"][0]["ids"])
    assert (await at.group("1-a/b"))["prompt"] == ""


STRANGE = [
    "", ".", "..", "1", "1.0", "1-", "1-a", "1-a/b", "1-a/b.", "1-a/b.2", "1-a/b.00", "9-a/b.0",
    "../../etc/passwd", "../../../1-a/b.0", "1/../1-a/b.0", "1-a/b.0\0", "\0", "-1-a.0",
    "\N{SUPERSCRIPT TWO}-a.0", "٣-a.0", "9" * 5000 + "-a.0", "9" * 300 + "-a.0", "1-a/b.0/..",
    "*-a.0", "1-a/b.\udcff", "0000001-a/b.0.0",
]  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
async def test_invalid_names_are_not_found(run: RunFolder, name: str) -> None:
    at = archive(run)
    with pytest.raises(NotThere):
        await at.rollout(name)
    with pytest.raises(NotThere):
        await anext(at.rollout_events(name))
    if name != "1-a/b":
        with pytest.raises(NotThere):
            await at.group(name)
    with pytest.raises(NotThere):
        await at.curves(name)


def damaged_lines() -> list[bytes]:
    good = rollout("3-c.0") | {"group": 3}
    trajectory = good["trajectory"]
    rows: list[Any] = [
        None, 1, [], "x", {}, {"trajectory": None}, {"trajectory": []}, good | {"trajectory": {}},
        {key: value for key, value in good.items() if key != "rollout"},
        good | {"trajectory": trajectory | {"id": 5}},
        good | {"trajectory": trajectory | {"turns": None}},
        good | {"trajectory": trajectory | {"turns": [{}]}},
        good | {"trajectory": trajectory | {"turns": [{**trajectory["turns"][0], "end": "x"}]}},
        good | {"trajectory": trajectory | {"created_unix_s": "soon"}},
        good | {"trajectory": trajectory | {"elapsed_s": None}},
        good | {"reward": "much"},
    ]  # fmt: skip
    text = json.dumps(good).encode()
    lines = [text[: len(text) // 2], b"", b"\x00\xff", b"{}}", b"[" * 5000]
    return [*lines, *(json.dumps(row).encode() for row in rows)]


@pytest.mark.parametrize("line", damaged_lines(), ids=lambda line: line[:30])
async def test_only_a_damaged_line_is_skipped(run: RunFolder, line: bytes) -> None:
    good = json.dumps(rollout("3-c.1") | {"group": 3}).encode()
    path = run.path / "trajectories" / "group-0000003.jsonl"
    path.write_bytes(line + b"\n" + good + b"\n")
    at = archive(run)
    frame = await at.frame()
    assert [row["id"] for row in frame["rollouts"]][4:] == ["3-c.1"]
    assert [row["id"] for row in (await at.group("3-c"))["rollouts"]] == ["3-c.1"]
    with pytest.raises(NotThere):
        await at.rollout("3-c.0")
    assert (await at.rollout("3-c.1"))["id"] == "3-c.1"


async def test_empty_folder_is_an_empty_page(tmp_path: Path) -> None:
    at = Archive(tmp_path / "gone", {}, CHAT)
    frame = await at.frame()
    assert (frame["rollouts"], frame["groups"], frame["steps"]) == ([], [], [])
    assert frame["now"] == {}
    async with aclosing(at.frames()) as frames:
        assert orjson.loads((await anext(frames))[1])["full"] is True
    assert await at.runs() == []


async def test_unrelated_files_are_ignored(run: RunFolder) -> None:
    folder = run.path / "trajectories"
    (folder / "group-x.jsonl").write_text("{}\n")
    (folder / "group-0000009.jsonl").mkdir()
    (folder / ".group-0000004.jsonl.partial").write_text("{")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 3\nnull\n{"step": 4}\n{"step": 5')
    frame = await archive(run).frame()
    assert len(frame["rollouts"]) == 4
    assert [row["step"] for row in frame["steps"]] == [1, 2, 4]


async def test_running_run_is_read_again(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "_LOOK_EVERY_S", 0.001)
    at = archive(run)

    async def next_frame() -> dict[str, Any]:
        with anyio.fail_after(patient(15)):
            decoded: dict[str, Any] = orjson.loads((await anext(frames))[1])
            return decoded

    async with aclosing(at.frames()) as frames:
        assert len((await next_frame())["rollouts"]) == 4
        add(run, 3, [rollout("3-c.0", created_s=90.0)])
        frame = await next_frame()
        assert frame["full"] is True
        assert [row["id"] for row in frame["rollouts"]][-1] == "3-c.0"
        assert frame["about"]["t0"] == 90.0
        assert min(row["start"] for row in frame["rollouts"]) == 0
        run.add_metrics({"step": 3})
        assert (await next_frame())["now"]["step"] == 3


async def test_newest_groups_are_shown(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "_MAX_ROLLOUTS", 3)
    assert {row["group"] for row in (await archive(run).frame())["rollouts"]} == {"2-a/b"}


# --- runs beside ----------------------------------------------------------------------------------


def test_runs_are_listed_newest_first(run: RunFolder) -> None:
    beside = run.path.parent
    for name in ("two", ".hidden", "odd name & more"):
        (beside / name).mkdir()
        (beside / name / "metrics.jsonl").write_text('{"step": 7}\n{"step": ')
    (beside / "latest").symlink_to("one")
    (beside / "three" / "metrics.jsonl").mkdir(parents=True)
    (beside / "empty").mkdir()
    (beside / "none").mkdir()
    (beside / "none" / "metrics.jsonl").write_text("")
    (beside / "nonsense").mkdir()
    (beside / "nonsense" / "metrics.jsonl").write_text('[]\n{"step": "x"}\n{"step": null}\n')
    runs = {listed["name"]: listed for listed in runs_beside(run.path)}
    assert {name: listed["steps"] for name, listed in runs.items()} == {
        "one": 2, "two": 7, "odd name & more": 7, "none": 0, "nonsense": 0,
    }  # fmt: skip
    assert [name for name, listed in runs.items() if listed["current"]] == ["one"]
    times = [listed["modified_unix_s"] for listed in runs_beside(run.path)]
    assert times == sorted(times, reverse=True)
    assert curves(run.path, "odd name & more")["rows"] == [{"step": 7}]


@pytest.mark.parametrize("name", ["", ".", "..", "../runs/one", "/", "latest", "one/", ".hidden"])
def test_only_listed_runs_are_read(run: RunFolder, name: str) -> None:
    (run.path.parent / ".hidden").mkdir()
    (run.path.parent / ".hidden" / "metrics.jsonl").write_text('{"step": 7}\n')
    (run.path.parent / "latest").symlink_to("one")
    with pytest.raises(NotThere):
        curves(run.path, name)


def test_last_metrics_rows_are_read(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_MAX_ROWS", 1)
    assert [row["step"] for row in read_metrics(run.path)] == [2]


def test_run_itself_is_always_listed(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_MAX_RUNS", 1)
    (run.path.parent / "newer").mkdir()
    newer = run.path.parent / "newer" / "metrics.jsonl"
    newer.write_text('{"step": 7}\n')
    os.utime(newer, (4_000_000_000, 4_000_000_000))
    assert [row["step"] for row in curves(run.path, "one")["rows"]] == [1, 2]


def test_commands_that_made_a_run_have_their_ends(run: RunFolder) -> None:
    assert origin_of(run.path) == Origin(settings="", commands=[])
    path = run.path / "commands.jsonl"
    path.write_text('{"command": "a"}\n{"command": "b"}\n{"ended_unix_s": 3.0}\n[]\nnonsense\n')
    (run.path / "config.toml").write_text('redis = "redis://:sesame@db"\n')
    assert origin_of(run.path) == {
        "settings": 'redis = "redis://...@db"',
        "commands": [{"command": "a"}, {"command": "b", "ended_unix_s": 3.0}],
    }


async def test_policy_version_is_newest_published(run: RunFolder) -> None:
    run.add_metrics({"step": 2, "version": "1"})
    (run.path / "weights" / "2").mkdir(parents=True)
    assert (await archive(run).frame())["now"]["policy_version"] == "2"


@pytest.mark.parametrize("damage", [None, b"{", b'{"all": 1}'])
async def test_evaluation_shows_its_results(run: RunFolder, damage: bytes | None) -> None:
    run.add_metrics({"step": 1, "group": "g", "reward": 1.0})
    results = {
        "num_samples": 2,
        "all": {
            "num_tasks": 9,
            "num_missing": 1,
            "avg_at_k": {"value": 2 / 3, "low": 0.5, "high": 0.8},
        },
    }
    (run.path / "results.json").write_bytes(damage or orjson.dumps(results))
    values = (await archive(run).frame())["now"].get("values")
    if damage:
        assert values is None
    else:
        assert values == {"avg@2": "0.667 [0.500, 0.800]", "tasks": "9", "missing samples": "1"}
