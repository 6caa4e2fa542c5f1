"""Many rollouts of one task at once, as training wants them: ids, mask and log-probabilities."""

import anyio

import agentloop

QUESTION, ANSWER = "What is 37 times 48?", "\\boxed{1776}"


async def main() -> None:
    group: list[agentloop.Trajectory] = []

    async def one() -> None:
        group.append(await runtime.rollout(QUESTION))

    async with agentloop.Runtime(progress=print) as runtime:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(one)

    for trajectory in group:
        if trajectory.stop_reason.infrastructure:
            continue  # says nothing about the model: no reward
        reward = float(ANSWER in trajectory.text)
        sampled = sum(trajectory.mask)
        mean = sum(trajectory.logprobs) / sampled
        print(f"reward {reward:g}, {sampled} of {len(trajectory.ids)} ids sampled, {mean:.3f} mean")


if __name__ == "__main__":
    anyio.run(main)
