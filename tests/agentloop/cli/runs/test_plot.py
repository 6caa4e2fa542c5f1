"""`agentloop runs plot`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentloop.__main__ import main

pytestmark = pytest.mark.timeout(120)  # on a new machine matplotlib looks for fonts first


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    rows = [{"step": step, "reward": 0.5} for step in range(3)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "run"


@pytest.mark.full
def test_without_a_place_there_are_both_kinds_here(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    assert main(["runs", "plot", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == ["plots.png", "plots.svg"]
    assert (run.parent / "plots.svg").read_text().startswith("<?xml")


def test_damage_is_reported_and_the_rest_is_plotted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    assert main(["runs", "plot", str(run), "--out", str(run.parent / "a.svg")]) == 0
    # On a busy machine a line about the progress comes first.
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line == f"{run}: metrics.jsonl: line 4 cannot be read"


def test_places_and_things_are_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.parent / "a.svg"
    assert main(["runs", "plot", str(run), str(run), "--out", str(out), "--what", "reward"]) == 0
    assert out.exists()
    assert main(["runs", "plot", str(run), "--out", str(out), "--what", "reward,wishes"]) == 2
    assert "--what: wishes: these runs have no such metric" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["runs", "plot", str(run), "--what", ","])
