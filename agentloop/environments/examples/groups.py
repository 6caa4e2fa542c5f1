"""Groups of rollouts, one per task, as training uses them: ids, mask and log-probabilities.

The next task is taken from the source only when the servers' KV caches have capacity for it.
"""

from collections.abc import Sequence

import anyio

import agentloop

NUMBERS = range(37, 43)


async def main() -> None:
    questions = (f"What is {number} times 48?" for number in NUMBERS)  # lazily, as from a file
    async with agentloop.Runtime(progress=print) as runtime:
        async with runtime.groups(questions, size=8) as groups:
            async for group in groups:
                report(group.task, f"\\boxed{{{NUMBERS[group.index] * 48}}}", group.trajectories)


def report(question: str, answer: str, trajectories: Sequence[agentloop.Trajectory]) -> None:
    rewards = [
        float(trajectory.answer == answer)
        for trajectory in trajectories
        if not trajectory.stop_reason.is_unscorable  # no reward: it says nothing about the model
    ]
    sampled = sum(sum(trajectory.mask) for trajectory in trajectories)
    total = sum(len(trajectory.ids) for trajectory in trajectories)
    print(f"{question} rewards {rewards}, {sampled} of {total} ids sampled")


if __name__ == "__main__":
    anyio.run(main)
