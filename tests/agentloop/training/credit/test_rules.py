"""Rules of credit assignment: a group's rewards to the advantages and weights of its tokens."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from agentloop.config import load_settings
from agentloop.errors import SettingsError
from agentloop.rollouts.record import ConversationRow, TokenCredit
from agentloop.training.credit.grpo import group_advantages
from agentloop.training.credit.rule import Aggregate, RewardedRollout, token_weights
from agentloop.training.credit.settings import RULES, CreditSettings, assign
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import Trajectory, Turn, TurnEnd

VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "loss.json").read_text("utf-8"))
FINITE = st.floats(-100, 100)
NAMES = st.sampled_from(sorted(name for name, rule in RULES.items() if not rule.needs_teacher))


def turn(num_tokens: int, reward: float | None = None, tokens: list[float] | None = None) -> Turn:
    return Turn(
        [5] * num_tokens,
        [-1.0] * num_tokens,
        observation_ids=[7],
        reward=reward,
        token_rewards=tokens or [],
    )


def rollout(reward: float, *turns: Turn) -> RewardedRollout:
    return RewardedRollout(reward, [Trajectory("", [1], list(turns))])


def advantages(
    group: list[RewardedRollout], name: str = "per_turn", *, seed: int = 0, **args: Any
) -> list[Any]:
    """Return the advantages of the tokens of each rollout's only trajectory."""
    credit = CreditSettings.model_validate({"name": name, "args": args})
    return [
        single.advantages
        if isinstance(single.advantages, list)
        else [single.advantages] * rollout.trajectories[0].num_sampled_tokens
        for rollout, (single,) in zip(group, assign(group, credit, Random(seed)), strict=True)
    ]


@st.composite
def groups(draw: st.DrawFn, *, turn_rewards: bool = True) -> list[RewardedRollout]:
    """Return groups whose rollouts have one or more trajectories of different lengths."""
    rewards = st.none() | FINITE if turn_rewards else st.none()
    turns = st.lists(st.builds(turn, st.integers(1, 4), rewards), min_size=1, max_size=3)
    made = turns.map(lambda some: Trajectory("", [1], some))
    trajectories = st.lists(made, min_size=1, max_size=2)
    return draw(st.lists(st.builds(RewardedRollout, FINITE, trajectories), max_size=5))


@pytest.mark.parametrize("vector", VECTORS["advantages"])
def test_advantages_within_a_group(vector: dict[str, Any]) -> None:
    assert group_advantages(vector["rewards"]) == pytest.approx(vector["advantages"])


def test_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, math.nan])


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6],
        [0.1 + 0.2 - 0.3, 0.0, 0.3 - 0.2 - 0.1],
        [3e6 + 0.1, 3e6 + 0.1 + 1e-9, 3e6 + 0.1],
    ],
)
def test_rewards_equal_but_for_rounding_have_no_advantage(rewards: list[float]) -> None:
    assert len(set(rewards)) > 1
    assert group_advantages(rewards) == [0.0] * len(rewards)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_small_differences_of_rewards_are_a_signal(scale: float) -> None:
    advantages = group_advantages([scale, 1.01 * scale])
    assert advantages == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=0.2)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_all_tokens_of_a_rollout_have_its_advantage(name: str) -> None:
    group = [rollout(1.0, turn(2, 9.0), turn(3)), rollout(0.0, turn(1))]
    first, second = group_advantages([1.0, 0.0])
    assert advantages(group, name) == [[first] * 5, [second]]


@pytest.mark.parametrize(
    ("name", "objective", "aggregate"),
    [
        ("grpo", "grpo", "group"),
        ("gspo", "gspo", "sequence"),
        ("cispo", "cispo", "group"),
        ("per_turn", "grpo", "group"),
    ],
)
def test_rules_name_learners_objective_and_mean(name: str, objective: str, aggregate: str) -> None:
    rule = CreditSettings(name=name).rule
    assert (rule.objective, rule.aggregate) == (objective, aggregate)


# --- turns ----------------------------------------------------------------------------------------


@given(groups(turn_rewards=False))
@hypothesis_settings(deadline=None)
def test_without_rewards_of_turns_per_turn_credit_is_grpo(group: list[RewardedRollout]) -> None:
    assert assign(group, CreditSettings(name="per_turn"), Random(0)) == assign(
        group, CreditSettings(), Random(0)
    )


def test_turn_gets_its_reward_and_those_of_later_turns() -> None:
    """Two rollouts: (1 - 0) / std is 0.7071 for two rewards that differ."""
    high = 0.7071
    group = [rollout(0.0, turn(1, 1.0), turn(2, 2.0)), rollout(0.0, turn(2, 1.0), turn(1, 0.0))]
    assert advantages(group) == [
        pytest.approx([high] * 3, abs=1e-4),
        pytest.approx([-high] * 3, abs=1e-4),
    ]
    assert advantages(group, discount=0.0) == [  # the first turns are equally good
        pytest.approx([0.0, high, high], abs=1e-4),
        pytest.approx([0.0, 0.0, -high], abs=1e-4),
    ]


def test_reward_of_the_rollout_counts_beside_those_of_its_turns() -> None:
    group = [rollout(1.0, turn(1, 0.0), turn(1)), rollout(0.0, turn(1, 1.0), turn(1))]
    first, second = advantages(group, discount=0.0)
    assert first == pytest.approx([0.0, 0.7071], abs=1e-4)
    assert second == pytest.approx([0.0, -0.7071], abs=1e-4)


def test_turn_reached_by_a_single_rollout_has_no_baseline() -> None:
    group = [rollout(0.0, turn(1), turn(2, 5.0)), rollout(0.0, turn(1))]
    assert advantages(group, discount=0.0)[0] == [0.0] * 3
    assert advantages(group)[0] == pytest.approx([0.7071, 0, 0], abs=1e-4)  # the turn before it


def test_token_rewards_are_added_as_they_are() -> None:
    group = [rollout(0.0, turn(1), turn(2, tokens=[0.5, -0.25])), rollout(0.0, turn(1))]
    assert advantages(group) == [[0.0, 0.5, -0.25], [0.0]]
    assert advantages(group, "grpo") == [[0.0] * 3, [0.0]]


@given(groups(), st.floats(0, 1))
@hypothesis_settings(deadline=None)
def test_advantages_of_each_turn_of_a_group_sum_to_zero(
    group: list[RewardedRollout], discount: float
) -> None:
    """For the turns that all rollouts reach, since the rollouts' own advantages do as well."""
    credit = CreditSettings(name="per_turn", args={"discount": discount})
    first = [
        single.advantages[0] if isinstance(single.advantages, list) else single.advantages
        for single, *_ in assign(group, credit, Random(0))
    ]
    assert math.fsum(first) == pytest.approx(0, abs=1e-3)


def test_turns_are_compared_with_those_of_the_same_conversation() -> None:
    """The last rollout lacks its first conversation, whose rewards are larger."""

    def two(reward: float) -> RewardedRollout:
        conversations = [Trajectory("", [1], [turn(1, 10 + reward)])]
        conversations.append(Trajectory("", [1], [turn(1, reward)]))
        return RewardedRollout(0.0, conversations, names=["", "+1"])

    second = Trajectory("", [1], [turn(1, 3.0)])
    group = [two(0.0), two(1.0), two(2.0), RewardedRollout(0.0, [second], names=["+1"])]
    credits = assign(group, CreditSettings(name="per_turn"), Random(0))
    assert [of_rollout[-1].advantages for of_rollout in credits] == pytest.approx(
        group_advantages([0.0, 1.0, 2.0, 3.0])
    )


def test_cut_thought_belongs_to_its_message() -> None:
    def two_messages(index: int, *, is_cut: bool) -> RewardedRollout:
        thought = replace(turn(2), end=TurnEnd.THOUGHT)
        first = [thought, turn(2, float(index))] if is_cut else [turn(4, float(index))]
        return rollout(1.0, *first, turn(1, 10.0 * index))

    complete = [two_messages(index, is_cut=False) for index in range(4)]
    cut = [*complete[:3], two_messages(3, is_cut=True)]
    for discount in (0.0, 0.5):
        assert advantages(cut, discount=discount) == advantages(complete, discount=discount)


def of_conversations(*conversations: tuple[int, str, float]) -> RewardedRollout:
    """Return a rollout of conversations of one turn, each with its first id, name and reward."""
    return RewardedRollout(
        0.0,
        [Trajectory("", [id], [turn(1, reward)]) for id, _, reward in conversations],
        names=[name for _, name, _ in conversations],
    )


def by_conversation(group: list[RewardedRollout]) -> list[dict[int, float]]:
    """Return the advantages of conversations by their first ids, of each rollout."""
    credits = assign(group, CreditSettings(name="per_turn"), Random(0))
    return [
        {
            trajectory.prompt_ids[0]: credit.mean_advantage
            for trajectory, credit in zip(rollout.trajectories, of_rollout, strict=True)
        }
        for rollout, of_rollout in zip(group, credits, strict=True)
    ]


def test_conversations_that_begin_alike_are_compared() -> None:
    """In the last rollout the two begin in the other order, or the first one is missing."""
    alike = [of_conversations((1, "+1", n), (2, "+2", 10.0 * n)) for n in range(3)]
    for names in (("+1", "+2"), ("+2", "+1"), ("+2", "+3")):
        last = of_conversations((1, names[0], 3.0), (2, names[1], 30.0))
        expected = group_advantages([0.0, 1.0, 2.0, 3.0])
        result = by_conversation([*alike, last])
        assert [of[1] for of in result] == pytest.approx(expected)
        assert [of[2] for of in result] == pytest.approx(expected)
    result = by_conversation([*alike, of_conversations((2, "+1", 30.0))])
    assert [of[2] for of in result] == pytest.approx(expected)


def test_other_conversations_are_compared_by_name() -> None:
    """Such as with the model's own answer in the prompt, which some rollouts may share."""
    expected = group_advantages([0.0, 1.0, 2.0, 3.0])
    for prompts in ([10, 11, 12, 13], [10, 10, 11, 11], [10, 10, 10, 11]):
        group = [
            of_conversations((1, "", 0.0), (prompt, "check", float(n)), (n + 20, "sum", 9.0 * n))
            for n, prompt in enumerate(prompts)
        ]
        result = by_conversation(group)
        assert [of[p] for of, p in zip(result, prompts, strict=True)] == pytest.approx(expected)
        assert [of[n + 20] for n, of in enumerate(result)] == pytest.approx(expected)


def test_token_rewards_of_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zip\(\)"):
        advantages([rollout(0.0, turn(2, tokens=[1.0, 2.0, 3.0])), rollout(0.0, turn(1))])


@pytest.mark.parametrize(
    "group",
    [
        [rollout(float(n), turn(2)) for n in range(4)],
        [rollout(0.0, *[turn(1, 1.0)] * (n + 1)) for n in range(4)],  # longer is better
        [rollout(0.0, turn(2, tokens=[1.0, 1.0] if n else None)) for n in range(4)],
    ],
    ids=["rollouts", "turns", "tokens"],
)
def test_shuffled_rewards_teach_nothing_on_average(group: list[RewardedRollout]) -> None:
    """The advantages of each kind are the same, but say nothing about the token that has them."""
    straight = advantages(group)
    shuffled = [advantages(group, seed=seed, shuffle_rewards=True) for seed in range(400)]
    for single in shuffled:
        assert sorted(chain(*single)) == pytest.approx(sorted(chain(*straight)))
    first_tokens = [[of_rollout[0] for of_rollout in single] for single in shuffled]
    means = [math.fsum(column) / len(shuffled) for column in zip(*first_tokens, strict=True)]
    assert max(means) - min(means) < 0.3 < max(map(max, straight)) - min(map(min, straight))


# --- weights --------------------------------------------------------------------------------------


@given(groups(), NAMES)
@hypothesis_settings(deadline=None)
def test_each_sampled_token_has_credit(group: list[RewardedRollout], name: str) -> None:
    for single, credits in zip(
        group, assign(group, CreditSettings(name=name), Random(0)), strict=True
    ):
        for trajectory, credit in zip(single.trajectories, credits, strict=True):
            if isinstance(credit.advantages, list):
                assert len(credit.advantages) == trajectory.num_sampled_tokens


@given(groups())
@hypothesis_settings(deadline=None)
def test_weights_of_a_group(group: list[RewardedRollout]) -> None:
    """A group, a trajectory or a token counts as 1."""
    trajectories = [single for rollout in group for single in rollout.trajectories]
    num_tokens = [single.num_sampled_tokens for single in trajectories]
    totals: dict[Aggregate, int] = {
        "group": min(1, len(group)),
        "sequence": len(trajectories),
        "batch": sum(num_tokens),
    }
    for method, total in totals.items():
        weights = [single for rollout in token_weights(group, method) for single in rollout]
        result = math.fsum(w * n for w, n in zip(weights, num_tokens, strict=True))
        assert result == pytest.approx(total)


# --- the way to the learner -----------------------------------------------------------------------


@given(st.lists(st.lists(FINITE, min_size=1, max_size=6), min_size=1, max_size=4))
@hypothesis_settings(deadline=None)
def test_credit_is_restored_from_the_journal_into_the_batch(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[list[float]]
) -> None:
    np = pytest.importorskip("numpy")
    load = pytest.importorskip("safetensors.numpy").load
    folder = tmp_path_factory.mktemp("journal")
    run = RunFolder(folder / "run", "")
    rows = [
        ConversationRow(
            rollout=index,
            trajectory=Trajectory("", [1, 2], [turn(len(rewards), rewards[0], rewards)]),
            credit=TokenCredit.of(rewards, 0.25),
        )
        for index, rewards in enumerate(tokens)
    ]
    path, _ = run.add_group(1, [row.to_dict() for row in rows])
    read = run.read_conversations(path)
    assert read == rows
    samples = []
    for row in read:
        assert row.credit is not None
        parts = row.trajectory.ids, row.trajectory.mask, row.trajectory.logprobs
        samples.append(Sample(*parts, row.credit.advantages, 0, row.credit.weights))
    write_batch(folder / "batch", samples)
    batch = load((folder / "batch").read_bytes())
    sampled = batch["mask"] == 1
    flat = np.concatenate([np.asarray(some, np.float32) for some in tokens])
    assert batch["advantages"][sampled].tolist() == flat.tolist()
    assert set(batch["weights"][sampled].tolist()) == {0.25}
    assert not batch["advantages"][~sampled].any()
    assert not batch["weights"][~sampled].any()


def test_credit_is_summed_up_for_people() -> None:
    assert TokenCredit.of([0.5, 0.5], 1.0) == TokenCredit(0.5, 1.0)
    assert TokenCredit.of([1.0, 0.0], 1.0).mean_advantage == 0.5
    assert TokenCredit.of([1.0, -1.0], 1.0).has_signal
    assert not TokenCredit.of([0.0, 0.0], 1.0).has_signal
    assert not TokenCredit.of([], 1.0).has_signal
    with pytest.raises(ValueError, match="not finite"):
        TokenCredit.of([math.inf], 1.0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"discount": 2}, "credit|discount: Input should be less than or equal to 1"),
        ({"discont": 1}, "discont: Extra inputs .* .arguments of per_turn: .*discount"),
        ({"aggregate": "tokens"}, "aggregate: Input should be 'group', 'batch' or 'sequence'"),
    ],
)
def test_invalid_arguments_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CreditSettings(name="per_turn", args=args)


def test_short_form(tmp_path: Path) -> None:
    from agentloop.training.plan.settings import TrainSettings

    file = tmp_path / "recipe.toml"
    file.write_text('credit = "per_turn"\n')
    assert load_settings(TrainSettings, [file]).credit.name == "per_turn"
    made = load_settings(TrainSettings, [file], ["credit.args.discount=0.5"])
    assert made.credit.arguments.model_dump()["discount"] == 0.5
    with pytest.raises(SettingsError, match=r"credit.name: .*'grpo'.*, not 'ppo'"):
        load_settings(TrainSettings, [file], ["credit=ppo"])


def test_settings_of_other_sections_are_checked_against_the_rule() -> None:
    assert [*CreditSettings().problems(temperature=0.7, clip_low=0.2)] == []
    assert [*CreditSettings(name="cispo").problems(temperature=1.0, clip_low=5.0)] == []
    (problem,) = CreditSettings(name="gspo").problems(temperature=1.0, clip_low=5.0)
    assert "learner.loss.clip_low: 5 must be at most 1" in problem
    distill = CreditSettings(name="distill", args={"teacher": "http://127.0.0.1:1"})
    temperature, clip_low = distill.problems(temperature=0.7, clip_low=5.0)
    assert "sampling.temperature: 0.7 must be 1" in temperature
    assert "learner.loss.clip_low: 5" in clip_low
