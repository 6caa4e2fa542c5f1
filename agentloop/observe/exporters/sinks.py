"""Export a run's metrics to TensorBoard, trackio or Weights & Biases.

    Measured ──seen──> numbers ──queue, bounded, one for each sink──> its thread ──> the sink

Each sink runs in its own thread: one that is slow, hangs or fails loses its own rows, which are
counted and logged, but never delays the run. A sink gets one row of numbers per step, without text
and lists, and the run's settings with secrets masked.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, Protocol

import anyio
import pydantic

from agentloop.distribution import require
from agentloop.errors import message_of
from agentloop.events import Event, Measured
from agentloop.observe.exporters.drop_counter import DropCounter
from agentloop.plain_json import number_of

log = logging.getLogger(__name__)

SinkName = Literal["tensorboard", "trackio", "wandb"]

_SECRET = re.compile(
    r"(^|_)(token|secret|password|passwd|api_?key|access_?key|private_?key|credentials?|auth|"
    r"authorization|cookie)s?$",
    re.IGNORECASE,
)
_MASK = "***"


class SinksSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Additional destinations for a run's metrics."""

    report_to: tuple[SinkName, ...] = pydantic.Field(
        (),
        description="Where to send the run's metrics besides its folder: any of tensorboard, "
        "trackio and wandb. Accounts and servers are configured by their own environment "
        "variables.",
    )
    project: str = pydantic.Field(
        "agentloop", min_length=1, description="Project name in trackio and wandb."
    )


class Sink(Protocol):
    """A destination for metrics. All methods are called in one thread, may block, and may raise."""

    def start(self, run_name: str, config: Mapping[str, object]) -> None:
        """Start the sink, once. `config` is nested plain data without secrets."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step.

        A step may be repeated with other values, and may decrease after a run returns to a
        checkpoint.
        """
        ...

    def close(self) -> None:
        """Close the sink, once; not called if `start` failed."""
        ...


class Sinks:
    """The sinks of a run; pass every event to `on_event`. Create it with `Sinks.open`."""

    MAX_WAITING = 1000  # rows of a sink; more are dropped and counted
    CLOSE_S = 30.0  # at the end, to write queued rows; the others are dropped

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._workers = [_SinkWorker(name, sink, self.MAX_WAITING) for name, sink in sinks.items()]

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: SinksSettings,
        *,
        folder: Path,
        run_name: str,
        config: Mapping[str, object],
        make: Callable[[SinkName, SinksSettings, Path], Sink] | None = None,
    ) -> AsyncIterator[Sinks]:
        """Start the sinks; on leaving, wait for queued rows, for at most `CLOSE_S`.

        Args:
            folder: The run's folder; sinks store their files there.
            config: The run's settings; secrets are masked here.
            make: Creates the sinks; for tests.

        Raises:
            SettingsError: The package of a sink is not installed; the message names the extra.
        """
        make = make or _make
        sinks = cls({name: make(name, settings, folder) for name in settings.report_to})
        plain = mask_secrets(config)
        for worker in sinks._workers:
            worker.begin(run_name, plain)
        try:
            yield sinks
        finally:
            await sinks._close()

    def on_event(self, event: Event) -> None:
        if not isinstance(event, Measured) or not self._workers:
            return
        step, values = _numbers(event.row)
        if values:
            for worker in self._workers:
                worker.put(step, values)

    @property
    def num_dropped(self) -> int:
        """Number of rows that a sink has dropped, of all sinks together."""
        return sum(worker.dropped.num for worker in self._workers)

    async def _close(self) -> None:
        for worker in self._workers:
            worker.end()
        with anyio.move_on_after(self.CLOSE_S, shield=True):
            while any(worker.is_alive for worker in self._workers):  # noqa: ASYNC110  # threads
                await anyio.sleep(0.01)
        for worker in self._workers:
            worker.give_up(f"not written within {self.CLOSE_S:g} s at the end")


class _SinkWorker:
    """A sink with its queue and its thread.

    The thread is a daemon, so that a sink that hangs cannot keep the process from exiting.
    """

    def __init__(self, name: str, sink: Sink, max_waiting: int) -> None:
        self.name = name
        self._sink = sink
        self._max_waiting = max_waiting
        self._rows: deque[tuple[int, Mapping[str, float]]] = deque()
        self._num_being_logged = 0
        self._wake = threading.Event()
        self._is_closing = False
        self._failure = ""
        self.dropped = DropCounter(f"rows of metrics for {name}")
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)

    def begin(self, run_name: str, config: Mapping[str, object]) -> None:
        self._started = run_name, config
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        if self._failure or len(self._rows) >= self._max_waiting:
            self.dropped.add(1, self._failure or f"{self._max_waiting} rows are already queued")
            return
        self._rows.append((step, values))
        self._wake.set()

    def end(self) -> None:
        self._is_closing = True
        self._wake.set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def give_up(self, reason: str) -> None:
        """Drop the rows that have not been written."""
        num_left = len(self._rows) + self._num_being_logged
        self._rows.clear()
        if num_left:
            self.dropped.add(num_left, reason)
        self.dropped.report()

    def _work(self) -> None:
        try:
            self._sink.start(*self._started)
        except BaseException as error:  # a library may even call sys.exit
            self._fail(f"it could not be started: {_describe(error)}")
            return
        while not self._is_closing or self._rows:
            self._wake.wait()
            self._wake.clear()
            while self._rows:
                self._num_being_logged = 1
                try:
                    self._sink.log(*self._rows.popleft())
                except BaseException as error:
                    self.dropped.add(1, _describe(error))
                self._num_being_logged = 0
        try:
            self._sink.close()
        except BaseException as error:
            log.warning("%s could not be closed: %s", self.name, _describe(error))

    def _fail(self, reason: str) -> None:
        self._failure = reason
        num_left = len(self._rows)
        self._rows.clear()
        log.warning("%s gets no metrics: %s", self.name, reason)
        if num_left:
            self.dropped.add(num_left, reason)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}".partition("\n")[0]


def _numbers(row: Mapping[str, object]) -> tuple[int, dict[str, float]]:
    """Return the step and the finite numbers of a metrics row."""
    step = row.get("step")
    values = {
        name: value
        for name, any_value in row.items()
        if name != "step"
        and (value := number_of(any_value)) is not None
        and abs(value) < math.inf  # also excludes NaN
    }
    return step if isinstance(step, int) else 0, values


def mask_secrets(config: Mapping[str, object]) -> dict[str, object]:
    """Return the settings as plain data with secrets replaced by asterisks.

    Secrets are values, other than numbers, whose key names a secret, and credentials in URLs.
    """
    return {
        str(key): _MASK
        if _SECRET.search(str(key)) and _may_be_secret(value)
        else _without_secrets(value)
        for key, value in config.items()
    }


def _without_secrets(value: object) -> object:
    if isinstance(value, Mapping):
        return mask_secrets(value)
    if isinstance(value, str):
        return re.sub(r"://[^\s'\"]*@", f"://{_MASK}@", value)
    if isinstance(value, Sequence):
        return [_without_secrets(element) for element in value]
    return value if isinstance(value, bool | int | float | None) else _without_secrets(str(value))


def _may_be_secret(value: object) -> bool:
    """Return whether a value can be a secret; numbers, such as `max_tokens`, cannot."""
    return bool(value) and not isinstance(value, bool | int | float)


# --- the sinks ------------------------------------------------------------------------------------


def _make(name: SinkName, settings: SinksSettings, folder: Path) -> Sink:
    require(name, {name: "sinks.report_to"})
    match name:
        case "tensorboard":
            return _TensorBoard(folder / "tensorboard")
        case "trackio":
            return _Trackio(settings.project)
        case "wandb":
            return _Wandb(settings.project, folder, 0.8 * Sinks.CLOSE_S)


class _TensorBoard:
    """Writes event files to the run's folder; `tensorboard --logdir RUNS` shows all runs in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, run_name: str, config: Mapping[str, object]) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        summary = Summary(value=scalars)
        self._writer.add_event(TensorBoardEvent(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    """Logs to `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID`, or else to local files."""

    def __init__(self, project: str) -> None:
        self._project = project

    def start(self, run_name: str, config: Mapping[str, object]) -> None:
        import trackio

        self._run = trackio.init(
            project=self._project, name=run_name, config=dict(config), resume="allow", embed=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Wandb:
    """Logs to Weights & Biases, or with `WANDB_MODE=offline` only to the run's folder.

    Uploading the code and the command line, which may contain secrets, is turned off.
    """

    def __init__(self, project: str, folder: Path, finish_s: float) -> None:
        self._project = project
        self._folder = folder
        self._finish_s = finish_s

    def start(self, run_name: str, config: Mapping[str, object]) -> None:
        import wandb

        is_online = wandb.setup().settings.mode == "online"
        # Otherwise wandb would prompt for a key on a terminal that shows other output.
        if is_online and not wandb.login(prompt=False, verify=False):
            raise RuntimeError(
                "no API key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            )
        self._run = wandb.init(
            project=self._project,
            name=run_name,
            id=re.sub(r"[^\w-]", "-", run_name),
            resume="allow",  # continue a run that was killed
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
        # wandb's own step can only increase and holds one row.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()
