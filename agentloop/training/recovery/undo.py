"""Return a run to one of its checkpoints (`--from`), undoing all later steps.

    the journal, in one transaction ──> the run's files, one by one ──> the journal: done

A kill before the transaction leaves the run unchanged; after it, the undo is finished when the run
is resumed, whatever its arguments.
"""

from __future__ import annotations

from functools import partial

from agentloop.aio import in_run_thread
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.run.folder import RunFolder


async def undo(folder: RunFolder, queue: GroupQueue, step: int) -> None:
    """Return a run to its state after `step`.

    Raises:
        RunFolderError: there is no checkpoint of that step, so nothing was changed; or the files
            cannot be moved, so `finish_undo` is still to be called.
    """
    folder.checkpoint_of(step)
    await queue.undo(step)
    await finish_undo(folder, queue)


async def finish_undo(folder: RunFolder, queue: GroupQueue) -> None:
    """Finish an `undo` that was interrupted, if there is one. Raises RunFolderError."""
    undone = await queue.read_note("undone")
    if undone is None:
        return
    move = partial(folder.undo, undone["step"], name=undone["name"], files=undone["files"])
    await in_run_thread(move)
    await queue.note("undone", None)
