"""The learner's errors.

AgentLoopError
 └─ RankError              base class; by itself, a request that cannot be carried out
     ├─ BatchError         a batch file or its content is invalid: the learner goes on
     ├─ WriteError         a folder or file could not be written: the learner goes on
     ├─ CheckpointError    a checkpoint of other ranks cannot be converted: the learner goes on
     ├─ ProcessGroupError  the process group with the servers failed: the learner goes on
     └─ GradientError      the policy can no longer be trusted: the learner ends
"""

from __future__ import annotations

from agentloop.errors import AgentLoopError


class RankError(AgentLoopError):
    """Base class of the learner's errors; by itself, a request that cannot be carried out."""


class BatchError(RankError):
    """A batch is unusable; the message names the file, the tensor and the index."""


class WriteError(RankError):
    """Writing failed, most often because the disk is full; the message names the folder.

    Raised on every rank.
    """


class CheckpointError(RankError):
    """A checkpoint of another number of ranks or ZeRO stage cannot be converted.

    The message names both. Raised on every rank, before any weight has changed.
    """


class ProcessGroupError(RankError):
    """A server did not join, is gone or hangs.

    Raised on rank 0 alone, after the part of the work that all ranks share.
    """


class GradientError(RankError):
    """Too many steps in a row had no finite gradient."""
