"""A run goes back to one of its checkpoints (`--from`): what came after it is undone.

    the journal, in one transaction ──> the run's files, one by one ──> the journal: that is done

A kill before the transaction leaves the run as it was; after it, what is left to do is done when
the run goes on, whatever it is told then.
"""

from __future__ import annotations

from functools import partial

import anyio.to_thread

from agentloop.groups.queue import GroupQueue
from agentloop.training.run_folder import RunFolder

__all__ = ["finish_undo", "undo"]


async def undo(folder: RunFolder, queue: GroupQueue, step: int) -> None:
    """Make the run what it was after `step`.

    Raises:
        SettingsError: there is no checkpoint of that step, and nothing has changed; or the files
            cannot be moved, and it is to be finished.
    """
    folder.checkpoint_of(step)
    await queue.undo(step)
    await finish_undo(folder, queue)


async def finish_undo(folder: RunFolder, queue: GroupQueue) -> None:
    """Finish what `undo` has begun and a kill has kept from its end. Raises SettingsError."""
    undone = await queue.noted("undone")
    if undone is None:
        return
    move = partial(folder.undo, undone["step"], name=undone["name"], files=undone["files"])
    await anyio.to_thread.run_sync(move)
    await queue.note("undone", None)
