"""Events of a small training run: two groups of two rollouts, two steps."""

from __future__ import annotations

from typing import Any

from agentloop.events import (
    CallFinished,
    CallStarted,
    Event,
    GroupFinished,
    GroupStarted,
    Measured,
    RolloutAbandoned,
    RolloutFinished,
    RolloutScored,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
    WeightsLoaded,
)
from agentloop.inference.scheduling.placement import Decision
from agentloop.trajectory import (
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
    VersionSpan,
)

BEGUN_UNIX_S = 1_790_000_000.5
SERVER = "http://127.0.0.1:30000"
WHY = Decision(None, "kv", "the cheapest", ())

STEP_ROW: dict[str, Any] = {
    "step": 1,
    "stage": 1,
    "version": 0,
    "reward": 0.5,
    "pass_at_k": 1.0,
    "tool_errors_in_correct": None,
    "truncated": 0.25,
    "length_mean": 7.5,
    "turns_mean": 2.0,
    "versions_mean": 1.0,
    "num_rollouts": 4,
    "num_without_reward": 1,
    "num_groups_rejected": 1,
    "num_groups_replaced": 0,
    "num_sampled_tokens": 30,
    "staleness_mean": 0.5,
    "staleness_max": 1,
    "curriculum/num_tasks": 40,
    "curriculum/num_retired": 12,
    "curriculum/solve_rate": 0.5,
    "wait_s": 3.0,
    "num_learned": 2,
    "learn_s": 2.0,
    "sync_s": 0.5,
    "step_s": 6.0,
    "loop_lag_s": 0.004,
    "learner/loss": -0.01,
    "learner/entropy": 0.7,
    "learner/mismatch_kl": 0.001,
    "learner/grad_norm": 1.5,
    "learner/lr": 1e-6,
    "learner/clipped": 0.01,
    "learner/tis_capped": 0.0,
    "learner/mfu": 0.4,
    "learner/peak_memory_gib": 2.0,
    "learner/num_tokens": 15,
    "learner/skipped": 0,
}
HELD_OUT_ROW: dict[str, Any] = {
    "step": 1, "held_out/reward": 0.75, "held_out/pass_at_k": 0.75,
    "held_out/tool_errors_in_correct": 0.1, "held_out/truncated": 0.0, "held_out/length_mean": 9.0,
    "held_out/turns_mean": 2.5,
}  # fmt: skip


def trajectory(key: str = "1-task.0", *, infrastructure: bool = False) -> Trajectory:
    """Return two turns: one with a failing and a made-up call, and one with the answer."""
    call = ToolCall("c0", "python", {"code": "1/0"}, '{"code": "1/0"}', 0, 3)
    made_up = ToolCall("c1", "rm -rf", {}, "{}", 3, 4)
    first = Turn(
        output_ids=[11, 12, 13, 14],
        logprobs=[-0.1, -0.2, -0.3, -0.4],
        versions=[VersionSpan("6", 0, 2), VersionSpan("7", 2, 4)],
        end=TurnEnd.STOP,
        calls=[call, made_up],
        results=[
            ToolResult("c0", "python", ToolCallStatus.ERROR, "ZeroDivisionError", 1.5, 1.75, 2.5),
            ToolResult("c1", "rm -rf", ToolCallStatus.UNKNOWN_TOOL, "no such tool", 2.0, 2.0, 2.0),
        ],
        observation_ids=[21, 22],
        text="I compute <tool_call>...</tool_call>",
        servers=["http://127.0.0.1:30001", SERVER],
        cached_tokens=2,
        started_s=0.5,
        first_token_s=1.0,
        generated_s=2.25,
        ended_s=2.5,
    )
    second = Turn(
        output_ids=[15, 16],
        logprobs=[-0.1, -0.2],
        versions=[VersionSpan("7", 0, 2)],
        end=TurnEnd.ABORT if infrastructure else TurnEnd.STOP,
        text="1776",
        servers=[SERVER],
        cached_tokens=9,
        started_s=2.5,
        first_token_s=2.75,
        generated_s=3.0,
        ended_s=3.0,
    )
    return Trajectory(
        key,
        [1, 2, 3, 4, 5],
        [first, second],
        StopReason.INFRASTRUCTURE if infrastructure else StopReason.ANSWERED,
        "the server has gone" if infrastructure else None,
        BEGUN_UNIX_S,
        3.0,
    )


def of_rollout(record: Trajectory, group: str = "") -> list[Event]:
    """Return the events of a rollout from start to end."""
    key = record.id
    events: list[Event] = [RolloutStarted(record, group)]
    for index, turn in enumerate(record):
        events += [TurnStarted(key, index), TurnPlaced(key, index, turn.servers[0], WHY)]
        if len(turn.servers) > 1:
            events.append(TurnMoved(key, turn.servers[0], "it died"))
            events.append(TurnPlaced(key, index, turn.servers[1], WHY))
        events += [TokensSampled(key, index, [token], "") for token in turn.output_ids]
        events += [CallStarted(key, index, call) for call in turn.calls]
        events.append(TurnSampled(key, index))
        events += [CallFinished(key, index, result) for result in turn.results]
        events.append(TurnFinished(key, index, turn))
    return [*events, RolloutFinished(key, record)]


def run() -> list[Event]:
    """Return at least one event of each kind."""
    events: list[Event] = [WeightsLoaded("7", 1.25, [SERVER], ["http://127.0.0.1:30001"])]
    events.append(GroupStarted("1-task", "task", "What is 37 times 48?", "1776", 2))
    for index, reward in enumerate([1.0, 0.0]):
        record = trajectory(f"1-task.{index}")
        events += of_rollout(record, "1-task")
        events.append(
            RolloutScored(record.id, reward, "1776", "equal" if reward else "another", 0.25)
        )
    kept = {"1-task.0": 1.0, "1-task.1": -1.0}
    events.append(GroupFinished("1-task", kept, {}, 0.5, True))
    events.append(GroupStarted("2-task", "task", "What is 2 plus 2?", "4", 2))
    broken = trajectory("2-task.0", infrastructure=True)
    events += of_rollout(broken, "2-task")
    events.append(RolloutScored(broken.id, None, None, "infrastructure", 0.0))
    events.append(RolloutStarted(Trajectory("2-task.1", [1, 2]), "2-task"))
    events.append(TurnStarted("2-task.1", 0))
    events.append(RolloutAbandoned("2-task.1"))
    events.append(GroupFinished("2-task", {}, {"2-task.0": "infrastructure"}, None, False))
    events += [GroupStarted("3-task", "task", "", None, 2), GroupFinished("3-task")]
    events += [Measured(STEP_ROW), Measured(HELD_OUT_ROW)]
    return events
