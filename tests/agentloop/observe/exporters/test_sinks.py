"""Metrics sinks: their failures do not affect the run, and secrets are masked."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.errors import SettingsError
from agentloop.events import Measured, RolloutAbandoned
from agentloop.observe.exporters.sinks import Sink, Sinks, SinksSettings, mask_secrets
from tests.agentloop.observe import story
from tests.patience import patient
from tests.support import eventually

BOTH = SinksSettings(report_to=("trackio", "wandb"))


class SmallSinks(Sinks):
    MAX_WAITING = 3
    CLOSE_S = 15.0


class ImpatientSinks(SmallSinks):
    CLOSE_S = 0.2


class Fake:
    """Records its calls; `at` names the method that raises or hangs."""

    def __init__(self, at: str = "", error: BaseException | None = None) -> None:
        self.at, self.error = at, error
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.told: list[Any] = []
        self.threads: set[int] = set()

    def _do(self, method: str, argument: Any) -> None:
        self.threads.add(threading.get_ident())
        if method == self.at:
            self.reached.set()
            if self.error is not None:
                raise self.error
            assert self.gate.wait(patient(15))
        self.told.append((method, argument))

    @property
    def steps(self) -> list[int]:
        return [argument[0] for method, argument in self.told if method == "log"]

    def start(self, run_name: str, config: Mapping[str, Any]) -> None:
        self._do("start", (run_name, config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._do("log", (step, dict(values)))

    def close(self) -> None:
        self._do("close", None)


def open_sinks(
    folder: Path, trackio: Sink, wandb: Sink, sinks: type[Sinks] = SmallSinks, **config: Any
) -> Any:
    return sinks.open(
        BOTH,
        folder=folder,
        run_name="a-run",
        config=config,
        make=lambda name, settings, folder: {"trackio": trackio, "wandb": wandb}[name],
    )


def rows(*steps: int) -> list[Measured]:
    return [Measured({"step": step, "reward": step / 10}) for step in steps]


async def test_sink_gets_the_numbers(tmp_path: Path) -> None:
    first, second = Fake(), Fake()
    row = {"step": 3, "reward": 0.5, "stage": 1, "name": "x", "none": None, "is": True, "list": [1]}
    async with open_sinks(tmp_path, first, second, loop={"steps": 4}) as sinks:
        sinks.on_event(RolloutAbandoned("r"))
        sinks.on_event(Measured(row | {"nan": math.nan, "inf": -math.inf}))
        sinks.on_event(Measured({"step": 3, "held_out/reward": 1.0}))
        sinks.on_event(Measured({"step": 4, "name": "nothing to draw"}))
    expected = [
        ("start", ("a-run", {"loop": {"steps": 4}})),
        ("log", (3, {"reward": 0.5, "stage": 1})),
        ("log", (3, {"held_out/reward": 1.0})),
        ("close", None),
    ]
    assert first.told == second.told == expected
    assert threading.get_ident() not in first.threads | second.threads
    assert first.threads.isdisjoint(second.threads)
    assert sinks.num_dropped == 0


async def test_slow_sink_blocks_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow, healthy = Fake("log"), Fake()
    async with open_sinks(tmp_path, slow, healthy) as sinks:
        for row in rows(1):
            sinks.on_event(row)
        await eventually(slow.reached.is_set)
        for row in rows(2, 3, 4, 5, 6):  # three of them may wait
            sinks.on_event(row)
            await eventually(lambda step=row.row["step"]: step in healthy.steps)  # type: ignore[misc]
        assert sinks.num_dropped == 2
        slow.gate.set()
    assert slow.steps == [1, 2, 3, 4]
    assert (
        "rows of metrics for trackio: dropped 1 (1 in total): 3 rows are already queued"
        in caplog.text
    )


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(1)])
async def test_sink_that_cannot_start_is_logged_once(
    error: BaseException, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, healthy = Fake("start", error), Fake()
    async with open_sinks(tmp_path, broken, healthy) as sinks:
        await eventually(lambda: "trackio gets no metrics: it could not be started" in caplog.text)
        for row in rows(1, 2, 3, 4, 5):
            sinks.on_event(row)
            await eventually(lambda step=row.row["step"]: step in healthy.steps)  # type: ignore[misc]
    assert broken.told == []
    assert sinks.num_dropped == 5
    assert len(caplog.records) == 3  # it, the first row, and all of them at the end


async def test_failing_sink_is_retried_with_the_next_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, healthy = Fake("log", ValueError("on purpose\nand more")), Fake()
    async with open_sinks(tmp_path, broken, healthy) as sinks:
        sinks.on_event(rows(1)[0])
        await eventually(lambda: sinks.num_dropped == 1)
        broken.at = ""
        sinks.on_event(rows(2)[0])
    assert [method for method, _ in broken.told] == ["start", "log", "close"]
    assert caplog.messages == [
        "rows of metrics for trackio: dropped 1 (1 in total): ValueError: on purpose"
    ]


@pytest.mark.parametrize(("at", "num_dropped"), [("start", 2), ("log", 2), ("close", 0)])
async def test_hanging_sink_does_not_delay_end(at: str, num_dropped: int, tmp_path: Path) -> None:
    hangs, healthy = Fake(at), Fake()
    with anyio.fail_after(patient(15)):
        async with open_sinks(tmp_path, hangs, healthy, ImpatientSinks) as sinks:
            for row in rows(1, 2):
                sinks.on_event(row)
            await eventually(lambda: healthy.steps == [1, 2])
            await eventually(lambda: hangs.reached.is_set() or hangs.steps == [1, 2])
    assert sinks.num_dropped == num_dropped
    await eventually(lambda: healthy.told[-1] == ("close", None))
    hangs.gate.set()


async def test_sink_is_closed_if_the_run_fails(tmp_path: Path) -> None:
    first, second = Fake(), Fake()
    with anyio.move_on_after(0):
        async with open_sinks(tmp_path, first, second) as sinks:
            sinks.on_event(rows(1)[0])
            await anyio.sleep_forever()
    assert [method for method, _ in first.told] == ["start", "log", "close"]


async def test_without_sinks_nothing_is_done(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    async with Sinks.open(SinksSettings(), folder=tmp_path, run_name="", config={}) as sinks:
        sinks.on_event(Measured(story.STEP_ROW))
        assert set(threading.enumerate()) <= before  # those of other tests may end meanwhile
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
async def test_package_that_is_missing_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.distribution.find_spec", lambda name: None)
    settings = SinksSettings.model_validate({"report_to": [name]})
    with pytest.raises(
        SettingsError,
        match=rf"{name} \(sinks\.report_to\) is not installed: .*agentloop-rl\[{name}\]",
    ):
        async with Sinks.open(settings, folder=tmp_path, run_name="", config={}):
            pass
    assert name not in sys.modules


def test_unknown_sink_is_rejected() -> None:
    with pytest.raises(pydantic.ValidationError, match=r"to\.0"):
        SinksSettings.model_validate({"report_to": ["prometheus"]})


# --- secrets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"serve": {"token": "abc", "port": 1}}, {"serve": {"token": "***", "port": 1}}),
        ({"api_key": "abc", "WANDB_API_KEY": "abc"}, {"api_key": "***", "WANDB_API_KEY": "***"}),
        ({"control_token": "abc", "password": ["a"]}, {"control_token": "***", "password": "***"}),
        ({"token": None, "secret": ""}, {"token": None, "secret": ""}),
        ({"max_response_tokens": 3, "eos_token": 2}, {"max_response_tokens": 3, "eos_token": 2}),
        ({"redis": "redis://me:pw@h:1/0"}, {"redis": "redis://***@h:1/0"}),
        ({"servers": ["http://a:b@c", "http://d"]}, {"servers": ["http://***@c", "http://d"]}),
        ({"folder": Path("runs"), 1: (2, 0.5)}, {"folder": "runs", "1": [2, 0.5]}),
        ({"x": pydantic.SecretStr("abc")}, {"x": "**********"}),
    ],
)
def test_secrets_are_masked(config: Any, expected: Any) -> None:
    assert mask_secrets(config) == expected


plain = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["x", "http://a/b", ""])
nested = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=10,
)


@given(nested)
def test_values_that_are_not_secret_stay(config: Any) -> None:
    assert mask_secrets({"value": config}) == {"value": config}


@given(nested, st.sampled_from(["token", "api_key", "hf_token", "Authorization", "db_password"]))
def test_no_secret_gets_through(config: Any, key: str) -> None:
    def hidden(inside: Any) -> Any:
        return {"outer": [{"a": inside}, {key: "hunter2"}, f"http://me:hunter2@{key}/"]}

    assert "hunter2" not in str(mask_secrets(hidden(config)))
