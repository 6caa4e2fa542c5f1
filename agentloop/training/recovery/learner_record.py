"""Record the learner in the journal, so that its steps can be repeated exactly (replay.py).

note `learners`      the learner's settings and what it ran on, from a step on
note `weights STEP`  a digest of the weights that were published after a step
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import takewhile

import pydantic

from agentloop.errors import RunFolderError
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.protocol import ReadyReply
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.loop.queue import GroupQueue

_NOTE = "learners"
_OF_MODEL = {"model", "chat_template"}  # paths differ between machines


class LearnerRecord(pydantic.BaseModel, extra="forbid", frozen=True):
    """The learner of all steps after a step.

    Attributes:
        after: the step that it started from.
        settings: the learner's settings, except for the model.
        ranks: number of ranks on each machine, of machines, and of threads.
        made_with: see `ReadyReply`.
    """

    after: int
    settings: dict[str, object]
    ranks: dict[str, int]
    made_with: dict[str, str]

    @classmethod
    def of(
        cls, settings: LearnerSettings, ranks: RanksSettings, ready: ReadyReply, *, after: int
    ) -> LearnerRecord:
        """Return the record of a learner that is ready."""
        return cls(
            after=after,
            settings=settings.model_dump(mode="json", exclude=_OF_MODEL),
            ranks=ranks.model_dump(include={"nproc_per_node", "nodes", "threads"}),
            made_with=ready.made_with,
        )

    def is_like(self, record: LearnerRecord) -> bool:
        """Return whether both learners make the same of the same batches."""
        return self == record.model_copy(update={"after": self.after})

    def learner(self, current: LearnerSettings) -> LearnerSettings:
        """Return the learner's settings, with the model of `current`.

        Raises:
            RunFolderError: another version of agentloop recorded them.
        """
        of_model = current.model_dump(include=_OF_MODEL)
        try:
            return LearnerSettings.model_validate({**self.settings, **of_model})
        except pydantic.ValidationError as error:
            where = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
            raise RunFolderError(
                "the run's learner was recorded by a version of agentloop with other settings: "
                f"{where}"
            ) from error

    def ranks_of(self, current: RanksSettings) -> RanksSettings:
        """Return the settings of the ranks, started as `current` says."""
        return current.model_copy(update=self.ranks)


async def record_learner(queue: GroupQueue, record: LearnerRecord) -> None:
    """Record the learner of all steps from now on. Raises RunFolderError."""
    records = await learner_records(queue)
    before = list(takewhile(lambda earlier: earlier.after < record.after, records))
    if before and before[-1].is_like(record):
        record = before.pop()
    rows = [item.model_dump(mode="json") for item in (*before, record)]
    await queue.note(_NOTE, rows)


async def learner_records(queue: GroupQueue) -> list[LearnerRecord]:
    """Return all records, the one of the first step first. Raises RunFolderError."""
    return [LearnerRecord.model_validate(row) for row in await queue.read_note(_NOTE) or ()]


async def note_weights(queue: GroupQueue, step: int, sha256: Mapping[str, str]) -> None:
    """Record the weights after a step by the checksums of their files. Raises RunFolderError."""
    await queue.note(f"weights {step}", weights_digest(sha256))


async def noted_weights(queue: GroupQueue, step: int) -> str | None:
    """Return the digest of the weights after a step, or None. Raises RunFolderError."""
    digest: str | None = await queue.read_note(f"weights {step}")
    return digest


def weights_digest(sha256: Mapping[str, str]) -> str:
    """Return a digest of published weights from the checksums of their files."""
    return hashlib.sha256(json.dumps(sorted(sha256.items())).encode()).hexdigest()
