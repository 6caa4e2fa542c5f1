"""Checkpoints of another number of ranks, or of another ZeRO stage.

    zero/ of n ranks ──convert, on rank 0──> a folder per parameter, whole ──load──> m ranks

The intermediate form is DeepSpeed's universal checkpoint (arXiv 2406.18820). DeepSpeed writes it
slightly differently for stage 3 than for the other stages; the differences are reconciled here.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import torch

from agentloop.learner.errors import CheckpointError, WriteError
from agentloop.learner.files import writing
from agentloop.learner.policy import Policy

_STATES = ("fp32", "exp_avg", "exp_avg_sq")
_WEIGHTS = 3  # the stage that partitions the weights, too


def convert(policy: Policy, zero: Path, target: Path, *, stage: int) -> None:
    """Convert a checkpoint that ranks of ZeRO `stage` saved in `zero`; write it to `target`.

    Raises:
        CheckpointError: DeepSpeed cannot convert it; `target` is removed.
        WriteError: Writing failed; `target` is removed.
    """
    try:
        with writing(target):
            remove(target)
            target.mkdir()
            _convert(zero, _universal_folder(target))
            if (stage == _WEIGHTS) != (policy.settings.zero_stage == _WEIGHTS):
                _reconcile_steps(_universal_folder(target) / "zero", _shapes(policy), stage)
    except Exception as error:  # DeepSpeed fails with assertions, missing keys and others
        remove(target)
        if isinstance(error, WriteError):
            raise
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _convert(zero: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        Namespace(
            input_folder=str(zero),
            output_folder=str(target),
            num_extract_workers=1,  # this one: children would inherit the process groups' sockets
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,  # state that only Megatron's models have
        )
    )


def remove(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)


def load(policy: Policy, target: Path) -> None:
    """Load a complete `target` (collective). The optimizer keeps its current settings."""
    optimizer = policy.engine.optimizer
    is_replicated = policy.settings.zero_stage != _WEIGHTS
    # Stage 3 would apply the first group's settings, such as weight decay, to all groups.
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if not is_replicated:
        optimizer.checkpoint_event_prologue()
    optimizer.load_state_dict(None, checkpoint_folder=str(_universal_folder(target)))
    if is_replicated:
        optimizer.update_lp_params()
    else:
        optimizer.checkpoint_event_epilogue()
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)
    # Stage 3 gives all parameters the same step tensor, which would then advance once for each.
    for state in optimizer.optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


def _universal_folder(target: Path) -> Path:
    return target / "universal"  # DeepSpeed also writes next to it


def _shapes(policy: Policy) -> dict[str, torch.Size]:
    """Return the shapes of the trained parameters by name."""
    groups = policy.engine._get_zero_param_shapes()
    return {name: shape for group in groups for name, shape in group.items()}


def _reconcile_steps(zero: Path, shapes: dict[str, object], stage: int) -> None:
    """Reconcile the step counts of different stages.

    Stage 3 writes and reads one count for all parameters; the other stages have one per parameter,
    in a dict together with tensors in their original shape.
    """
    import deepspeed

    common_path = zero / "optimizer_state.pt"
    common = torch.load(common_path, weights_only=False)
    if stage == _WEIGHTS:
        step = common["optimizer_state_dict"]["state"][0]["step"]
        common = {"param_groups": common["param_groups"], "ds_version": deepspeed.__version__}
        for name, shape in shapes.items():
            for state in _STATES:
                file = zero / name / f"{state}.pt"
                torch.save({"param": torch.load(file).reshape(shape)}, file)
            torch.save(step, zero / name / "step.pt")
    else:
        step = torch.load(zero / next(iter(shapes)) / "step.pt")
        groups = common["param_groups"]
        common["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups}
    torch.save(common, common_path)
