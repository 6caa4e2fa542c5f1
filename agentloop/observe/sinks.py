"""Where else a run's metrics go: TensorBoard, trackio, Weights & Biases.

    Measured ──seen──> numbers ──queue, bounded, one for each sink──> its thread ──> the sink

A sink is only ever called in a thread of its own: one that is slow, that hangs or that fails costs
rows of its own, which are counted and told of in the log, and nothing of the run's time. Each gets
a row at a time, under its step; text and lists in a row are left out. It also gets the run's
settings, with what is secret in them masked.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import anyio
import pydantic

from agentloop.distribution import require
from agentloop.events import Event, Measured
from agentloop.observe.dropped import Dropped
from agentloop.observe.tfevents import EventFile

__all__ = ["Sink", "Sinks", "SinksSettings", "masked"]

log = logging.getLogger(__name__)

SinkName = Literal["tensorboard", "trackio", "wandb"]

_SECRET = re.compile(
    r"(^|_)(token|secret|password|passwd|api_?key|access_?key|private_?key|credentials?|auth|"
    r"authorization|cookie)s?$",
    re.IGNORECASE,
)
_MASK = "***"


class SinksSettings(pydantic.BaseModel):
    """Where else a run's metrics go."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    to: tuple[SinkName, ...] = pydantic.Field(
        (),
        description="Any of tensorboard, trackio and wandb; accounts and servers of theirs are set "
        "as they want it, in the environment.",
    )
    project: str = pydantic.Field(
        "agentloop", min_length=1, description="Of trackio and wandb: what runs are shown together."
    )
    max_waiting: int = pydantic.Field(
        1000,
        ge=1,
        description="Rows that a sink has not taken yet; more are left out, and counted.",
    )
    close_s: float = pydantic.Field(
        30.0, gt=0, description="At the end, for what was not taken yet; the rest is left out."
    )


class Sink(Protocol):
    """All of it is called in one thread, which may block; whatever it raises is logged."""

    def start(self, run_name: str, config: Mapping[str, Any]) -> None:
        """Once, before the rest. `config` is nested, plain data without secrets."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A step may come several times, with other values, and may be less than the one before:
        in a run that went back to a checkpoint."""
        ...

    def close(self) -> None:
        """Once, at last; not where `start` has failed."""
        ...


class Sinks:
    """Tell it of every event by `seen`."""

    def __init__(self, sinks: Mapping[str, Sink], *, max_waiting: int, close_s: float) -> None:
        """Use `Sinks.open(...)`."""
        self._close_s = close_s
        self._lanes = [_Lane(name, sink, max_waiting) for name, sink in sinks.items()]

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: SinksSettings,
        *,
        folder: Path,
        run_name: str,
        config: Mapping[str, Any],
        make: Callable[[SinkName, SinksSettings, Path], Sink] | None = None,
    ) -> AsyncIterator[Sinks]:
        """When it is left, what waits is written, if that takes no longer than `sinks.close_s`.

        Args:
            folder: the run's; files of sinks go into it.
            config: the run's settings; what is secret in them is masked here.
            make: in place of the sinks that there are.

        Raises:
            SettingsError: the package of a sink is not installed; it names the extra.
        """
        make = make or _made
        there: dict[str, Sink] = {name: make(name, settings, folder) for name in settings.to}
        sinks = cls(there, max_waiting=settings.max_waiting, close_s=settings.close_s)
        plain = masked(config)
        for lane in sinks._lanes:
            lane.begin(run_name, plain)
        try:
            yield sinks
        finally:
            await sinks._close()

    def seen(self, event: Event) -> None:
        if not isinstance(event, Measured) or not self._lanes:
            return
        step, values = _numbers(event.row)
        if values:
            for lane in self._lanes:
                lane.put(step, values)

    @property
    def num_dropped(self) -> dict[str, int]:
        """Rows that were left out, by the sink."""
        return {lane.name: lane.dropped.num for lane in self._lanes}

    async def _close(self) -> None:
        for lane in self._lanes:
            lane.end()
        with anyio.move_on_after(self._close_s, shield=True):
            while any(lane.is_alive for lane in self._lanes):  # noqa: ASYNC110  # threads
                await anyio.sleep(0.01)
        for lane in self._lanes:
            lane.give_up(f"not done within {self._close_s:g} s, at the end")


class _Lane:
    """A sink with its queue and its thread. The thread is a daemon, for one that hangs must not
    hold up the end of the process."""

    def __init__(self, name: str, sink: Sink, max_waiting: int) -> None:
        self.name = name
        self._sink = sink
        self._max_waiting = max_waiting
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque()
        self._num_in_hand = 0
        self._wake = threading.Event()
        self._is_over = False
        self._failure = ""
        self.dropped = Dropped(f"rows of metrics for {name}")
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)

    def begin(self, run_name: str, config: Mapping[str, Any]) -> None:
        self._started = run_name, config
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        if self._failure or len(self._rows) >= self._max_waiting:
            self.dropped.add(1, self._failure or f"{self._max_waiting} rows wait already")
            return
        self._rows.append((step, values))
        self._wake.set()

    def end(self) -> None:
        self._is_over = True
        self._wake.set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def give_up(self, why: str) -> None:
        """What it has not taken, it never will."""
        num_left = len(self._rows) + self._num_in_hand
        self._rows.clear()
        if num_left:
            self.dropped.add(num_left, why)
        self.dropped.tell()

    def _work(self) -> None:
        try:
            self._sink.start(*self._started)
        except BaseException as error:  # a library may even call sys.exit
            self._fail(f"it could not be started: {_in_words(error)}")
            return
        while not self._is_over or self._rows:
            self._wake.wait()
            self._wake.clear()
            while self._rows:
                self._num_in_hand = 1
                try:
                    self._sink.log(*self._rows.popleft())
                except BaseException as error:
                    self.dropped.add(1, _in_words(error))
                self._num_in_hand = 0
        try:
            self._sink.close()
        except BaseException as error:
            log.warning("%s could not be closed: %s", self.name, _in_words(error))

    def _fail(self, why: str) -> None:
        self._failure = why
        num_left = len(self._rows)
        self._rows.clear()
        log.warning("%s gets no metrics: %s", self.name, why)
        if num_left:
            self.dropped.add(num_left, why)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _numbers(row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Of a row of metrics: its step, and what can be drawn."""
    step = row.get("step")
    values = {
        name: value
        for name, value in row.items()
        if name != "step"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < math.inf  # nor is NaN
    }
    return step if isinstance(step, int) else 0, values


def masked(config: Any) -> Any:
    """Plain data with asterisks in place of what stands under a key that names a secret, numbers
    aside, and of what stands before the @ of a URL."""
    if isinstance(config, Mapping):
        return {
            str(key): _MASK if _SECRET.search(str(key)) and _may_be_secret(value) else masked(value)
            for key, value in config.items()
        }
    if isinstance(config, str):
        return re.sub(r"://[^\s'\"]*@", f"://{_MASK}@", config)
    if isinstance(config, Sequence):
        return [masked(value) for value in config]
    return config if isinstance(config, bool | int | float | None) else masked(str(config))


def _may_be_secret(value: object) -> bool:
    """`max_tokens` is a number."""
    return bool(value) and not isinstance(value, bool | int | float)


# --- the sinks ------------------------------------------------------------------------------------


def _made(name: SinkName, settings: SinksSettings, folder: Path) -> Sink:
    match name:
        case "tensorboard":
            return _TensorBoard(folder / "tensorboard")
        case "trackio":
            require(name, {name: "sinks.to"})
            return _Trackio(settings.project)
        case "wandb":
            require(name, {name: "sinks.to"})
            return _Wandb(settings.project, folder, 0.8 * settings.close_s)


class _TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir RUNS` shows all runs below it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, run_name: str, config: Mapping[str, Any]) -> None:
        self._file = EventFile(self._folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.add(step, values)

    def close(self) -> None:
        self._file.close()


class _Trackio:
    """Where `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID` say, else in files of this machine."""

    def __init__(self, project: str) -> None:
        self._project = project

    def start(self, run_name: str, config: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=self._project, name=run_name, config=dict(config), resume="allow", embed=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Wandb:
    """As `wandb login` or `WANDB_API_KEY` have it, or with `WANDB_MODE=offline` in the run's folder
    alone, for `wandb sync`. By itself it would also send the code, and the command line, which may
    hold secrets."""

    def __init__(self, project: str, folder: Path, finish_s: float) -> None:
        self._project = project
        self._folder = folder
        self._finish_s = finish_s

    def start(self, run_name: str, config: Mapping[str, Any]) -> None:
        import wandb

        is_online = wandb.setup().settings.mode == "online"
        # Else it asks for a key, on a terminal that shows something else.
        if is_online and not wandb.login(prompt=False, verify=False):
            raise RuntimeError(
                "there is no key: `wandb login`, WANDB_API_KEY or WANDB_MODE=offline"
            )
        self._run = wandb.init(
            project=self._project,
            name=run_name,
            id=re.sub(r"[^\w-]", "-", run_name),
            resume="allow",  # a run that goes on after it was killed
            config=dict(config),
            dir=str(self._folder),
            settings=wandb.Settings(
                console="off",
                silent=True,
                finish_timeout=self._finish_s,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        # Its own steps can only grow, and hold one row each.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
