"""A run of supervised fine-tuning, and its parts that a training run has too."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
import pydantic

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.chat_settings import ChatSettings
from agentloop.config import to_toml
from agentloop.distribution import require
from agentloop.errors import SettingsError
from agentloop.inference.cpu import NO_ACCELERATOR, has_accelerator
from agentloop.launch.progress import ProgressLine
from agentloop.launch.settings import PAGE
from agentloop.models import SMALL, not_a_model
from agentloop.serving.access import ServeSettings
from agentloop.training.learner_client.batch import Sample
from agentloop.training.learner_client.client import KeptLearner, Spawn, spawn_here
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import (
    LearnerSettings,
    SftLearnerSettings,
    TrainingSettings,
)
from agentloop.training.recovery.position import telling_how_to_continue
from agentloop.training.run.dashboard import RunDashboard
from agentloop.training.run.folder import RunFolder, RunSettings
from agentloop.training.run.status import count_of
from agentloop.training.sft.fine_tuning import (
    DialogueSource,
    DialoguesSettings,
    FineTuningPlan,
    SupervisedSettings,
    fine_tune,
    read_samples,
)


class DialogueTraining(pydantic.BaseModel, extra="forbid"):
    """Settings of training on dialogues: the data, the epochs, the learner and its ranks."""

    data: DialoguesSettings = pydantic.Field(default_factory=DialoguesSettings)
    loop: SupervisedSettings = pydantic.Field(default_factory=SupervisedSettings)
    learner: SftLearnerSettings = pydantic.Field(default_factory=SftLearnerSettings)
    ranks: RanksSettings = pydantic.Field(default_factory=RanksSettings)

    @pydantic.model_validator(mode="after")
    def _has_dialogues(self) -> Self:
        check_named(self.data)
        return self


def check_named(data: DialogueSource) -> None:
    """Check that the settings name any dialogues. Raises ValueError."""
    if not data.paths and not data.teacher:
        raise ValueError("data.paths: name at least one file of dialogues, or set data.teacher")


class SftSettings(DialogueTraining):
    """All settings of a supervised fine-tuning run."""

    model: Path = pydantic.Field(
        SMALL,
        description="Folder of the model to start from; with learner.init = random only its "
        "configuration and tokenizer are used.",
    )
    chat: ChatSettings = pydantic.Field(default_factory=ChatSettings)
    run: RunSettings = pydantic.Field(default_factory=RunSettings)
    serve: ServeSettings = pydantic.Field(default_factory=lambda: ServeSettings())
    page: bool = pydantic.Field(True, description=PAGE)


async def sft(settings: SftSettings, progress: ProgressLine, *, resume: Path | None = None) -> Path:
    """Fine-tune a model, or continue the run at `resume`; return the folder of the new model.

    Raises:
        AgentLoopError: a failure that the run cannot recover from.
    """
    model = model_folder(settings.model)
    samples = await samples_of(settings, model, settings.chat, progress)
    config = to_toml(settings)
    async with RunFolder.open(resume) if resume else RunFolder.new(settings.run, config) as folder:
        plan = await anyio.to_thread.run_sync(FineTuningPlan, settings.loop, samples, folder)
        if resume:
            folder.tell(config)  # only now: rejected settings must leave the run unchanged
        dashboard = RunDashboard(folder, progress, kind="sft", has_runtime=False)
        with telling_how_to_continue("sft", folder.path, progress.say), folder.noting_failure():
            async with dashboard.serve_page(settings.serve) if settings.page else nullcontext():
                if plan.model is not None:
                    return plan.model
                learner = learner_of(settings, model, settings.chat, folder, progress)
                async with learner:
                    return await fine_tune(
                        plan,
                        learner,
                        report=progress,
                        max_restarts=settings.ranks.max_restarts,
                        emit=dashboard.emit,
                    )


def model_folder(path: Path | str) -> Path:
    """Return the absolute path of a model folder. Raises SettingsError if it holds no model."""
    folder = Path(path).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise SettingsError(f"model: {not_a_model(folder)}")
    return folder


def require_learner(settings: TrainingSettings) -> None:
    """Check that the learner's packages are installed, and that there is a GPU if it needs one.

    Raises:
        SettingsError: something is missing; the message says how to install it.
    """
    if settings.attention.startswith("flash_attention") and not has_accelerator():
        raise SettingsError(
            f"learner.attention: {settings.attention} needs a GPU, but {NO_ACCELERATOR}; "
            "or set it to packed"
        )
    modules = {"torch": "the learner", "deepspeed": "the learner", "matplotlib": "plots"}
    if settings.lora.rank > 0:
        modules["peft"] = "learner.lora"
    require("train", modules)


async def samples_of(
    settings: DialogueTraining, model: Path, chat: ChatSettings, progress: ProgressLine
) -> list[Sample]:
    """Read the dialogues and encode them as samples for `model`. Raises DataError."""
    progress("Reading the dialogues")
    chat_format = await anyio.to_thread.run_sync(ChatFormat.load, model, chat)
    limit = settings.learner.max_sample_tokens
    read = partial(read_samples, chat_format, settings.data, max_tokens=limit, say=progress)
    samples, num_left_out = await anyio.to_thread.run_sync(read, abandon_on_cancel=True)
    left_out = f" ({num_left_out} too long and skipped)" if num_left_out else ""
    num_tokens = sum(len(sample.ids) for sample in samples)
    progress.say(
        f"{count_of(len(samples), 'sample')}{left_out}, {count_of(num_tokens, 'token')}, "
        f"{sum(sum(sample.mask) for sample in samples):,} of them trained on"
    )
    return samples


def learner_of(
    settings: DialogueTraining,
    model: Path,
    chat: ChatSettings,
    folder: RunFolder,
    progress: ProgressLine,
    spawn: Spawn = spawn_here,
) -> KeptLearner:
    """Return the learner that is to train `model`; it is not started yet."""
    return KeptLearner(
        LearnerSettings.of(settings.learner, model=model, chat_template=chat.template),
        settings.ranks,
        log_dir=folder.path / "logs",
        on_progress=progress,
        spawn=spawn,
    )
