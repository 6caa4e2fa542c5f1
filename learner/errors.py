"""What can go wrong in the learner.

AgentLoopError
 └─ LearnerError        any of it
     ├─ BatchError      a batch file, or what stands in it: the learner goes on
     ├─ NotWritten      a folder or file could not be written: the learner goes on
     ├─ NotConverted    a checkpoint of other ranks could not be read: the learner goes on
     ├─ GroupBroken     the group of the servers, of which rank 0 is one: the learner goes on
     └─ TrainingBroken  the policy is no longer to be trusted: the learner ends
"""

from __future__ import annotations

from agentloop.errors import AgentLoopError

__all__ = [
    "BatchError",
    "GroupBroken",
    "LearnerError",
    "NotConverted",
    "NotWritten",
    "TrainingBroken",
]


class LearnerError(AgentLoopError):
    """Base of the learner's errors; by itself: a request that cannot be carried out."""


class BatchError(LearnerError):
    """A batch is unusable; the message names the file, the tensor and the place."""


class NotWritten(LearnerError):
    """A full disk, most often; the message names the folder. Raised on every rank."""


class NotConverted(LearnerError):
    """A checkpoint is of another number of ranks or ZeRO stage, and cannot be made one of these;
    the message names both. Raised on every rank, before any weight has changed."""


class GroupBroken(LearnerError):
    """A server did not join, is gone or hangs; raised on rank 0 alone, after what all ranks do."""


class TrainingBroken(LearnerError):
    """Too many steps in a row had no finite gradient."""
