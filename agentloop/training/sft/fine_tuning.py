"""Supervised fine-tuning on dialogues, encoded with the same ids as rollouts.

    lines ──> Dialogue ──chat template──> trajectories ──> samples ──> batches ──> learner
                         │ one per question: the prompt, then per turn the assistant's tokens
                         │ (trained on) and the tokens that the runtime appends (not trained on)

A dialogue is an object with OpenAI `messages` and optionally `tools`. A call of the assistant is in
`tool_calls`, or, if it is meant to be malformed, in the content as the model should write it. What
a message says and cannot be trained on as it says is refused (trained_messages.py). A line of
`agentloop data dialogues` has ids instead, which are trained on as they are.
Not covered: images and audio, and training on a part of a message.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import anyio
import anyio.to_thread
import pydantic

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.openai_messages import normal_form
from agentloop.agent.tools import Schema
from agentloop.agent.truncation import truncate
from agentloop.environments.tasks.sources import read_jsonl
from agentloop.environments.tasks.teacher import lessons
from agentloop.errors import DataError, RequestError, RunFolderError
from agentloop.events import Emit, Measured, ignore
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.learner_client.client import RestartableLearner
from agentloop.training.learner_client.protocol import PublishRequest, StepRequest, TrainingState
from agentloop.training.recovery.resume import ResumableTraining, load_newest, report_other_loss
from agentloop.training.run.folder import RunFolder, training_state
from agentloop.training.run.status import Reporter, RunStatus, count_of
from agentloop.training.sft.recorded_dialogues import (
    check_tokenizer,
    is_recorded,
    recorded_rollout,
)
from agentloop.training.sft.trained_messages import (
    check_answers,
    check_calls,
    check_said,
    check_weight,
    is_trained,
    tools_of,
)
from agentloop.trajectory import Message, ToolCall, Trajectory, Turn, TurnEnd

_NUM_LINES = 10  # progress lines per run


class DialogueSource(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings that say which dialogues to train on."""

    paths: list[Path] = pydantic.Field(
        default_factory=list,
        description="JSONL files of dialogues, one object with `messages` and optional `tools` per "
        "line.",
    )
    teacher: int = pydantic.Field(
        0,
        ge=0,
        description="Number of rollouts whose dialogues to add. They are played by the teacher of "
        "the run's environment. Without one, they are arithmetic, as `agentloop data teacher` "
        "writes them: half of the tool calls fail, and a third of the answers are right. So they "
        "are for the arithmetic tasks of an environment, or a program, that has no teacher.",
    )
    levels: list[int] = pydantic.Field(
        default_factory=lambda: [2],
        min_length=1,
        description="Difficulty levels of the synthetic dialogues' problems.",
    )

    def require_files(self) -> None:
        """Check that the files exist, without reading them.

        Raises:
            DataError: one does not; names it.
        """
        for path in self.paths:
            try:
                path.stat()
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}") from error


class DialoguesSettings(DialogueSource):
    """Settings of the source of dialogues."""

    seed: int = pydantic.Field(0, ge=0, description="Random seed of the synthetic dialogues.")
    max_tool_response_tokens: int = pydantic.Field(
        512,
        ge=8,
        description="Maximum length of a tool response in tokens; the middle of a longer one is "
        "cut out. Use the value of budget.max_tool_response_tokens of later rollouts.",
    )


class EpochsSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of the passes over the dialogues."""

    epochs: int = pydantic.Field(3, ge=1, description="Number of passes over the dialogues.")
    batch_tokens: int = pydantic.Field(
        131_072, ge=2, description="Tokens per optimizer step, including prompts."
    )
    lr: float = pydantic.Field(
        5e-6,
        ge=0,
        lt=1,
        description="Peak learning rate, reached after the warm-up; then a cosine decay to 0.",
    )
    warmup: float = pydantic.Field(
        0.04,
        ge=0,
        le=1,
        description="Fraction of the steps in which the learning rate rises linearly from 0.",
    )
    checkpoint_every: int = pydantic.Field(
        100,
        ge=0,
        description="Steps between checkpoints, from which a lost learner or a stopped run "
        "resumes. 0: none.",
    )


class SupervisedSettings(EpochsSettings):
    """Settings of the supervised training loop."""

    seed: int = pydantic.Field(
        0, ge=0, description="Random seed of the order of dialogues in each epoch."
    )
    step_timeout_s: float = pydantic.Field(
        3600.0, gt=0, description="Time limit of one request to the learner, such as a step."
    )


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages and tools as OpenAI defines them, or a rollout that was recorded.

    Attributes:
        where: the location, for error messages.
        recorded: the rollout, in place of messages.
    """

    messages: Sequence[Message]
    tools: Sequence[Schema]
    where: str
    recorded: Trajectory | None = None


def read_dialogues(settings: DialoguesSettings) -> Iterator[Dialogue]:
    """Yield the dialogues of the JSONL files, then the teacher's.

    Raises:
        DataError: a dialogue is invalid; the message names the file, the line and the field.
    """
    for path in settings.paths:
        for number, row in read_jsonl(path):
            where = f"{path}: line {number}"
            if not isinstance(row, Mapping):
                raise DataError(f"{where}: expected an object")
            if is_recorded(row):
                yield Dialogue([], [], where, recorded_rollout(row, where))
                continue
            messages = row.get("messages")
            if not isinstance(messages, list) or not messages:
                raise DataError(f"{where}: field 'messages': expected a list of messages")
            yield Dialogue(messages, tools_of(row, where), where)
    taught = lessons(settings.teacher, levels=settings.levels, seed=settings.seed)
    for number, row in enumerate(taught, 1):
        yield Dialogue(row["messages"], row["tools"], f"the teacher's dialogue {number}")


def trajectories_of(
    chat: ChatFormat, dialogue: Dialogue, *, max_tool_response_tokens: int
) -> list[Trajectory]:
    """Return the trajectories that the runtime would record if the model wrote the dialogue.

    There is one trajectory per question; its prompt is everything before the question's first turn.
    A message with weight 0 is not trained on: it ends a trajectory, and belongs to the next one's
    prompt.

    Raises:
        DataError: a message is invalid; the error names it.
    """
    if dialogue.recorded is not None:
        check_tokenizer(chat, dialogue.recorded)
        return [dialogue.recorded]
    try:
        return _Reader(chat, dialogue, max_tool_response_tokens).trajectories()
    except RequestError as error:
        raise DataError(f"{dialogue.where}: field 'messages': {error}") from error


class _Reader:
    """Reads the trajectories of a dialogue."""

    def __init__(self, chat: ChatFormat, dialogue: Dialogue, max_tool_response_tokens: int) -> None:
        self._chat = chat
        self._where, self._tools = dialogue.where, dialogue.tools
        self._limit = max_tool_response_tokens
        self._given = dialogue.messages
        # As many, with the same indices.
        by_order = chat.pairs_by_order
        self._messages: Sequence[Message] = normal_form(dialogue.messages, in_call_order=by_order)
        self._num_calls = 0
        self._trajectories: list[Trajectory] = []

    def trajectories(self) -> list[Trajectory]:
        index = 0
        while index < len(self._messages):
            if self._role(index) != "assistant":
                check_weight(index, self._messages[index])
                index += 1
                continue
            self._begin(index, self._chat.prompt(self._messages[:index], self._tools))
            index = self._add_turns(index)
        if self._role(-1) != "assistant":
            raise RequestError("the last message must be the assistant's")
        return [trajectory for trajectory in self._trajectories if trajectory.turns]

    def _begin(self, index: int, prompt_ids: list[int]) -> None:
        self._trajectories.append(Trajectory(f"{self._where}: messages[{index}]", prompt_ids))

    def _add_turns(self, index: int) -> int:
        """Add the turns and results from messages[index] on; return the index after them."""
        while self._role(index) == "assistant":
            turn, at = self._turn(index), index
            results, answered = self._results(index, turn)
            index += 1 + len(results)
            goes_on = self._role(index) == "assistant"
            num_calls, num_results = len(turn.calls), len(results)
            if goes_on and num_calls == num_results > 0:
                cut = [truncate(self._chat, content, self._limit) for content in results]
                turn.observation_ids = self._chat.observation(cut, answered)
            elif num_calls != (made := len(self._messages[at].get("tool_calls") or ())) > 0:
                what = f"of {count_of(made, 'call')}, the chat template writes {num_calls} readably"
                raise RequestError(f"messages[{at}].tool_calls: {what}")
            elif goes_on or num_results or (num_calls and index < len(self._messages)):
                raise RequestError(
                    f"messages[{at}]: makes {count_of(num_calls, 'call')}, followed by "
                    f"{count_of(num_results, 'result')} and {'another' if goes_on else 'no'} turn. "
                    "Each call needs a result, and results must be followed by a turn"
                )
            trajectory = self._trajectories[-1]
            if is_trained(at, self._messages[at]):
                trajectory.turns.append(turn)
            else:
                self._begin(index, [*trajectory.ids, *turn.output_ids, *turn.observation_ids])
        return index

    def _turn(self, index: int) -> Turn:
        message = self._messages[index]
        try:
            ids = self._chat.encode_assistant_turn(message, num_calls=self._num_calls)
        except RequestError as error:
            problem = str(error).removeprefix("messages[0].")
            raise RequestError(f"messages[{index}].{problem}") from error
        if is_trained(index, message):
            check_calls(index, self._given[index])
            text = self._chat.opened_thought + self._chat.decode(ids)
            check_said(index, message, text, self._chat.family.all_tags)
        stream = self._chat.family.calls(self._chat, self._tools)
        calls = [*stream.feed(ids), *stream.finish()]
        self._num_calls += len(calls)
        return Turn(ids, logprobs=[0.0] * len(ids), end=TurnEnd.STOP, calls=calls)

    def _results(self, index: int, turn: Turn) -> tuple[list[str], list[ToolCall]]:
        """Return the contents of the results after messages[index], and the calls they answer."""
        after = self._messages[index + 1 :]
        results = list(itertools.takewhile(lambda each: each["role"] == "tool", after))
        made = [call["id"] for call in self._messages[index].get("tool_calls") or ()]
        check_answers(index + 1, results, made)
        calls, ids = turn.calls, made or [call.id for call in turn.calls]
        answered = [str(result.get("tool_call_id")) for result in results]
        if len(ids) == len(calls) and sorted(answered) == sorted(ids):
            if self._chat.pairs_by_order:
                results.sort(key=lambda result: ids.index(result["tool_call_id"]))
            else:
                calls = [calls[ids.index(id)] for id in answered]
        return [result["content"] for result in results], calls

    def _role(self, index: int) -> str | None:
        """Return the role of messages[index], or None if there is no such message."""
        if not -1 <= index < len(self._messages) or not self._messages:
            return None
        return str(self._messages[index]["role"])


def read_samples(
    chat: ChatFormat, settings: DialoguesSettings, *, max_tokens: int, say: Callable[[str], None]
) -> tuple[list[Sample], int]:
    """Read all samples, saying how many; return them and the number of those over `max_tokens`.

    Raises:
        DataError: as in `read_dialogues` and `trajectories_of`, or if no samples are left.
    """
    samples: list[Sample] = []
    num_left_out = 0
    for num_dialogues, dialogue in enumerate(read_dialogues(settings), 1):
        if num_dialogues % 1000 == 0:
            say(f"Reading the dialogues: {num_dialogues:,} so far")
        for trajectory in trajectories_of(
            chat, dialogue, max_tool_response_tokens=settings.max_tool_response_tokens
        ):
            ids = trajectory.ids
            if len(ids) > max_tokens:
                num_left_out += 1
                continue
            samples.append(Sample(ids, trajectory.mask, trajectory.logprobs, 0.0, len(samples)))
    if not samples:
        raise DataError(
            f"data.paths: no dialogue has at most {max_tokens:,} tokens, the maximum "
            "(learner.micro_batch_tokens)"
        )
    return samples, num_left_out


def step_plan(
    lengths: Sequence[int], *, epochs: int, batch_tokens: int, seed: int
) -> list[tuple[int, list[int]]]:
    """Plan the steps of a run: (epoch, indices of samples) of each.

    Each epoch is shuffled anew and split into steps of at most `batch_tokens`; a longer sample is a
    step by itself.
    """
    steps: list[tuple[int, list[int]]] = []
    for epoch in range(1, epochs + 1):
        order = list(range(len(lengths)))
        Random(f"{seed} {epoch}").shuffle(order)
        num_tokens_left = 0
        for index in order:
            if not steps or steps[-1][0] != epoch or lengths[index] > num_tokens_left:
                steps.append((epoch, []))
                num_tokens_left = batch_tokens
            steps[-1][1].append(index)
            num_tokens_left -= lengths[index]
    return steps


def learning_rate(step: int, num_steps: int, *, peak: float, warmup: float) -> float:
    """Return the learning rate of a step from 1 to `num_steps`: linear warm-up, cosine decay."""
    num_rising = math.ceil(warmup * num_steps)
    if step <= num_rising:
        return peak * step / num_rising
    done = (step - num_rising) / (num_steps - num_rising + 1)
    return peak * (1 + math.cos(math.pi * done)) / 2


class FineTuningPlan:
    """The steps of a supervised run, and what its folder has of it.

    Attributes:
        steps: (epoch, indices of samples) of each step.
        lineage: checksums of the data after 0, 1, 2, ... steps.
        version: version of the model.
        losses: recorded losses by step.
        model: folder of the published model; None: training is not complete.
    """

    def __init__(
        self,
        settings: SupervisedSettings,
        samples: Sequence[Sample],
        folder: RunFolder,
        section: str = "",
    ) -> None:
        """Plan the steps, which takes seconds for many samples.

        Args:
            section: the section of the run's settings that these are of, with a dot, for errors.

        Raises:
            RunFolderError: the steps of the checkpoint were trained on other batches.
        """
        self.settings = settings
        self.samples = samples
        self.folder = folder
        self.steps = step_plan(
            [len(sample.ids) for sample in samples],
            epochs=settings.epochs,
            batch_tokens=settings.batch_tokens,
            seed=settings.seed,
        )
        self.lineage = lineage(samples, self.steps)
        self.version = f"sft-{len(self.steps)}"
        self.losses = {row["step"]: row.get("learner/loss") for row in folder.metrics()}
        model = folder.path / "model"
        self.model = model if _version_in(model) == self.version else None
        if self.model is None and (checkpoint := folder.checkpoint) is not None:
            self._check(training_state(checkpoint), section)

    def _check(self, state: TrainingState, section: str) -> None:
        step = state.step
        if step >= len(self.lineage) or state.lineage != self.lineage[step]:
            raise RunFolderError(
                f"--resume: {self.folder.path}: the batches up to step {step} would differ from "
                f"those trained on: leave {section}data.*, {section}loop.batch_tokens, "
                f"{section or 'loop.'}seed and {section}learner.micro_batch_tokens as they were, "
                "or start a new run"
            )

    def state(self, step: int) -> TrainingState:
        """Return the state after a step."""
        return TrainingState(step=step, lineage=self.lineage[step])


async def fine_tune(
    plan: FineTuningPlan,
    learner: RestartableLearner,
    *,
    report: Reporter,
    max_restarts: int = 0,
    emit: Emit = ignore,
) -> Path:
    """Train the steps of a plan, from its newest checkpoint on; return the model's folder.

    Args:
        max_restarts: restarts of a lost learner in ten minutes.
        emit: called with the metrics of each step (`Measured`).

    Raises:
        LearnerError: the learner failed or did not respond in time.
    """
    restored: TrainingState | None = None
    if plan.folder.checkpoint is not None:
        report(f"Loading {plan.folder.checkpoint.name}")
        timeout_s = plan.settings.step_timeout_s
        restored = await load_newest(learner, plan.folder, timeout_s=timeout_s)
    return await _FineTuning(plan, learner, restored, report, max_restarts, emit).run()


class _FineTuning(ResumableTraining):
    """A supervised run."""

    def __init__(
        self,
        plan: FineTuningPlan,
        learner: RestartableLearner,
        restored: TrainingState | None,
        report: Reporter,
        max_restarts: int,
        emit: Emit,
    ) -> None:
        super().__init__(
            learner,
            plan.folder,
            restored=restored,
            timeout_s=plan.settings.step_timeout_s,
            say=report.say,
            max_restarts=max_restarts,
        )
        self._plan = plan
        self._report = report
        self._emit = emit

    async def run(self) -> Path:
        if first := self.state.step:
            self._say(f"Resuming from the checkpoint of step {first}")
        every, num_steps = self._plan.settings.checkpoint_every, len(self._plan.steps)
        started_s = time.monotonic()
        for step in range(first + 1, num_steps + 1):
            metrics = await self._train_step(step, partial(self._learn, step))
            left_s = (time.monotonic() - started_s) / (step - first) * (num_steps - step)
            self._show(step, metrics, left_s)
            if every and step % every == 0 and step < num_steps:
                await self.checkpoint()
        await self._check_checkpoint(wait=True)
        model = self._folder.path / "model"
        await self._ask(PublishRequest(folder=model, version=self._plan.version))
        return model

    async def _repeat_steps(self, before: int) -> None:
        for step in range(self._learner_state.step + 1, before):
            await self._learn(step)

    async def _learn(self, step: int) -> dict[str, float | None]:
        """Train one step and return its metrics, which are recorded unless they were before."""
        started_s = time.monotonic()
        plan, settings = self._plan, self._plan.settings
        epoch, indices = plan.steps[step - 1]
        path = self._folder.path / "batches" / f"step-{step:05}.safetensors"
        samples = [plan.samples[i] for i in indices]
        await anyio.to_thread.run_sync(write_batch, path, samples)
        lr = learning_rate(step, len(plan.steps), peak=settings.lr, warmup=settings.warmup)
        rescue = self._checkpoint_folder(f"step-{step:05}-rescue")
        learned = await self._ask_once(
            StepRequest(batch=path, lr=lr, rescue=rescue, state=plan.state(step - 1))
        )
        path.unlink()
        self._learner_state = plan.state(step)
        metrics: dict[str, float | None] = {"step": step, "epoch": epoch}
        metrics |= {f"learner/{name}": value for name, value in learned.metrics().items()}
        metrics["step_s"] = time.monotonic() - started_s
        if step in plan.losses:
            report_other_loss(self._say, step, plan.losses[step], learned.loss)
        else:
            self._folder.add_metrics(metrics)
            self._emit(Measured(metrics))
            plan.losses[step] = learned.loss
        return metrics

    def _show(self, step: int, metrics: Mapping[str, float | None], left_s: float) -> None:
        num_steps, epoch = len(self._plan.steps), metrics["epoch"]
        loss = metrics.get("learner/loss")
        shown = "none" if loss is None else f"{loss:.4f}"
        self._report.show(
            RunStatus(
                "supervised fine-tuning",
                step,
                num_steps,
                waits="the learner is training on the dialogues",
                values={
                    "epoch": f"{epoch} of {self._plan.settings.epochs}",
                    "loss": shown,
                    "trained tokens/s": f"{metrics.get('learner/tokens_per_s') or 0:,.0f}",
                },
                left_s=left_s,
            )
        )
        if step % max(1, num_steps // _NUM_LINES) == 0 or step == num_steps:
            self._say(f"step {step}/{num_steps}, epoch {epoch}: loss {shown}")


def lineage(samples: Sequence[Sample], steps: Sequence[tuple[int, Sequence[int]]]) -> list[str]:
    """Return checksums of the training data after 0, 1, 2, ... steps.

    Equal checksums mean the same samples in the same steps.
    """
    contents = [
        hashlib.sha256(array("q", sample.ids).tobytes() + bytes(sample.mask)).digest()
        for sample in samples
    ]
    checksums = [hashlib.sha256()]
    for _, indices in steps:
        checksum = checksums[-1].copy()
        checksum.update(hashlib.sha256(b"".join(contents[i] for i in indices)).digest())
        checksums.append(checksum)
    return [checksum.hexdigest() for checksum in checksums]


def _version_in(model: Path) -> str | None:
    """Return the version of the published model in a folder, or None if there is none.

    Raises:
        RunFolderError: the file that names it is damaged.
    """
    published = model / "published.json"
    try:
        version: str = json.loads(published.read_bytes())["version"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{published}: cannot be read: {error!r}; remove {model} to publish it again"
        ) from error
    return version
