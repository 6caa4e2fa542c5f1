"""Checkpoints to go on from: weights, optimizer, counters, and the caller's own state.

    folder/state.json    {"state": the caller's, "num_updates": 12, ...}: readable without torch
    folder/zero/         DeepSpeed's files, one or more per rank

A checkpoint is for as many ranks and the same ZeRO stage as it was saved by. With LoRA it holds the
adapters alone: what they are added to is the model that training starts from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from learner.errors import LearnerError, NotWritten
from learner.files import appear, fresh_partial, partial_of, remove_partial, writing
from learner.policy import Policy

__all__ = ["load_checkpoint", "read_state", "save_checkpoint"]

_STATE = "state.json"
_TAG = "zero"


def save_checkpoint(policy: Policy, folder: Path, state: dict[str, Any]) -> None:
    """Every rank comes here. The folder is seen when the last rank has written its part.

    Raises:
        NotWritten: nothing is left of what was begun.
    """
    world, partial = policy.world, partial_of(folder)

    def begin() -> None:
        with writing(folder):
            (fresh_partial(folder) / _TAG).mkdir()

    def write() -> None:
        with writing(folder):
            for one in parts:
                one()

    def complete() -> None:
        kept = {"state": state, **policy.counters(), **_shape(policy)}
        with writing(folder):
            (partial / _STATE).write_text(json.dumps(kept, indent=2) + "\n", "utf-8")
            appear(partial, folder, durable=True)
            _remove_older(folder, policy.settings.keep_checkpoints)

    try:
        world.beside(begin if world.first else None)
        parts = _parts(policy, partial)
        world.finish()
        world.beside(write)
        world.beside(complete if world.first else None)
    except NotWritten:
        if world.first:
            remove_partial(folder)
        raise


def _parts(policy: Policy, partial: Path) -> list[Callable[[], None]]:
    """What this rank has to write. DeepSpeed would write it between its collectives, which do not
    wait for a slow disk, and which nobody comes to whose disk is full."""
    engine, parts = policy.engine, list[Callable[[], None]]()
    writer = engine.checkpoint_engine

    def save(state_dict: Any, path: str) -> None:
        parts.append(lambda: _write(state_dict, path))

    writer.save = save
    engine._copy_recovery_script = lambda _: None  # a script for others, written by rank 0
    try:
        engine.save_checkpoint(
            str(partial), tag=_TAG, save_latest=False, exclude_frozen_parameters=_has_lora(policy)
        )
    finally:
        del writer.save, engine._copy_recovery_script  # they hid the methods of the classes
    return parts


def _write(state: Any, path: str) -> None:
    with open(path, "wb") as file:  # which lets go of Python's lock as it writes
        torch.save(state, file)


def read_state(policy: Policy, folder: Path) -> dict[str, Any]:
    """What `state.json` holds.

    Raises:
        LearnerError: no checkpoint is there, or it is of another number of ranks or ZeRO stage.
    """
    try:
        kept: dict[str, Any] = json.loads((folder / _STATE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise LearnerError(f"{folder}: no checkpoint: {error}") from error
    for name, now in _shape(policy).items():
        if kept.get(name) != now:
            raise LearnerError(f"{folder}: saved with {name} {kept.get(name)}, this is {now}")
    return kept


def load_checkpoint(policy: Policy, folder: Path, kept: dict[str, Any]) -> None:
    """Every rank comes here, with what `read_state` gave."""
    whole = not _has_lora(policy)
    loaded, _ = policy.engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=whole)
    if loaded is None:
        raise LearnerError(f"{folder}: DeepSpeed found nothing to load")
    policy.set_counters(kept)


def _shape(policy: Policy) -> dict[str, Any]:
    s = policy.settings
    shape: dict[str, Any] = {"num_ranks": policy.world.size, "zero_stage": s.zero_stage}
    shape |= {"dtype": s.dtype, "lora_rank": s.lora.rank}
    if _has_lora(policy):  # what the adapters are added to, and how, is not in the checkpoint
        shape |= {"lora_alpha": s.lora.alpha, "lora_targets": sorted(s.lora.targets)}
        shape["init"] = s.init
        if s.init == "random":
            shape |= {"seed": s.seed, "config": s.config}
    return shape


def _has_lora(policy: Policy) -> bool:
    return policy.settings.lora.rank > 0


def _remove_older(folder: Path, keep: int) -> None:
    """Of the checkpoints beside `folder`, the latest `keep` stay; nothing else is touched."""
    if keep == 0:
        return
    others = [file.parent for file in folder.parent.glob(f"*/{_STATE}") if file.parent != folder]
    whole = [one for one in others if (one / _TAG).is_dir()]
    whole.sort(key=lambda one: (one / _STATE).stat().st_mtime_ns)
    for one in whole[: max(0, len(whole) - keep + 1)]:
        shutil.rmtree(one)
