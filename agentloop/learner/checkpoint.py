"""Checkpoints to resume from: weights, optimizer, counters, and the trainer's state.

    folder/state.json    a `SavedState`: readable without torch
    folder/zero/         DeepSpeed's files, one or more per rank

Writing has two phases, each in a thread of every rank: all ranks write their parts, then rank 0
makes the folder appear. Between the phases the ranks agree by collectives in the request loop,
which all ranks enter in the same order. So a checkpoint that is written during training only needs
a poll between requests.

A checkpoint of another number of ranks or another ZeRO stage is converted when it is loaded. With
LoRA it holds the adapters alone; the base model is the one that training starts from.
"""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import pydantic
import torch

from agentloop.learner import universal
from agentloop.learner.errors import CheckpointError, RankError, WriteError
from agentloop.learner.files import appear, fresh_partial, partial_of, remove_partial, writing
from agentloop.learner.policy import Counters, Policy
from agentloop.learner.world import BackgroundTask
from agentloop.training.learner_client.protocol import TrainingState

_STATE = "state.json"
_TAG = "zero"
_CONVERTED = ("num_ranks", "zero_stage")

Work = Callable[[], None] | None


class SavedState(pydantic.BaseModel):
    """The content of state.json; its further fields are those of `_shape`."""

    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    state: TrainingState
    num_updates: int
    num_skipped: int
    warm_from: int

    @classmethod
    def of(cls, policy: Policy, state: TrainingState) -> Self:
        values = asdict(policy.counters()) | _shape(policy)
        return cls.model_validate({"state": state, **values})

    @property
    def counters(self) -> Counters:
        return Counters(self.num_updates, self.num_skipped, self.warm_from)

    @property
    def shape(self) -> Mapping[str, Any]:
        """The settings that the policy's state depends on, by name."""
        return self.model_extra or {}


class Saver:
    """Writes the policy's checkpoints, one at a time. Every method is collective.

    Attributes:
        folder: The newest complete checkpoint saved by this process.
        failed: The reason why the last save failed; None if it did not.
        writing: The checkpoint being written.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self._world = policy, policy.world
        self.folder: Path | None = None
        self.failed: str | None = None
        self.writing: Path | None = None
        self._phases: Generator[Work, None, None] | None = None
        self._task = BackgroundTask(None)

    def save(self, folder: Path, state: TrainingState, *, beside: bool = False) -> None:
        """Wait for the previous checkpoint, so that the host holds one copy at most, and write this
        one.

        The folder appears when the last rank has written its part. With `beside`, return as soon as
        the state is copied into the host's memory.

        Raises:
            WriteError: Writing failed; the partial folder is removed.
        """
        self.wait()
        try:
            self._world.run_beside((lambda: _create_partial(folder)) if self._world.first else None)
        except WriteError as error:
            self.failed = str(error)
            raise
        parts = _collect_writes(self._policy, partial_of(folder), hold=beside)
        saved = SavedState.of(self._policy, state)
        self._world.finish()
        self._phases = _phases(self._policy, folder, parts, saved)
        self._task, self.writing = BackgroundTask(next(self._phases)), folder
        if beside:
            return
        self.wait()
        if self.failed is not None:
            raise WriteError(self.failed)

    def go_on(self, within_s: float = 0.0) -> None:
        """Begin the next phase if all ranks finish the current one within `within_s` seconds."""
        if self.writing is None or not self._world.all_done(self._task, within_s):
            return
        assert self._phases is not None
        try:
            try:
                self._world.raise_if_any(self._task.error)
            except WriteError as error:
                self._task = BackgroundTask(self._phases.throw(error))
            else:
                self._task = BackgroundTask(next(self._phases))
        except StopIteration:
            self.folder, self.failed, self.writing = self.writing, None, None
        except WriteError as error:
            self.failed, self.writing = str(error), None

    def wait(self, timeout_s: float = math.inf) -> None:
        """Wait until nothing is being written, or until the timeout."""
        end = time.monotonic() + timeout_s
        while self.writing is not None and self._world.broadcast_object(time.monotonic() < end):
            self.go_on(self._world.beat_s)


def _create_partial(folder: Path) -> None:
    with writing(folder):
        for old_partial in folder.parent.glob(".*.partial"):  # by a learner that died
            if (old_partial / _TAG).is_dir():
                shutil.rmtree(old_partial)
        (fresh_partial(folder) / _TAG).mkdir()


def _phases(
    policy: Policy, folder: Path, parts: list[Callable[[], None]], saved: SavedState
) -> Generator[Work, None, None]:
    """Yield this rank's work, one phase at a time; the next phase starts when all ranks are done.

    An error of any rank's work is thrown in.
    """
    first, partial = policy.world.first, partial_of(folder)

    def write() -> None:
        with writing(folder):
            while parts:  # release each one once it is written
                parts.pop()()

    def complete() -> None:
        with writing(folder):
            (partial / _STATE).write_text(saved.model_dump_json(indent=2) + "\n", "utf-8")
            appear(partial, folder, durable=True)
            _remove_older(folder, policy.settings.keep_checkpoints)

    try:
        yield write
        yield complete if first else None
    except WriteError:
        yield (lambda: remove_partial(folder)) if first else None
        raise


def _collect_writes(policy: Policy, partial: Path, *, hold: bool) -> list[Callable[[], None]]:
    """Return the writes that this rank has to do; `hold` copies their state first.

    The copy is unaffected by later steps. DeepSpeed itself would write between its collectives,
    which time out on a slow disk, and which a rank with a full disk would never reach.
    """
    engine, parts = policy.engine, list[Callable[[], None]]()
    writer = engine.checkpoint_engine

    def save(state_dict: dict[str, object], path: str) -> None:
        state = _copy_to_host(state_dict, {}) if hold else state_dict
        parts.append(lambda: _write(state, path))

    writer.save = save
    engine._copy_recovery_script = lambda _: None  # else rank 0 adds a script that nobody needs
    try:
        engine.save_checkpoint(
            str(partial), tag=_TAG, save_latest=False, exclude_frozen_parameters=_has_lora(policy)
        )
    finally:
        del writer.save, engine._copy_recovery_script  # they shadowed the methods of the classes
    return parts


def _copy_to_host(value: object, storages: dict[int, torch.UntypedStorage]) -> Any:
    """Copy `value` into the host's memory.

    Tensors that share storage still do so in the copy, as they do in the file; `storages` maps the
    addresses of storages to their copies.
    """
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        address = storage.data_ptr()
        if address not in storages:
            storages[address] = storage.clone() if value.device.type == "cpu" else storage.cpu()
        copied = torch.empty(0, dtype=value.dtype)
        place = (value.storage_offset(), value.size(), value.stride())
        return copied.set_(storages[address], *place)
    if isinstance(value, dict):
        copied_dict = copy.copy(value)
        for key, item in value.items():
            copied_dict[key] = _copy_to_host(item, storages)
        return copied_dict
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_copy_to_host(item, storages) for item in value)
    return copy.deepcopy(value)


def _write(state: object, path: str) -> None:
    with open(path, "wb") as file:  # writing to it releases the GIL
        torch.save(state, file)


def read_state(policy: Policy, folder: Path) -> SavedState:
    """Return the content of `state.json`.

    Raises:
        RankError: There is no checkpoint, or it belongs to a different kind of policy.
    """
    try:
        saved = SavedState.model_validate_json((folder / _STATE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise RankError(f"{folder}: not a checkpoint: {error}") from error
    for name, expected in _shape(policy).items():
        if name not in _CONVERTED and saved.shape.get(name) != expected:
            raise RankError(
                f"{folder}: saved with {name} {saved.shape.get(name)}, this is {expected}"
            )
    return saved


def load_checkpoint(policy: Policy, folder: Path, saved: SavedState) -> None:
    """Load a checkpoint, given what `read_state` returned (collective).

    Raises:
        CheckpointError, WriteError: Nothing has changed.
    """
    shape = _shape(policy)
    if all(saved.shape.get(name) == shape[name] for name in _CONVERTED):
        loaded, _ = policy.engine.load_checkpoint(
            str(folder), tag=_TAG, load_module_strict=not _has_lora(policy)
        )
        if loaded is None:
            raise RankError(f"{folder}: DeepSpeed found nothing to load")
    else:
        _load_converted(policy, folder, saved)
    policy.set_counters(saved.counters)


def _load_converted(policy: Policy, folder: Path, saved: SavedState) -> None:
    world, target = policy.world, folder.with_name(f".{folder.name}.universal")
    saved_with, wanted = (
        f"num_ranks {shape['num_ranks']}, zero_stage {shape['zero_stage']}"
        for shape in (saved.shape, _shape(policy))
    )

    def convert() -> None:
        try:
            if saved.counters.num_updates == 0:  # DeepSpeed would keep this policy's moments
                raise CheckpointError("it was saved before the first step; start a new run instead")
            universal.convert(policy, folder / _TAG, target, stage=saved.shape["zero_stage"])
        except CheckpointError as error:
            text = f"{folder}: saved with {saved_with}, cannot be read with {wanted}: {error}"
            raise CheckpointError(text) from error

    world.run_beside(convert if world.first else None)
    universal.load(policy, target)
    world.wait()
    world.run_beside((lambda: universal.remove(target)) if world.first else None)


def _shape(policy: Policy) -> dict[str, object]:
    s = policy.settings
    shape: dict[str, object] = {"num_ranks": policy.world.size, "zero_stage": s.zero_stage}
    shape |= {"dtype": s.dtype, "lora_rank": s.lora.rank}
    if _has_lora(policy):  # the base model and the adapters' settings are not in the checkpoint
        shape |= {"lora_alpha": s.lora.alpha, "lora_targets": sorted(s.lora.targets)}
        shape["init"] = s.init
        if s.init == "random":
            shape |= {"seed": s.seed, "config": s.config}
    return shape


def _has_lora(policy: Policy) -> bool:
    return policy.settings.lora.rank > 0


def _remove_older(folder: Path, keep: int) -> None:
    """Keep the latest `keep` checkpoints next to `folder`; remove older ones and nothing else."""
    if keep == 0:
        return
    folders = [file.parent for file in folder.parent.glob(f"*/{_STATE}") if file.parent != folder]
    complete = [checkpoint for checkpoint in folders if (checkpoint / _TAG).is_dir()]
    complete.sort(key=lambda checkpoint: (checkpoint / _STATE).stat().st_mtime_ns)
    for checkpoint in complete[: max(0, len(complete) - keep + 1)]:
        shutil.rmtree(checkpoint)
