"""Reasons to refuse a checkpoint, and the copy of a state that is still to be written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

import torch

from agentloop.learner.checkpoint import SavedState, _copy_to_host, read_state
from agentloop.learner.errors import RankError
from agentloop.learner.policy import Counters
from agentloop.models import SMALL
from agentloop.training.learner_client.protocol import TrainingState
from agentloop.training.learner_client.settings import LearnerSettings

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def policy(**settings: Any) -> Any:
    lora = {"rank": 4, "alpha": 8, "targets": ("q_proj", "v_proj"), **settings.pop("lora", {})}
    made = LearnerSettings.model_validate({"model": SMALL, "lora": lora, **settings})
    return SimpleNamespace(settings=made, world=SimpleNamespace(size=1))


def state_of(policy: Any) -> SavedState:
    policy.counters = lambda: Counters(3, 1, 2)
    return SavedState.of(policy, TrainingState(step=3, version=2))


def test_state_of_a_checkpoint_survives_the_file() -> None:
    saved = state_of(policy(init="random", config={"num_hidden_layers": 2}))
    assert SavedState.model_validate_json(saved.model_dump_json()) == saved
    assert json.loads(saved.model_dump_json())["state"]["version"] == 2


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"state": {}}', '{"state": {"step": 1}, "num_updates": 1}']
)
def test_damaged_state_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(RankError, match="not a checkpoint: "):
        read_state(policy(), tmp_path)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"lora": {"alpha": 16}}, "lora_alpha"),
        ({"lora": {"targets": ("q_proj",)}}, "lora_targets"),
        ({"seed": 1}, "seed"),
        ({"config": {"num_hidden_layers": 2}}, "config"),
        ({"init": "pretrained"}, "init"),
    ],
)
def test_adapters_of_another_model_are_refused(
    tmp_path: Path, other: dict[str, Any], name: str
) -> None:
    saved = policy(init="random")
    (tmp_path / "state.json").write_text(state_of(saved).model_dump_json())
    read_state(saved, tmp_path)
    with pytest.raises(RankError, match=f"saved with {name} "):
        read_state(policy(**{"init": "random", **other}), tmp_path)


def test_order_of_targets_and_an_unused_seed_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(state_of(policy()).model_dump_json())
    read_state(policy(seed=3, lora={"targets": ("v_proj", "q_proj")}), tmp_path)


def test_copy_is_unaffected_by_changes_and_shares_storage_alike() -> None:
    flat = torch.arange(6.0)
    state = {"flat": flat, "groups": [{"part": flat[2:6].view(2, 2).T, "size": flat.shape}, 3]}
    held = _copy_to_host(state, {})
    flat.zero_()
    state["groups"][0]["size"] = None
    assert torch.equal(held["flat"], torch.arange(6.0))
    part = held["groups"][0]["part"]
    assert (part.tolist(), held["groups"][0]["size"]) == ([[2, 4], [3, 5]], torch.Size([6]))
    assert part.untyped_storage().data_ptr() == held["flat"].untyped_storage().data_ptr()
