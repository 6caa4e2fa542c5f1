"""`python -m bench check`: what counts as a fall, and one check from benchmark to verdict."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.check import BASELINES, CHECKS, Check, fallen, main, medians, to_toml

figures = st.dictionaries(
    st.text("of a plain loop's", min_size=1), st.floats(0.01, 100), min_size=1
)


@given(figures, st.data())
def test_figure_falls_by_more_than_a_tenth(before: dict[str, float], data: st.DataObject) -> None:
    falls = {name: data.draw(st.booleans()) for name in before}
    current = {name: value * (0.89 if falls[name] else 0.91) for name, value in before.items()}
    assert fallen(before, current) == [name for name in before if falls[name]]


def test_figure_that_is_missing_fell() -> None:
    assert fallen({"a": 1.0, "b": 2.0}, {"a": 5.0, "new": 0.1}) == ["b"]


@given(st.dictionaries(st.sampled_from(list(CHECKS)), figures))
def test_file_holds_what_was_written(baselines: dict[str, dict[str, float]]) -> None:
    read = tomllib.loads(to_toml(baselines))
    assert read.keys() == baselines.keys()
    for name, row in baselines.items():
        assert read[name] == pytest.approx(row, abs=0.001)


def test_each_check_has_its_baselines() -> None:
    assert tomllib.loads(BASELINES.read_text()).keys() == CHECKS.keys()
    assert medians([{"a": 3.0}, {"a": 1.0}, {"a": 2.0}]) == {"a": 2.0}


def test_fall_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The simulation of the router takes no real servers, and gives the same figures each time."""
    on_file = tomllib.loads(BASELINES.read_text())
    (goodput,) = (name for name in on_file["router"] if "goodput" in name)
    on_file["router"][goodput] *= 2
    file = tmp_path / "baselines.toml"
    file.write_text(to_toml(on_file))
    small = ["bench.router", "--servers", "2", "--seeds", "1", "--policies", "cache_aware,kv"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHECKS, "router", Check(small, CHECKS["router"].read))
        assert main(["check", "--only", "router", "--baselines", str(file)]) == 1
    assert capsys.readouterr().out.endswith(f"Fell by more than 10%: router: {goodput}\n")
