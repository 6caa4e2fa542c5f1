"""Tests of the plan of a run."""

from __future__ import annotations

import pickle
from pathlib import Path

from agentloop.agent.rollout import Budget
from agentloop.config import load_settings
from agentloop.environments.tasks.sources import Task
from agentloop.models import SMALL
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.training.plan.checks import check_settings
from agentloop.training.plan.settings import TrainSettings, with_server_options
from agentloop.training.wiring import RolloutPlan, RunPlan


def plan_of(*overrides: str) -> RunPlan:
    settings = check_settings(load_settings(TrainSettings, overrides=[*overrides]))
    return RunPlan.of(settings, log_dir=Path("/logs"))


def test_runtime_has_room_for_the_longest_stage() -> None:
    run = plan_of(
        "stages={short={steps=2, max_response_tokens=64}, long={steps=3, max_response_tokens=999}}"
    )
    assert (run.runtime.budget.max_response_tokens, run.runtime.log_dir) == (999, Path("/logs"))
    assert [stage.steps for stage in run.stages.values()] == [2, 3]
    assert run.budget.max_response_tokens == TrainSettings().budget.max_response_tokens


def test_servers_and_learner_start_from_one_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = plan_of("sft.data.teacher=9").starting_from(tmp_path)
    assert (run.runtime.model, run.learner.model) == (str(tmp_path), tmp_path)
    assert run.fine_tuning is not None
    assert run.fine_tuning.runtime.model == str(SMALL.resolve())


def test_servers_learner_and_rollouts_agree_on_routing_replay() -> None:
    option = "--enable-return-routed-experts"
    for value in (False, True):
        overrides = [f"learner.routing_replay={value}".lower()]
        settings = with_server_options(load_settings(TrainSettings, overrides=overrides))
        assert with_server_options(settings) == settings
        run = RunPlan.of(settings, log_dir=Path("/logs"))
        assert run.learner.routing_replay == value
        assert (option in run.runtime.server.extra_args) == value
        sampling = pickle.loads(pickle.dumps(run.rollouts)).sampling
        assert sampling.for_training().records_experts == value


def test_nodes_get_the_whole_plan_of_rollouts() -> None:
    settings = load_settings(TrainSettings, overrides=["loop.early_stop_at=3", "loop.seed=7"])
    plan = RolloutPlan.of(settings)
    assert (plan.enough, plan.seed) == (3, 7)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_request_on_a_node_has_its_own_event() -> None:
    request = GroupRequest(Task("t", "?", "1"), "1", 2, Budget(max_turns=3), 4, Purpose.TRAIN)
    sent = pickle.loads(pickle.dumps(request))
    assert sent == request
    sent.queued.set()
    assert not request.queued.is_set()
