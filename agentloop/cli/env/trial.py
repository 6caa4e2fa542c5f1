"""`agentloop env try`: run some rollouts of an environment; show transcripts, rewards and times.

tasks ──a rollout of each, all at once──> transcripts, rewards, failures, where the time went
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
import pydantic
from rich.console import Console
from rich.markup import escape

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import Budget
from agentloop.agent.threads import in_command_thread
from agentloop.aio import task_group
from agentloop.cli import console
from agentloop.cli.chat import Conversations, reward_in_words
from agentloop.cli.env.timing import Activity, Timeline, seconds_by_activity
from agentloop.cli.playing import PlaySettings, check_player, playing
from agentloop.config import load_settings
from agentloop.environments.mixture import RunEnvironment
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RequestError
from agentloop.evaluation.wiring import tasks_of
from agentloop.events import Event, RolloutFinished, RolloutStarted
from agentloop.launch.progress import ProgressLine
from agentloop.observe.watchdog import Heartbeat, watch_lag
from agentloop.rollouts.metrics import mean
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.run.status import count_of
from agentloop.trajectory import Trajectory


class TrySettings(PlaySettings):
    """The settings of `agentloop env try`, on top of those of a runtime."""

    num_rollouts: int = pydantic.Field(
        10, ge=1, le=1000, description="Number of rollouts, each of a different task."
    )


@dataclass(slots=True)
class _Trial:
    """A rollout of a task, with its events and its result."""

    task: Task
    events: list[Event] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    reward: Reward = field(default_factory=lambda: Reward(None, None, "it did not run"))
    recorded: Mapping[str, float] = field(default_factory=dict)
    started_s: float = 0.0
    ended_s: float = 0.0

    def on_event(self, event: Event) -> None:
        self.timeline.on_event(event)
        self.events.append(event)

    @property
    def figures(self) -> dict[str, float]:
        """The parts of the reward, and what the environment has recorded besides."""
        return {**self.reward.parts, **self.recorded}

    @property
    def records(self) -> list[Trajectory]:
        """The conversations, including those that were cut off."""
        return [event.record for event in self.events if isinstance(event, RolloutStarted)]

    @property
    def seconds(self) -> dict[Activity, float]:
        return seconds_by_activity(self.timeline.spans, self.started_s, self.ended_s)

    @property
    def num_tokens(self) -> int | None:
        """The sampled tokens, by the endpoint's count if there is one; None: it is unknown."""
        counted = {
            event.rollout_id: event.num_tokens
            for event in self.events
            if isinstance(event, RolloutFinished) and event.num_tokens is not None
        }
        if any(record.id not in counted and not record.has_ids for record in self.records):
            return None
        return sum(counted.get(record.id, record.num_sampled_tokens) for record in self.records)

    async def run(self, groups: GroupRunner, budget: Budget, name: str) -> None:
        """Run the rollout; a failure becomes the reason of a missing reward."""
        self.started_s = time.monotonic()
        try:
            group = await groups.run(GroupRequest(self.task, name, 1, budget))
            (self.reward,) = group.rewards
            self.recorded = group.rollouts[0].recorded
        except RequestError as error:
            self.reward = Reward(None, None, str(error))
        finally:
            self.ended_s = time.monotonic()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop env try",
        description="Run ten rollouts of an environment. Show their transcripts, their rewards "
        "with all parts, the reasons for missing rewards, and where the time went. Exits with "
        "status 1 if a rollout has no reward.",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="module:function, or a name listed by `env list`"
    )
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="let the tasks' own solutions play, without a model (env.args.oracle=true)",
    )
    console.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(console.settings_text(TrySettings))
        return 0
    if options.name is None or "=" in options.name:
        parser.error("expected the NAME of an environment first")
    work = partial(_try, options.name, options.settings, options.oracle)
    return console.run(work, explain=options.explain)


async def _try(name: str, arguments: list[str], has_oracle: bool) -> int:
    files, overrides = console.split_settings(arguments)
    named = [f"env.name={json.dumps(name)}", *(["env.args.oracle=true"] if has_oracle else [])]
    settings = load_settings(TrySettings, files, [*overrides, *named])
    environment = RunEnvironment("", settings.env, settings.tasks)
    tasks = await in_command_thread(tasks_of, environment, settings.num_rollouts)
    if not has_oracle:
        check_player(settings)
    trials = [_Trial(task) for task in tasks]
    with ProgressLine("Starting the agent") as progress:
        async with playing(settings, progress, has_oracle=has_oracle) as (groups_of, chat):
            progress(f"Running {count_of(len(trials), 'rollout')}")

            async def run(number: int, trial: _Trial) -> None:
                await trial.run(groups_of(trial.on_event), settings.budget, f"try-{number}")
                num_ended = sum(trial.ended_s > 0 for trial in trials)
                progress(f"{num_ended} of {count_of(len(trials), 'rollout')} ended")

            async with task_group() as watching:
                watching.start_soon(watch_lag, Heartbeat())
                async with anyio.create_task_group() as running:
                    for number, trial in enumerate(trials, 1):
                        running.start_soon(run, number, trial)
                watching.cancel_scope.cancel()
    out = Console()
    for number, trial in enumerate(trials, 1):
        _print_trial(trial, f"rollout {number} of {len(trials)}", chat, out)
    _print_summary(trials)
    return 1 if any(trial.reward.value is None for trial in trials) else 0


def _print_trial(trial: _Trial, title: str, chat: ChatFormat | None, out: Console) -> None:
    task = trial.task
    shown = {"expected answer": task.answer, **task.extra} if task.answer else task.extra
    fields = ", ".join(f"{name} {value!r:.60}" for name, value in shown.items())
    out.rule(escape(f"{title}: {task.id}" + (f" ({fields})" if fields else "")), align="left")
    conversations = Conversations(out, chat)
    for event in trial.events:
        conversations(event)
    out.print(
        reward_in_words(trial.reward), style="bold", markup=False, highlight=False, soft_wrap=True
    )
    out.print()


def _print_summary(trials: Sequence[_Trial]) -> None:
    parts = list(dict.fromkeys(name for trial in trials for name in trial.figures))
    rows = []
    for number, trial in enumerate(trials, 1):
        records = trial.records
        rows.append(
            (
                str(number),
                _value(trial.reward.value),
                *(_value(trial.figures.get(name)) for name in parts),
                str(sum(len(record.turns) for record in records)),
                str(sum(len(record.calls) for record in records)),
                "-" if trial.num_tokens is None else str(trial.num_tokens),
                *(f"{seconds:.1f}" for seconds in trial.seconds.values()),
            )
        )
    times = [f"{activity} s" for activity in Activity]
    columns = ["rollout", "reward", *parts, "turns", "calls", "tokens", *times]
    console.print_table(columns, rows, numbers=columns, optional=[*times, "calls", "turns"])
    values = [trial.reward.value for trial in trials if trial.reward.value is not None]
    print(f"\nreward     {mean(statistics.fmean(values) if values else None)} on average")
    for name in parts:
        figures = [trial.figures[name] for trial in trials if name in trial.figures]
        print(f"  {console.printable(name)}: {statistics.fmean(figures):.3f}")
    reasons = Counter(trial.reward.reason for trial in trials if trial.reward.value is None)
    for reason, count in reasons.most_common():
        print(f"failed     {count} of {len(trials)}: {console.printable(reason)}")
    total = sum(trial.ended_s - trial.started_s for trial in trials)
    spent = {activity: sum(trial.seconds[activity] for trial in trials) for activity in Activity}
    shares = ", ".join(f"{activity} {100 * s / (total or 1):.0f}%" for activity, s in spent.items())
    print(f"time       {total:.1f} s in all rollouts: {shares}")


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
