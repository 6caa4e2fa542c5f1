"""Answers of a service, read back from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import Trajectory
from tests.agentloop.serving.test_app import HELLO, THEIRS, client, says, service
from tests.agentloop.serving.test_bare_model import open_session, trajectories
from tests.support import call_text


def groups(folder: RunFolder) -> list[list[dict[str, Any]]]:
    paths = sorted((folder.path / "trajectories").glob("group-*.jsonl"))
    return [folder.read_group(str(path.relative_to(folder.path))) for path in paths]


async def test_session_is_recorded_when_it_is_closed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "")
    async with service(says("one"), says("two"), record=folder) as at:
        async with open_session(at) as session:
            for _ in range(2):
                async with at.http.post(
                    f"{session['base_url']}/chat/completions", json={"messages": HELLO}
                ) as answer:
                    assert answer.status == 200
            served = await trajectories(at, session)
            assert groups(folder) == []
    ((first, second),) = groups(folder)
    for row, line in zip((first, second), served, strict=True):
        assert row["served_id"] == line["id"]
        record = Trajectory.from_dict(row["trajectory"] | {"id": line["id"]})
        assert record.to_dict_per_token() == line
    assert second["branch"] == "the same history was asked again"
    assert (first["question"], first["answer"], second["answer"]) == ("hello", "one", "two")


async def test_open_session_is_recorded_when_the_service_ends(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "")
    async with service(says("one"), record=folder) as at:
        async with at.post("/v1/sessions", {}) as response:
            session = await response.json()
        async with at.http.post(
            f"{session['base_url']}/chat/completions", json={"messages": HELLO}
        ) as answer:
            assert answer.status == 200
    ((row,),) = groups(folder)
    assert (row["session"], row["answer"]) == (session["name"], "one")


async def test_branch_after_a_tool_response_keeps_its_question(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "")
    call = call_text("theirs", {"n": 1})
    async with service(says(call), says("x"), says("y"), record=folder) as at:
        async with open_session(at) as session:

            async def ask(*messages: Any) -> Any:
                async with at.http.post(
                    f"{session['base_url']}/chat/completions",
                    json={"messages": messages, "tools": [THEIRS]},
                ) as answer:
                    return (await answer.json())["choices"][0]["message"]

            called = await ask(*HELLO)
            response = {
                "role": "tool",
                "tool_call_id": called["tool_calls"][0]["id"],
                "content": "1",
            }
            for _ in range(2):
                await ask(*HELLO, called, response)
    ((first, second),) = groups(folder)
    assert (first["question"], second["question"]) == ("hello", "hello")
    assert (first["answer"], second["answer"]) == ("x", "y")
    assert second["parent"] == first["trajectory"]["id"]


async def test_answers_of_the_agent_are_recorded_with_their_siblings(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "")
    turns = [says(text) for text in ("a", "a", "b", "c", "c", "d", "e")]
    async with service(*turns, record=folder) as at, client(at) as asks:
        await asks.chat.completions.create(model="fake-agent", messages=HELLO, n=2)
        await asks.chat.completions.create(model="fake", messages=HELLO)
        async with at.post("/v1/rollouts", {"prompts": ["x"], "n": 2}) as response:
            lines = [json.loads(line) for line in (await response.text()).splitlines()]
        async with at.post("/api/ask", {"question": "y"}) as response:
            assert response.status == 200
            rollout = (await response.json())["rollout"]
        async with at.http.get(f"{at.url}/api/rollouts/{rollout}/stream") as response:
            await response.text()  # until its end
    recorded = groups(folder)
    assert [[row["answer"] for row in group] for group in recorded[:2]] == [["a", "a"], ["b"]]
    assert [group[0]["model"] for group in recorded[:2]] == ["fake-agent", "fake"]
    assert {row["served_id"] for row in recorded[2]} == {line["trajectory"]["id"] for line in lines}
    assert [row["question"] for row in recorded[2]] == ["x", "x"]
    ((last),) = recorded[3]
    assert (last["served_id"], last["question"], last["answer"]) == (rollout, "y", "d")
