"""A reward function: right answers count, and long rollouts count a little less.

agentloop evaluate --tasks tasks.jsonl reward.function=my_reward:right_and_short
"""

from agentloop import Trajectory
from agentloop.environments.rewards.answers import final_answer
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task

FREE_TOKENS = 100
PENALTY = 0.001  # for each further sampled token
LEAST = 0.1  # a right answer is always worth more than a wrong one


def right_and_short(trajectory: Trajectory, task: Task) -> Reward:
    """Return the reward of a rollout, with an explanation for people."""
    answer = final_answer(trajectory)
    if answer != task.answer:
        return Reward(0.0, answer, f"the answer is {task.answer}")
    excess = max(0, trajectory.num_sampled_tokens - FREE_TOKENS)
    value = max(LEAST, 1.0 - PENALTY * excess)
    return Reward(value, answer, f"right, with {trajectory.num_sampled_tokens} sampled tokens")
