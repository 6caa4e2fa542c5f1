"""`agentloop train --replay RUN`: repeat the learner's steps of a run, and compare the results.

A learner is started with the run's settings; no servers and no sandbox. The exit status is 1 if a
step differs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread

from agentloop.agent.tokenizer import load_tokenizer
from agentloop.cli import console
from agentloop.config import load_settings
from agentloop.launch.progress import ProgressLine
from agentloop.training.learner_client.client import KeptLearner
from agentloop.training.plan.settings import TrainSettings, learner_settings
from agentloop.training.recovery.learner_record import LearnerRecord
from agentloop.training.recovery.replay import Replay, ReplayedStep, Replayer
from agentloop.training.run.folder import config_of
from agentloop.training.run.token_difference import TokenDifferences
from agentloop.training.sft.run import require_learner


async def replay(run: Path, steps: tuple[int, int] | None) -> int:
    """Repeat the steps of a run, print how they compare, and return the exit status.

    Args:
        steps: the first and the last step, of which the tokens are compared, too; None: all.

    Raises:
        AgentLoopError: the run or something in it is missing, or the learner has failed.
    """
    settings = load_settings(TrainSettings, [config_of(run, "--replay")])
    if settings.sft is not None:
        settings = settings.model_copy(update={"model": str(run / "sft" / "model")})
    require_learner(settings.learner)
    changed: list[str] = []
    with ProgressLine("Reading the journal") as progress:

        @asynccontextmanager
        async def start(record: LearnerRecord) -> AsyncIterator[Replayer]:
            learner = record.learner(learner_settings(settings))
            ranks = record.ranks_of(settings.ranks)
            ranks.require_one_machine()
            async with KeptLearner(
                learner, ranks, log_dir=recorded_run.logs, on_progress=progress
            ) as started:
                current = (await started.about()).made_with
                changed[:] = differences(record.made_with, current)
                for line in changed:
                    progress.say(f"Other than in the run: {line}")
                yield Replayer(started, learner.max_sample_tokens)

        def tell(step: ReplayedStep) -> None:
            progress.say(step_line(step))

        async with Replay.open(run) as recorded_run:
            first, last = steps or (1, recorded_run.last)
            compared: list[tuple[int, TokenDifferences]] = []
            is_same = await recorded_run.repeat(
                start,
                first=first,
                last=last,
                timeout_s=settings.loop.step_timeout_s,
                on_step=tell,
                on_tokens=None if steps is None else lambda *tokens: compared.append(tokens),
                say=progress.say,
            )
    for step, tokens in compared:
        await _print_tokens(step, tokens, settings)
    if is_same:
        print(f"Steps {first} to {last} of {run} give the same results again.")
        return 0
    print("The first step with another result ends the replay. " + _reason(changed))
    return 1


def differences(recorded: Mapping[str, str], current: Mapping[str, str]) -> list[str]:
    """Return what differs between two machines, such as "torch 2.11.0, was 2.10.0"."""
    return [
        f"{name} {current.get(name, '?')}, was {recorded.get(name, '?')}"
        for name in sorted({*recorded, *current})
        if current.get(name) != recorded.get(name)
    ]


def step_line(step: ReplayedStep) -> str:
    """Return the line about a step."""
    weights = {True: "the same", False: "DIFFERENT", None: "no digest recorded"}
    text = f"weights: {weights[step.has_same_weights]} ({step.weights_again[:12]})"
    if step.has_same_weights is False:
        text += f", the run's: {(step.weights or '')[:12]}"
    if step.loss is None and step.loss_again is None:
        return f"step {step.step}: {text}"
    return f"step {step.step}: loss {_loss(step.loss)}, again {_loss(step.loss_again)}; {text}"


def _loss(loss: float | None) -> str:
    return "none" if loss is None else f"{loss!r}"


def _reason(changed: list[str]) -> str:
    if changed:
        return f"Other than in the run: {'; '.join(changed)}."
    return (
        "Packages, processor and threads are those that the run recorded, as far as it has: the "
        "model, the rollouts or the code may have changed, or an operation is not deterministic."
    )


async def _print_tokens(step: int, tokens: TokenDifferences, settings: TrainSettings) -> None:
    if not tokens.num:
        print(f"\nStep {step}: no tokens to compare")
        return
    model = learner_settings(settings).model
    tokenizer = await anyio.to_thread.run_sync(load_tokenizer, model)
    versions = ", ".join(f"{name} ({num:,})" for name, num in tokens.versions.items())
    print(
        f"\nStep {step}: log-probabilities of {tokens.num:,} tokens, sampled by version "
        f"{versions}; |learner - engine|: mean {tokens.mean:.3g}, p99 {tokens.p99:.3g}, "
        f"max {tokens.max:.3g}"
    )
    columns = ("token", "engine", "learner", "difference", "version", "position", "after")
    rows = [
        (
            console.printable(tokenizer.decode([token.id])),
            f"{token.engine:.6f}",
            f"{token.learner:.6f}",
            f"{token.difference:+.3g}",
            token.version or "?",
            f"{token.conversation}:{token.index}",
            console.printable(tokenizer.decode(list(token.before))),
        )
        for token in tokens.worst
    ]
    console.print_table(columns, rows, numbers=("engine", "learner", "difference"))
