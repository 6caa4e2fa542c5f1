"""Tests of the plan of a run."""

from __future__ import annotations

import pickle
from pathlib import Path

from agentloop.agent.rollout import Budget
from agentloop.config import load_settings
from agentloop.environments.tasks.sources import Task
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.training.plan.settings import TrainSettings, learner_settings, with_server_options
from agentloop.training.run.folder import RunFolder
from agentloop.training.wiring import RolloutPlan, runtime_settings


def test_runtime_has_room_for_the_longest_stage(tmp_path: Path) -> None:
    stages = "{short={steps=2, max_response_tokens=64}, long={steps=3, max_response_tokens=999}}"
    settings = load_settings(TrainSettings, overrides=[f"stages={stages}"])
    runtime = runtime_settings(settings, RunFolder(tmp_path))
    assert (runtime.budget.max_response_tokens, runtime.log_dir) == (999, tmp_path / "logs")


def test_servers_learner_and_rollouts_agree_on_routing_replay(tmp_path: Path) -> None:
    option = "--enable-return-routed-experts"
    for value in (False, True):
        overrides = [f"learner.routing_replay={value}".lower()]
        settings = with_server_options(load_settings(TrainSettings, overrides=overrides))
        assert with_server_options(settings) == settings
        assert learner_settings(settings).routing_replay == value
        runtime = runtime_settings(settings, RunFolder(tmp_path))
        assert (option in runtime.server.extra_args) == value
        sampling = pickle.loads(pickle.dumps(RolloutPlan.of(settings))).sampling
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
