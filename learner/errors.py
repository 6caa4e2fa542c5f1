"""What can go wrong in the learner.

AgentLoopError
 └─ LearnerError        any of it
     ├─ BatchError      a batch file, or what stands in it: the learner goes on
     └─ TrainingBroken  the policy is no longer to be trusted: the learner ends
"""

from __future__ import annotations

from agentloop.errors import AgentLoopError

__all__ = ["BatchError", "LearnerError", "TrainingBroken"]


class LearnerError(AgentLoopError):
    """Base of the learner's errors; by itself: a request that cannot be carried out."""


class BatchError(LearnerError):
    """A batch is unusable; the message names the file, the tensor and the place."""


class TrainingBroken(LearnerError):
    """Too many steps in a row had no finite gradient."""
