"""Reinforcement learning in one asynchronous loop: python minimal_rl.py [STEPS]

    questions ──> groups of rollouts ──> a batch ──> a step of the learner ──> new weights
                     ▲    SGLang, a tool                DeepSpeed                  │
                     └────────────── rollouts go on meanwhile <────────────────────┘

The small model that comes with agentloop misspells the name of this tool in every other rollout,
and learns to copy it. `agentloop train` is this loop with a journal from which a killed run
continues, evaluation, checkpoints, restarts, and a page. Only the runtime's interface is public:
what is imported from `agentloop.training` may change.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

import agentloop
from agentloop.models import SMALL
from agentloop.training.credit.grpo import group_advantages
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.learner_client.client import KeptLearner, Learner
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.protocol import StepRequest
from agentloop.training.learner_client.settings import LearnerSettings, RlLearnerSettings
from agentloop.training.weight_sync.disk import FolderPublisher
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served

GROUPS_PER_STEP, GROUP_SIZE = 8, 16
MAX_STALENESS = 2  # steps between the weights that sampled a group and those that are trained
LEARNER = {"optimizer": {"lr": 1e-4}, "publish_dtype": "float32"}


def multiply_exactly(first_number: int, second_number: int) -> int:
    """Multiply two integers."""
    return first_number * second_number


def questions() -> Iterator[str]:
    rng = random.Random(0)
    while True:
        yield f"What is {rng.randint(11, 99)} times {rng.randint(11, 99)}?"


def reward(question: str, trajectory: agentloop.Trajectory) -> float:
    first, second = (int(word) for word in question.strip("?").split() if word.isdigit())
    return float(trajectory.answer == f"\\boxed{{{first * second}}}")


def oldest_version(trajectories: Sequence[agentloop.Trajectory]) -> int:
    """Return the oldest version of the weights that sampled a token; 0: the model as it came."""
    names = {name for trajectory in trajectories for name in trajectory.versions if name}
    return min((int(name) if name.isdigit() else 0 for name in names), default=0)


async def main(num_steps: int, folder: Path) -> None:
    settings = LearnerSettings.of(
        RlLearnerSettings.model_validate(LEARNER), model=SMALL, chat_template=None
    )
    async with (
        agentloop.Runtime(progress=print) as runtime,
        KeptLearner(settings, RanksSettings(), log_dir=folder, on_progress=print) as learner,
        runtime.groups(
            questions(),
            size=GROUP_SIZE,
            max_open=2 * GROUPS_PER_STEP,
            tools=[multiply_exactly],
            budget=agentloop.Budget(max_turns=3, max_response_tokens=200),
        ) as groups,
    ):
        publisher = FolderPublisher(learner, folder / "weights", WeightsSettings())
        servers = Served(runtime.router)
        step = 0
        batch: list[Sample] = []
        rewards: list[float] = []
        async for group in groups:
            rollouts = [t for t in group.trajectories if not t.stop_reason.is_unscorable]
            if not rollouts or step - oldest_version(rollouts) > MAX_STALENESS:
                continue
            scores = [reward(group.task, rollout) for rollout in rollouts]
            rewards += scores
            for rollout, advantage in zip(rollouts, group_advantages(scores), strict=True):
                tokens = rollout.ids, rollout.mask, rollout.logprobs
                batch.append(Sample(*tokens, advantage, group.index))
            if len({sample.group for sample in batch}) < GROUPS_PER_STEP:
                continue
            step += 1
            loss = await train(learner, batch, folder / "batch.safetensors")
            published = await publisher.publish(str(step), timeout_s=60)
            await servers.sync(published, timeout_s=60)
            await publisher.tidy()
            print(f"step {step}: reward {sum(rewards) / len(rewards):.3f}, loss {loss:.4f}")
            batch, rewards = [], []
            if step == num_steps:
                break


async def train(learner: Learner, batch: Sequence[Sample], path: Path) -> float:
    await anyio.to_thread.run_sync(write_batch, path, batch)
    reply = await learner.ask(StepRequest(batch=path), timeout_s=600)
    return reply.loss or 0.0


if __name__ == "__main__":
    with TemporaryDirectory(prefix="minimal-rl-") as temporary:
        anyio.run(main, int(sys.argv[1]) if sys.argv[1:] else 8, Path(temporary))
