"""Per-turn credit: rewards of single turns beside the rollout's own. Pure.

An environment may reward turns (`Turn.reward`) and tokens (`Turn.token_rewards`). The advantage of
a token of message t of rollout i is

    A_i + (G_it - mean_t) / (std_t + 1e-6) + its own reward

    A_i     GRPO's advantage of the rollout's reward
    G_it    the sum over the messages k from t on of discount^(k - t) r_ik; r_ik is the reward of
            its turn, of all of its turns if a thought has reached its limit; none counts as 0
    mean_t, std_t
            over the group's rollouts that reach message t; if there is only one, or all of their
            G_t are equal, the term is 0

Messages are compared with those of the same number, as in MT-GRPO (arXiv 2505.11821), in the
counterpart of the conversation where a rollout has several (`counterparts`), and the two advantages
are added, as in GiGPO (arXiv 2505.10978). With a discount of 0 each message gets its own reward
alone; with 1, the default, also all later ones. Token rewards are not normalised: they are on the
scale of advantages, whose standard deviation is 1. Without rewards of turns and tokens this is
GRPO.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from random import Random

import pydantic

from agentloop.training.credit.grpo import group_advantages
from agentloop.training.credit.rule import Advantages, CreditArguments, CreditRule, RewardedRollout
from agentloop.trajectory import Trajectory, TurnEnd


class PerTurnArguments(CreditArguments):
    """Arguments of per-turn credit.

    Attributes:
        discount: factor by which a turn's reward counts less for each earlier turn.
    """

    discount: float = pydantic.Field(1.0, ge=0, le=1)


def returns_to_go(trajectory: Trajectory, discount: float) -> list[float]:
    """Return, for each message of the model, the discounted sum of its rewards and of later ones.

    A message is one turn, or several if a thought in it has reached its limit.
    """
    rewards: list[float] = []
    begins = True
    for turn in trajectory:
        if begins:
            rewards.append(0.0)
        rewards[-1] += turn.reward or 0.0
        begins = turn.end is not TurnEnd.THOUGHT
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + discount * total
        returns.append(total)
    return returns[::-1]


def counterparts(group: Sequence[RewardedRollout]) -> list[dict[int, int]]:
    """Return the conversations that are compared: of each rollout the place of one, at most.

    Those that begin alike are counterparts: with the same ids before their first turn and, where a
    rollout has several such conversations, with the same name. Classes of the same name of which no
    rollout is in both are one: their prompts say what differs from rollout to rollout.
    """
    prompts = [[tuple(each.prompt_ids) for each in rollout.trajectories] for rollout in group]
    repeated = {
        prompt for of_rollout in prompts for prompt, num in Counter(of_rollout).items() if num > 1
    }
    classes: dict[object, tuple[str | int, dict[int, int]]] = {}
    for number, rollout in enumerate(group):
        for place, prompt in enumerate(prompts[number]):
            name: str | int = rollout.names[place] if rollout.names else place
            key = prompt, name if prompt in repeated else None
            _, members = classes.setdefault(key, (name, {}))
            members[number] = place
    merged: dict[str | int, list[dict[int, int]]] = defaultdict(list)
    for name_of_class, members in classes.values():
        for earlier in merged[name_of_class]:
            if members.keys().isdisjoint(earlier):
                earlier |= members
                break
        else:
            merged[name_of_class].append(members)
    return [members for of_name in merged.values() for members in of_name]


def turn_advantages(
    group: Sequence[RewardedRollout], arguments: PerTurnArguments, shuffler: Random | None = None
) -> list[list[list[float]]]:
    """Return the advantage of each message, by rollout and trajectory, without the rollout's."""
    returns = [
        [returns_to_go(trajectory, arguments.discount) for trajectory in rollout.trajectories]
        for rollout in group
    ]
    for members in counterparts(group):
        conversations = [returns[number][place] for number, place in members.items()]
        for message in range(max(map(len, conversations))):
            reaching = [each for each in conversations if message < len(each)]
            scores = group_advantages([each[message] for each in reaching], shuffler)
            for conversation, score in zip(reaching, scores, strict=True):
                conversation[message] = score
    return returns


def _advantages(
    group: Sequence[RewardedRollout], arguments: PerTurnArguments, shuffler: Random | None
) -> Advantages:
    outcomes = group_advantages([rollout.reward for rollout in group], shuffler)
    by_message = turn_advantages(group, arguments, shuffler)
    token_rewards = _token_rewards(group, shuffler)
    return [
        [
            [
                outcome + score + reward
                for number, turn in enumerate(trajectory)
                for score in [scores[trajectory.message_of(number)]]
                for _, reward in zip(turn.output_ids, next(token_rewards), strict=True)
            ]
            for trajectory, scores in zip(rollout.trajectories, of_rollout, strict=True)
        ]
        for rollout, outcome, of_rollout in zip(group, outcomes, by_message, strict=True)
    ]


def _token_rewards(
    group: Sequence[RewardedRollout], shuffler: Random | None
) -> Iterator[list[float]]:
    """Yield the rewards of the sampled tokens of each turn; 0 if it has none."""
    turns = [
        turn.token_rewards or [0.0] * len(turn.output_ids)
        for rollout in group
        for trajectory in rollout.trajectories
        for turn in trajectory
    ]
    rewards = [reward for turn in turns for reward in turn]
    if shuffler is not None:
        shuffler.shuffle(rewards)
    shuffled = iter(rewards)
    for turn in turns:
        yield list(itertools.islice(shuffled, len(turn)))


RULE = CreditRule(_advantages, PerTurnArguments, uses_turn_rewards=True)
