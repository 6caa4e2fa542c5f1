"""Groups of rollouts: which of them have a reward, and which are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from agentloop.agent.rollout import Budget
from agentloop.environments.rewards.reward import Grader, Reward, RewardSettings
from agentloop.environments.tasks.sources import Task
from agentloop.errors import ServerError, ServerRefused, ServerUnavailable
from agentloop.events import Event, GroupFinished, GroupStarted
from agentloop.rollouts.metrics import about
from agentloop.rollouts.record import AgentRecord, ConversationRow, RolloutRecord
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.credit.grpo import group_advantages
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.rollouts import Rollouts
from agentloop.trajectory import StopReason, Trajectory, Turn, TurnEnd, VersionSpan
from tests.rollouts import GroupPlayer

TASK = Task("sum", "What is 1 plus 1?", "2")
BUDGET = Budget()


def trajectory(key: str, text: str, *, version: str = "3", **fields: Any) -> Trajectory:
    turn = Turn(
        output_ids=[1],
        logprobs=[-1.0],
        end=TurnEnd.STOP,
        text=text,
        versions=[VersionSpan(version, 0, 1)],
    )
    return Trajectory(key, [9], [turn], **{"stop_reason": StopReason.ANSWERED} | fields)


RIGHT = "\\boxed{2}"
WRONG = "\\boxed{3}"


class Group:
    """Runs groups that consist of these trajectories."""

    def __init__(self, trajectories: Sequence[Trajectory | RolloutRecord]) -> None:
        self.trajectories = trajectories
        self.error: Exception | None = None
        self.options: list[dict[str, Any]] = []

    async def __call__(
        self, prompt: object, **options: Any
    ) -> Sequence[Trajectory | RolloutRecord]:
        self.options.append(options)
        if self.error is not None:
            raise self.error
        return self.trajectories


async def rolled_out(
    group: Group,
    *,
    name: str = "1",
    purpose: Purpose = Purpose.TRAIN,
    events: list[Event] | None = None,
    oldest: int = 3,
    **settings: Any,
) -> Any:
    async with Grader(RewardSettings(function="exact")) as grader:
        emit = (events if events is not None else []).append
        rollouts = Rollouts(
            GroupRunner(GroupPlayer(group), grader, emit=emit),
            settings.pop("roc", RocSettings(down_sample_to_n=0)),
            seed=0,
            **settings,
        )
        size = len(group.trajectories)
        return await rollouts.run(GroupRequest(TASK, name, size, BUDGET, oldest, purpose))


async def test_rollout_that_failed_for_other_reasons_has_no_reward() -> None:
    group = Group(
        [
            trajectory("right", RIGHT),
            trajectory("wrong", WRONG),
            trajectory("straggler", RIGHT, stop_reason=StopReason.STRAGGLER),
            Trajectory("silent", [9], [], stop_reason=StopReason.TIME_BUDGET),
            trajectory("old", RIGHT, version="2"),
            trajectory("foreign", RIGHT, version="default"),
            trajectory("tainted", RIGHT),
            trajectory("broken", RIGHT, stop_reason=StopReason.INFRASTRUCTURE),
        ]
    )
    result = await rolled_out(group, is_tainted=lambda scored: scored.id == "tainted")
    rows = {row.trajectory.id: row for row in result.rows}
    assert {key: row.reward for key, row in rows.items()} == {
        "right": 1.0,
        "wrong": 0.0,
        **dict.fromkeys(["straggler", "silent", "old", "foreign", "tainted", "broken"]),
    }
    assert {key for key, row in rows.items() if row.advantage is not None} == {"right", "wrong"}
    assert rows["old"].reason == "sampled with other weights: 2"
    assert {key: row.no_reward for key, row in rows.items()} == {
        "right": None,
        "wrong": None,
        "straggler": "not_given",  # by the grader; a player says that it was stopped
        "silent": "not_sampled",
        **dict.fromkeys(["old", "foreign", "tainted"], "other_weights"),
        "broken": "infrastructure",
    }
    metrics = about([result.figures]).row()
    assert metrics["num_without_reward"] == 6
    assert metrics["without_reward/other_weights"] == 3
    assert result.figures.has_signal


async def test_equal_rewards_are_no_signal() -> None:
    result = await rolled_out(Group([trajectory(str(n), RIGHT) for n in range(4)]))
    assert not result.figures.has_signal
    assert [row.advantage for row in result.rows] == [None] * 4


async def rows_of(
    *records: RolloutRecord, name: str = "1", credit: CreditSettings | None = None
) -> dict[str, ConversationRow]:
    """Return the rows of a group by the trajectory's id."""
    async with Grader(RewardSettings(function="exact")) as grader:
        groups = GroupRunner(GroupPlayer(Group(records)), grader)
        rollouts = Rollouts(groups, RocSettings(down_sample_to_n=0), credit, seed=0)
        request = GroupRequest(TASK, name, len(records), BUDGET, 3, Purpose.TRAIN)
        result = await rollouts.run(request)
    return {row.trajectory.id: row for row in result.rows}


def advantages(rows: Mapping[str, ConversationRow]) -> dict[str, float]:
    """Return the mean advantages of the conversations that were selected."""
    return {key: row.advantage for key, row in rows.items() if row.advantage is not None}


def episode(key: str, reward: float | None, **with_other: AgentRecord) -> RolloutRecord:
    return RolloutRecord(key, [trajectory(key, "")], Reward(reward, None, ""), with_other)


async def test_each_agents_rewards_are_compared_among_its_own() -> None:
    def with_other(key: str, checks: float | None) -> dict[str, AgentRecord]:
        return {
            "checker": AgentRecord([trajectory(f"{key}+checker", "")], checks),
            "judge": AgentRecord([trajectory(f"{key}+judge", "")], is_trained=False),
            "player": AgentRecord([trajectory(f"{key}+player", "")]),
        }

    rows = await rows_of(
        episode("a", 1.0, **with_other("a", 0.0)),
        episode("b", 0.0, **with_other("b", 5.0)),
        episode("c", None, **with_other("c", 9.0)),
    )
    advantage = advantages(rows)
    assert advantage["a"] > 0 > advantage["b"]
    assert advantage["a"] == advantage["a+player"] == pytest.approx(advantage["b+checker"], 1e-4)
    assert advantage["b"] == advantage["b+player"] == pytest.approx(advantage["a+checker"], 1e-4)
    assert set(advantage) == {"a", "a+player", "a+checker", "b", "b+player", "b+checker"}
    assert {row.agent for row in rows.values()} == {"", "checker", "judge", "player"}


async def test_stopped_conversation_shifts_no_other() -> None:
    """Its counterparts are those of the same purpose, of which it was one."""

    def record(index: int) -> RolloutRecord:
        ids = [f"r.{index}{suffix}" for suffix in ("", "+1", "+2", "+3")]
        conversations = [trajectory(id, "") for id in ids]
        for number, conversation in enumerate(conversations):
            conversation.prompt_ids = [9, index, number]
            conversation.turns[0].reward = float(number * index)
        if index == 0:
            conversations[0].stop_reason = StopReason.ENVIRONMENT
        openings = dict(zip(ids, ["coder", "coder", "tester", "coder"], strict=True))
        if index == 1:  # the tester came last
            conversations[2:] = conversations[:1:-1]
        return RolloutRecord(f"r.{index}", conversations, Reward(0.0, None, ""), openings=openings)

    rows = await rows_of(*map(record, range(3)), credit=CreditSettings(name="per_turn"))
    for number in (1, 2, 3):
        result = [rows[f"r.{index}+{number}"].advantage for index in range(3)]
        assert result == pytest.approx(group_advantages([0.0, number, 2.0 * number]))


async def test_untrained_own_agent_gets_no_credit() -> None:
    records = [
        RolloutRecord(
            f"r.{index}",
            [trajectory(f"r.{index}", "")],
            Reward(float(index), None, ""),
            {"critic": AgentRecord([trajectory(f"r.{index}+critic", "")])},
            is_trained=False,
        )
        for index in range(2)
    ]
    rows = await rows_of(*records)
    assert {key for key, row in rows.items() if row.credit is not None} == {
        "r.0+critic",
        "r.1+critic",
    }


async def test_another_agent_may_learn_where_the_rollouts_are_all_alike() -> None:
    rows = await rows_of(
        episode("a", 1.0, checker=AgentRecord([trajectory("a+checker", "")], 1.0)),
        episode("b", 1.0, checker=AgentRecord([trajectory("b+checker", "")], 0.0)),
    )
    advantage = advantages(rows)
    assert set(advantage) == {"a+checker", "b+checker"}
    assert advantage["a+checker"] > 0 > advantage["b+checker"]


async def test_conversation_that_its_environment_stopped_is_not_trained_on() -> None:
    cut = trajectory("a+1", "", stop_reason=StopReason.ENVIRONMENT)
    first = episode("a", 1.0)
    first.trajectories = [*first.trajectories, cut]
    rows = await rows_of(first, episode("b", 0.0))
    assert set(advantages(rows)) == {"a", "b"}


async def test_stopped_conversation_does_not_change_later_baselines() -> None:
    """Each rollout has two conversations of one turn; the first one of the last is stopped."""
    episodes = []
    for number, key in enumerate("abcd"):
        first, second = trajectory(key, ""), trajectory(f"{key}+1", "")
        first.turns[0].reward, second.turns[0].reward = 10.0 + number, float(number)
        episodes.append(RolloutRecord(key, [first, second], Reward(1.0, None, "")))
    episodes[-1].trajectories[0].stop_reason = StopReason.ENVIRONMENT
    rows = await rows_of(*episodes, credit=CreditSettings(name="per_turn"))
    assert [rows[f"{key}+1"].advantage for key in "abcd"] == pytest.approx(
        group_advantages([0.0, 1.0, 2.0, 3.0])
    )


async def test_rewards_of_all_agents_are_shuffled() -> None:
    rows = {}
    for name in "abcdefgh":
        episodes = [
            episode(key, reward, checker=AgentRecord([trajectory(f"{key}+checker", "")], -reward))
            for key, reward in [("x", 0.0), ("y", 1.0), ("z", 2.0)]
        ]
        credit = CreditSettings(args={"shuffle_rewards": True})
        rows[name] = await rows_of(*episodes, name=name, credit=credit)
    for agent in ("", "+checker"):
        shuffled = [
            tuple(round(advantages(group)[key + agent], 3) for key in "xyz")
            for group in rows.values()
        ]
        assert {tuple(sorted(order)) for order in shuffled} == {(-1.0, 0.0, 1.0)}
        assert len(set(shuffled)) > 1
    assert rows["a"]["z"].reward == 2.0  # the record has the true ones


async def test_rollout_without_conversations_has_no_rows() -> None:
    idle = RolloutRecord("a", [], Reward(1.0, None, ""))
    rows = await rows_of(idle, episode("b", 0.0), episode("c", 1.0))
    assert set(rows) == {"b", "c"}
    assert advantages(rows)["c"] > 0 > advantages(rows)["b"]


async def test_selection_depends_on_the_name_alone() -> None:
    group = Group([trajectory(str(n), RIGHT if n % 2 else WRONG) for n in range(16)])
    kept = {
        name: [
            [row.advantage is not None for row in result.rows]
            for result in [
                await rolled_out(group, name=name, roc=RocSettings(down_sample_to_n=4))
                for _ in range(2)
            ]
        ]
        for name in "abcdef"
    }
    assert all(single == another for single, another in kept.values())
    assert len({tuple(single) for single, _ in kept.values()}) > 1


@pytest.mark.parametrize("purpose", Purpose)
async def test_events_say_whether_a_group_is_trained_on(purpose: Purpose) -> None:
    events: list[Event] = []
    group = Group([trajectory("a", RIGHT), trajectory("b", WRONG)])
    await rolled_out(group, purpose=purpose, events=events)
    (started,) = [single for single in events if isinstance(single, GroupStarted)]
    (finished,) = [single for single in events if isinstance(single, GroupFinished)]
    is_chosen = purpose is Purpose.TRAIN
    assert started.is_chosen == finished.is_chosen == is_chosen
    assert set(finished.kept) == ({"a", "b"} if is_chosen else set())
    assert finished.mean_reward == 0.5


async def test_group_that_fails_is_reported_as_finished() -> None:
    events: list[Event] = []
    group = Group([])
    group.error = ServerError("gone")
    with pytest.raises(ServerError):
        await rolled_out(group, events=events)
    assert [type(event) for event in events] == [GroupStarted, GroupFinished]


# --- credit ---------------------------------------------------------------------------------------


class Rewarding(Group):
    """Runs groups whose environment has rewarded single turns."""

    def __init__(self, rewards: Sequence[float | None]) -> None:
        made = [trajectory(str(n), RIGHT) for n in range(len(rewards))]
        super().__init__(made)
        for single, reward in zip(made, rewards, strict=True):
            single.turns[0].reward = reward


async def test_turns_that_an_environment_rewards_have_their_own_advantages() -> None:
    """The rollouts' own rewards are equal."""
    group = Rewarding([1.0, 0.0, None])
    result = await rolled_out(group, credit=CreditSettings(name="per_turn"))
    assert result.figures.has_signal
    assert [row.advantage for row in result.rows] == pytest.approx(
        group_advantages([1.0, 0.0, 0.0])
    )
    assert {row.credit.weights for row in result.rows} == {1 / 3}


async def test_rewards_of_turns_without_effect_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = await rolled_out(Rewarding([1.0, 0.0]))
    assert not result.figures.has_signal
    assert "does not use these rewards: set credit = per_turn" in caplog.text


DISTILL = CreditSettings(name="distill", args={"teacher": "http://teacher"})


class Judge:
    """A teacher that fails on some trajectories."""

    def __init__(self, failing: set[str] | None = None) -> None:
        self.failing = failing or set()
        self.asked: list[str] = []

    async def __call__(self, scored: Trajectory) -> list[float]:
        self.asked.append(scored.id)
        if scored.id in self.failing:
            raise ServerUnavailable("the teacher did not answer")
        return [-0.25] * scored.num_sampled_tokens


async def test_teacher_judges_all_rollouts_that_have_a_reward() -> None:
    broken = trajectory("broken", RIGHT, stop_reason=StopReason.INFRASTRUCTURE)
    group = Group([trajectory("right", RIGHT), trajectory("wrong", WRONG), broken])
    judge = Judge()
    result = await rolled_out(group, credit=DISTILL, teacher=judge, roc=RocSettings())
    assert sorted(judge.asked) == ["right", "wrong"]
    assert [row.advantage for row in result.rows] == [0.75, 0.75, None]  # from -1 to -0.25
    assert [row.reward for row in result.rows] == [1.0, 0.0, None]


async def test_rewards_may_count_beside_the_teacher() -> None:
    group = Group([trajectory("right", RIGHT), trajectory("wrong", WRONG)])
    credit = CreditSettings(name="distill", args={**DISTILL.args, "reward_coef": 2.0})
    result = await rolled_out(group, credit=credit, teacher=Judge())
    assert [row.advantage for row in result.rows] == pytest.approx(
        [0.75 + 2 * single for single in group_advantages([1.0, 0.0])]
    )


async def test_failing_teacher_leaves_no_reward_instead_of_zero() -> None:
    group = Group([trajectory("a", RIGHT), trajectory("b", RIGHT)])
    result = await rolled_out(group, credit=DISTILL, teacher=Judge({"b"}))
    assert [row.reward for row in result.rows] == [1.0, None]
    assert result.rows[1].reason == "infrastructure: the teacher did not answer"
    assert [row.advantage for row in result.rows] == [0.75, None]


async def test_teacher_that_fails_on_whole_group_is_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.training.rollouts._FIRST_PAUSE_S", 0)
    group, judge = Group([trajectory("a", RIGHT), trajectory("b", RIGHT)]), Judge({"a", "b"})
    with pytest.raises(ServerError, match=r"lost 5 times in a row: .*the teacher did not answer"):
        await rolled_out(group, credit=DISTILL, teacher=judge)
    assert len(judge.asked) == 5 * 2


async def test_rollout_that_the_teacher_refuses_has_no_reward() -> None:
    class Short(Judge):
        async def __call__(self, scored: Trajectory) -> list[float]:
            if scored.id in self.failing:
                raise ServerRefused("the input is longer than the context", status=400)
            return await super().__call__(scored)

    group = Group([trajectory("a", RIGHT), trajectory("b", RIGHT)])
    result = await rolled_out(group, credit=DISTILL, teacher=Short({"a", "b"}))
    assert [row.reward for row in result.rows] == [None, None]
    assert {row.reason for row in result.rows} == {
        "the teacher refuses it: the input is longer than the context"
    }


async def test_group_lost_to_the_infrastructure_is_rolled_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentloop.training.rollouts._FIRST_PAUSE_S", 0)

    class Recovering(Group):
        num_outages = 2

        async def __call__(
            self, prompt: object, **options: Any
        ) -> Sequence[Trajectory | RolloutRecord]:
            result = cast(Sequence[Trajectory], await super().__call__(prompt, **options))
            lost = StopReason.INFRASTRUCTURE if self.num_outages else StopReason.ANSWERED
            self.num_outages = max(0, self.num_outages - 1)
            return [replace(single, stop_reason=lost) for single in result]

    result = await rolled_out(Recovering([trajectory("a", RIGHT), trajectory("b", WRONG)]))
    assert [row.reward for row in result.rows] == [1.0, 0.0]


async def test_group_of_which_one_rollout_survives_is_no_outage() -> None:
    lost = trajectory("b", RIGHT, stop_reason=StopReason.INFRASTRUCTURE)
    result = await rolled_out(Group([trajectory("a", RIGHT), lost]), num_tries=1)
    assert [row.reward for row in result.rows] == [1.0, None]


async def test_evaluation_needs_no_teacher() -> None:
    judge = Judge()
    group = Group([trajectory("a", RIGHT), trajectory("b", WRONG)])
    result = await rolled_out(group, credit=DISTILL, teacher=judge, purpose=Purpose.EVALUATE)
    assert judge.asked == []
    assert [row.reward for row in result.rows] == [1.0, 0.0]
