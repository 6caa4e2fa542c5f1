"""`agentloop runs view`: folders with a run, an incomplete one, and none; the page as one file."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from agentloop.__main__ import main
from agentloop.cli.runs import view
from agentloop.models import SMALL
from agentloop.observe.sample import SAMPLE
from agentloop.training.run.folder import RunFolder
from tests.agentloop.observe.test_archive import rollout
from tests.support import eventually


def run_in(folder: Path, *, model: str = "") -> Path:
    """Create a run that has ended, with one group and one step."""
    made = RunFolder(folder, f'model = "{model}"\n')
    hostile = rollout("1-a/b: c.0") | {"answer": "</script><script>alert(1)</script><!--"}
    made.add_group(1, [{"group": 1, "version": 0, **hostile}])
    made.add_metrics({"step": 1, "reward": 0.5})
    del made
    gc.collect()  # it holds a lock
    return folder


def bodies(html: Path) -> dict[str, Any]:
    """Return the data that an exported page contains."""
    match = re.search(
        r'<script id="run" type="application/json">(.*?)</script>', html.read_text(), re.DOTALL
    )
    assert match is not None
    bodies: dict[str, Any] = json.loads(match[1])
    return bodies


@pytest.mark.parametrize("existing", ["nothing", "folder", "file", "folder for config"])
def test_folder_without_a_run_is_an_error(
    tmp_path: Path, existing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    if existing.startswith("folder"):
        run.mkdir()
    if existing == "folder for config":
        (run / "config.toml").mkdir()
    if existing == "file":
        run.write_text("")
    assert main(["runs", "view", str(run)]) == 2
    assert main(["runs", "view", str(run), "--export", str(tmp_path / "out.html")]) == 2
    err = capsys.readouterr().err
    assert f"{run} is not a run (no config.toml)" in err
    assert "Traceback" not in err
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    "config", ["model = ", "\x00", b"\xff\xfe", "model = 3", "[chat]\ntemplate = '/no/such'"]
)
def test_settings_that_cannot_be_read_are_named(
    tmp_path: Path, config: str | bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    data = config if isinstance(config, bytes) else config.encode()
    (tmp_path / "config.toml").write_bytes(data)
    assert main(["runs", "view", str(tmp_path), "--export", str(tmp_path / "out.html")]) == 2
    assert "config.toml" in capsys.readouterr().err


@pytest.mark.parametrize("model", [str(SMALL), "/no/such/model"])
def test_run_becomes_one_file(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = run_in(tmp_path / "a run", model=model), tmp_path / "out.html"
    assert main(["runs", "view", str(run), "--export", str(out)]) == 0
    assert "1 rollout with text" in capsys.readouterr().out
    contents = bodies(out)
    # By the paths that the page asks for, encoded as JavaScript does it.
    assert {*contents} == {
        "api/frame", "api/runs", "api/curves?run=a%20run", "api/groups/1-a%2Fb%3A%20c",
        "api/rollouts/1-a%2Fb%3A%20c.0",
    }  # fmt: skip
    assert contents["api/frame"]["about"]["kind"] == "view"
    assert contents["api/frame"]["about"]["title"] == "a run"
    assert contents["api/rollouts/1-a%2Fb%3A%20c.0"]["answer"].startswith("</script>")
    html = out.read_text()
    assert "<script>alert" not in html
    assert not re.search(r'(?:src|href)="(?:page/|https?:)', html)


def test_runs_timelines_become_a_file_for_perfetto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = run_in(tmp_path / "a run"), tmp_path / "trace.json"
    assert main(["runs", "view", str(run), "--perfetto", str(out)]) == 0
    assert "1 rollout; open it at https://ui.perfetto.dev" in capsys.readouterr().out
    trace = json.loads(out.read_text())
    assert [event["name"] for event in trace["traceEvents"]][:3] == [
        "process_name", "thread_name", "rollout",
    ]  # fmt: skip
    assert main(["runs", "view", str(run), "--perfetto", str(tmp_path / "no" / "t.json")]) == 2
    assert "--perfetto: " in capsys.readouterr().err


def test_page_shows_the_settings_without_secrets(tmp_path: Path) -> None:
    config = """model = "m"
[fleet]
redis = "redis://:sesame@db/0"
[mcp.a]
env = {KEY = "sesame"}
[mcp.a.headers]
Authorization = "Bearer sesame"
[env]
name = "python-math"
"""
    (tmp_path / "config.toml").write_text(config)
    out = tmp_path / "out.html"
    assert main(["runs", "view", str(tmp_path), "--export", str(out)]) == 0
    assert "sesame" not in out.read_text()
    settings = bodies(out)["api/frame"]["about"]["settings"]
    assert 'redis = "redis://...@db/0"' in settings
    assert settings.endswith('[env]\nname = "python-math"')


def test_run_without_anything_in_it_is_an_empty_page(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    out = tmp_path / "out.html"
    assert main(["runs", "view", str(tmp_path), "--export", str(out)]) == 0
    assert bodies(out)["api/frame"]["rollouts"] == []


def test_damaged_rollout_is_left_out_of_the_file(tmp_path: Path) -> None:
    run, out = run_in(tmp_path / "run"), tmp_path / "out.html"
    broken = rollout("2-x.0") | {"group": 2}
    broken["trajectory"]["turns"][0]["end"] = "nowhere"
    lines = [json.dumps(broken), json.dumps(rollout("2-x.1") | {"group": 2}), "{"]
    (run / "trajectories" / "group-0000002.jsonl").write_text("\n".join(lines))
    assert main(["runs", "view", str(run), "--export", str(out)]) == 0
    contents = bodies(out)
    assert "api/rollouts/2-x.1" in contents
    assert "api/rollouts/2-x.0" not in contents


@pytest.mark.parametrize("number", [0, 1])
def test_so_many_texts_are_in_the_file_the_newest(tmp_path: Path, number: int) -> None:
    run, out = run_in(tmp_path / "run"), tmp_path / "out.html"
    lines = [json.dumps(rollout("2-x.1", created_s=500.0) | {"group": 2})]
    (run / "trajectories" / "group-0000002.jsonl").write_text("\n".join(lines))
    assert main(["runs", "view", str(run), "--export", str(out), "--rollouts", str(number)]) == 0
    texts = [path for path in bodies(out) if path.startswith("api/rollouts/")]
    assert texts == ["api/rollouts/2-x.1"][:number]


def test_without_a_terminal_little_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = run_in(tmp_path / "run"), tmp_path / "out.html"
    lines = [json.dumps(rollout(f"2-x.{number}") | {"group": 2}) for number in range(50)]
    (run / "trajectories" / "group-0000002.jsonl").write_text("\n".join(lines))
    assert main(["runs", "view", str(run), "--export", str(out)]) == 0
    assert len(capsys.readouterr().err.splitlines()) < 10


def test_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "run")
    assert main(["runs", "view", str(run), "--export", str(tmp_path / "no" / "out.html")]) == 2
    assert "--export: " in capsys.readouterr().err


def test_number_below_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["runs", "view", str(tmp_path), "--rollouts", "-1"])


async def test_run_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in(tmp_path / "run", model="/no/such/model")
    output = ""

    def is_shown() -> bool:
        nonlocal output
        output += capsys.readouterr().out
        return "Showing run at" in output

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(view._view, tmp_path / "run", ["serve.port=0"])
        await eventually(is_shown)
        match = re.search(r"http://\S+?(?=/;)", output)
        assert match is not None
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{match[0]}/") as response:
                assert response.status == 200
            async with http.get(f"{match[0]}/api/frame") as response:
                frame = await response.json()
            assert (frame["about"]["can_ask"], frame["about"]["controls"]) == (False, [])
            for path, body in (("ask", {"question": "?"}), ("control", {"do": "pause"})):
                async with http.post(f"{match[0]}/api/{path}", json=body) as response:
                    assert response.status in (400, 403)
        tasks.cancel_scope.cancel()


def test_sample_is_a_finished_run_with_timings(tmp_path: Path) -> None:
    out = tmp_path / "sample.html"
    assert main(["runs", "view", "--sample", "--export", str(out)]) == 0
    contents = bodies(out)
    state = contents["api/frame"]["now"]
    assert state["ended"]["state"] == "finished"
    assert state["step"] == state["num_steps"]
    assert state["spent"]["sentence"]
    assert state["learning"]["text"].startswith("held out 0.50 -> 0.")
    assert sum(state["spent"]["seconds"].values()) == pytest.approx(
        state["spent"]["window_s"], abs=0.1
    )
    texts = [body for path, body in contents.items() if path.startswith("api/rollouts/")]
    assert any(turn["calls"] for body in texts for turn in body["turns"])


def test_sample_is_small_and_names_no_machine() -> None:
    files = [path for path in SAMPLE.rglob("*") if path.suffix in (".toml", ".jsonl")]
    assert 0 < sum(path.stat().st_size for path in files) < 1_000_000
    assert not re.search(r"/(tmp|home|root|work)/", (SAMPLE / "config.toml").read_text())


def test_run_or_the_sample_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["runs", "view"])
    assert "or --sample" in capsys.readouterr().err
