"""The supervised start: dialogues in, the ids that rollouts would have, a model that imitates.

    lines ──> Dialogue ──model's own template──> trajectories ──> samples ──> batches ──> learner
                         │ one per question: prompt, then per turn what is sampled (trained) and
                         │ what the runtime appends to it (not trained)

A dialogue is an object with `messages`, in OpenAI's terms, and maybe `tools`. An assistant's call
stands in `tool_calls`, or, where it is not even JSON, in the content as the model is to write it.
Not covered: images and audio, messages of which a part is trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.to_thread
import pydantic

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import truncated
from agentloop.agent.tool_stream import ToolCallStream
from agentloop.agent.tools import Schema
from agentloop.errors import DataError, RequestError
from agentloop.groups.tasks import read_jsonl
from agentloop.groups.teacher import lessons
from agentloop.training.batch import Sample, write_batch
from agentloop.training.learner import Learner
from agentloop.training.run_folder import RunFolder
from agentloop.training.standing import Report, Standing
from agentloop.trajectory import Message, Trajectory, Turn, TurnEnd

__all__ = [
    "Dialogue",
    "DialoguesSettings",
    "SupervisedSettings",
    "fine_tune",
    "learning_rate",
    "read_dialogues",
    "read_samples",
    "step_plan",
    "trajectories_of",
]

_NUM_TOLD = 10  # lines of progress of a run


class DialoguesSettings(pydantic.BaseModel):
    """Where dialogues come from."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    paths: list[Path] = pydantic.Field(
        default_factory=list, description="JSONL files of dialogues: messages and tools."
    )
    teacher: int = pydantic.Field(
        0,
        ge=0,
        description="So many dialogues about arithmetic, of a teacher who often errs, besides "
        "(those of `agentloop data teacher`).",
    )
    levels: list[int] = pydantic.Field(
        default_factory=lambda: [2], min_length=1, description="Levels of the teacher's problems."
    )
    seed: int = pydantic.Field(0, ge=0, description="Of the teacher's problems and mistakes.")
    max_tool_response_tokens: int = pydantic.Field(
        512,
        ge=8,
        description="A longer tool response keeps its head and its tail; as "
        "budget.max_tool_response_tokens of the rollouts that follow.",
    )


class SupervisedSettings(pydantic.BaseModel):
    """How long to imitate, and how fast."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    epochs: int = pydantic.Field(3, ge=1, description="How often each dialogue is seen.")
    batch_tokens: int = pydantic.Field(
        131_072, ge=2, description="Tokens of one optimizer step, prompts included."
    )
    lr: float = pydantic.Field(5e-6, ge=0, lt=1, description="Learning rate after the warm-up.")
    warmup: float = pydantic.Field(
        0.04, ge=0, le=1, description="Share of the steps over which the rate rises linearly."
    )
    seed: int = pydantic.Field(0, ge=0, description="Of the order in each epoch.")
    step_timeout_s: float = pydantic.Field(
        3600.0, gt=0, description="For the learner's answer to one request."
    )


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages and tools in OpenAI's terms; `where` they stand, for errors."""

    messages: Sequence[Message]
    tools: Sequence[Schema]
    where: str


def read_dialogues(settings: DialoguesSettings) -> Iterator[Dialogue]:
    """The dialogues of JSONL files, and the teacher's.

    Raises:
        DataError: names the file, the line and the field.
    """
    for path in settings.paths:
        for number, row in read_jsonl(path):
            where = f"{path}: line {number}"
            if not isinstance(row, Mapping):
                raise DataError(f"{where}: an object is expected")
            messages, tools = row.get("messages"), row.get("tools") or []
            if not isinstance(messages, list) or not messages:
                raise DataError(f"{where}: field 'messages': a list of messages is expected")
            if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
                raise DataError(f"{where}: field 'tools': a list of schemas is expected")
            yield Dialogue(messages, tools, where)
    taught = lessons(settings.teacher, levels=settings.levels, seed=settings.seed)
    for number, row in enumerate(taught, 1):
        yield Dialogue(row["messages"], row["tools"], f"the teacher's dialogue {number}")


def trajectories_of(
    chat: ChatFormat, dialogue: Dialogue, *, max_tool_response_tokens: int
) -> list[Trajectory]:
    """What the runtime would leave behind if the model said what the assistant says: a
    trajectory for each question, whose prompt is all that stands before its first turn.

    Raises:
        DataError: names the message.
    """
    found: list[Trajectory] = []
    messages = dialogue.messages
    index = 0
    try:
        while index < len(messages):
            if _role(messages, index) != "assistant":
                index += 1
                continue
            prompt_ids = chat.prompt(messages[:index], dialogue.tools)
            trajectory = Trajectory(f"{dialogue.where}: messages[{index}]", prompt_ids)
            index = _add_turns(chat, trajectory, messages, index, max_tool_response_tokens)
            found.append(trajectory)
    except RequestError as error:
        raise DataError(f"{dialogue.where}: field 'messages': {error}") from error
    if not found or _role(messages, -1) != "assistant":
        raise DataError(f"{dialogue.where}: field 'messages': the last one is not the assistant's")
    return found


def _add_turns(
    chat: ChatFormat,
    trajectory: Trajectory,
    messages: Sequence[Message],
    index: int,
    max_tool_response_tokens: int,
) -> int:
    """Turns and results from messages[index] on; returns where the next question may stand."""
    while _role(messages, index) == "assistant":
        turn, at = _turn(chat, messages, index), index
        trajectory.turns.append(turn)
        contents = _responses(messages, index + 1)
        index += 1 + len(contents)
        goes_on = _role(messages, index) == "assistant"
        num_calls, num_results = len(turn.calls), len(contents)
        if goes_on and num_calls == num_results > 0:
            limit = max_tool_response_tokens
            turn.observation_ids = chat.observation([truncated(chat, c, limit) for c in contents])
        elif goes_on or num_results or (num_calls and index < len(messages)):
            raise RequestError(
                f"messages[{at}]: it makes {num_calls} calls; {num_results} results and "
                f"{'another' if goes_on else 'no'} turn follow. Each call needs its result, and "
                "results need a turn"
            )
    return index


def _turn(chat: ChatFormat, messages: Sequence[Message], index: int) -> Turn:
    try:
        ids = chat.sampled(messages[index])
    except RequestError as error:
        said = str(error).removeprefix("messages[0].")
        raise RequestError(f"messages[{index}].{said}") from error
    stream = ToolCallStream(chat)
    calls = [*stream.feed(ids), *stream.finish()]
    return Turn(ids, logprobs=[0.0] * len(ids), end=TurnEnd.STOP, calls=calls)


def _role(messages: Sequence[Message], index: int) -> str | None:
    """Of that message; None where there is none."""
    if not -1 <= index < len(messages):
        return None
    message = messages[index]
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}]: an object with a role is expected")
    role: str = message["role"]
    return role


def _responses(messages: Sequence[Message], index: int) -> list[str]:
    """The contents of the tool messages from messages[index] on."""
    contents: list[str] = []
    while _role(messages, index) == "tool":
        content = messages[index].get("content")
        if not isinstance(content, str):
            raise RequestError(f"messages[{index}].content: a string is expected")
        contents.append(content)
        index += 1
    return contents


def read_samples(
    chat: ChatFormat, settings: DialoguesSettings, *, max_tokens: int
) -> tuple[list[Sample], int]:
    """The samples of all files, and the number of those left out, which have more than
    `max_tokens`.

    Raises:
        DataError: as `read_dialogues` and `trajectories_of`; or nothing is left.
    """
    samples: list[Sample] = []
    num_left_out = 0
    for dialogue in read_dialogues(settings):
        for trajectory in trajectories_of(
            chat, dialogue, max_tool_response_tokens=settings.max_tool_response_tokens
        ):
            ids = trajectory.ids
            if len(ids) > max_tokens:
                num_left_out += 1
                continue
            samples.append(Sample(ids, trajectory.mask, trajectory.logprobs, 0.0, len(samples)))
    if not samples:
        raise DataError(f"data.paths: no dialogue of at most {max_tokens} tokens stands there")
    return samples, num_left_out


def step_plan(
    lengths: Sequence[int], *, epochs: int, batch_tokens: int, seed: int
) -> list[tuple[int, list[int]]]:
    """(epoch, indices of samples) of each step. Each epoch is shuffled anew, and cut where a step
    would hold more than `batch_tokens`; a longer sample is a step by itself."""
    steps: list[tuple[int, list[int]]] = []
    for epoch in range(1, epochs + 1):
        order = list(range(len(lengths)))
        Random(f"{seed} {epoch}").shuffle(order)
        room = 0
        for index in order:
            if not steps or steps[-1][0] != epoch or lengths[index] > room:
                steps.append((epoch, []))
                room = batch_tokens
            steps[-1][1].append(index)
            room -= lengths[index]
    return steps


def learning_rate(step: int, num_steps: int, *, peak: float, warmup: float) -> float:
    """Of step 1 to `num_steps`: up to `peak` in a line, then down to almost 0 along a cosine."""
    num_rising = math.ceil(warmup * num_steps)
    if step <= num_rising:
        return peak * step / num_rising
    done = (step - num_rising) / (num_steps - num_rising + 1)
    return peak * (1 + math.cos(math.pi * done)) / 2


async def fine_tune(
    settings: SupervisedSettings,
    samples: Sequence[Sample],
    *,
    learner: Learner,
    folder: RunFolder,
    report: Report,
) -> Path:
    """Train on all samples, `settings.epochs` times; returns the folder of the published model.

    Raises:
        LearnerError: it failed, or an answer is late.
    """
    ask, timeout_s = learner.ask, settings.step_timeout_s
    lengths = [len(sample.ids) for sample in samples]
    steps = step_plan(
        lengths, epochs=settings.epochs, batch_tokens=settings.batch_tokens, seed=settings.seed
    )
    started = time.monotonic()
    for step, (epoch, indices) in enumerate(steps, 1):
        begun = time.monotonic()
        path = folder.path / "batches" / f"step-{step:05}.safetensors"
        await anyio.to_thread.run_sync(write_batch, path, [samples[i] for i in indices])
        lr = learning_rate(step, len(steps), peak=settings.lr, warmup=settings.warmup)
        rescue = str(folder.path / "checkpoints" / f"step-{step:05}-rescue")
        learned = await ask("step", batch=str(path), lr=lr, rescue=rescue, timeout_s=timeout_s)
        path.unlink()
        metrics: dict[str, Any] = {"step": step, "epoch": epoch}
        metrics |= {f"learner/{name}": value for name, value in learned.items()}
        metrics["step_s"] = time.monotonic() - begun
        folder.add_metrics(metrics)
        loss = learned.get("loss")
        said = "none" if loss is None else f"{loss:.4f}"
        left_s = (time.monotonic() - started) / step * (len(steps) - step)
        report.show(
            Standing(
                "supervised start",
                step,
                len(steps),
                waits="The learner imitates the dialogues",
                values={
                    "epoch": f"{epoch} of {settings.epochs}",
                    "loss": said,
                    "learned tokens/s": f"{learned.get('tokens_per_s') or 0:,.0f}",
                },
                left_s=left_s,
            )
        )
        if step % max(1, len(steps) // _NUM_TOLD) == 0 or step == len(steps):
            report.say(f"step {step}/{len(steps)}, epoch {epoch}: loss {said}")
    model = folder.path / "model"
    await ask("publish", folder=str(model), version=f"sft-{len(steps)}", timeout_s=timeout_s)
    return model
