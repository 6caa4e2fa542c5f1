"""Answers to reasoning-gym's puzzles, scored by their own families, in the sandbox.

Some families evaluate the answer as Python, so the model's text must not get near this process.
Many give junk a score above 0, and some raise on it: only a score of exactly 1 is right.

A process of the sandbox that is told to score is at the mercy of what it evaluates: an answer
written to break out of its scorer can claim a score of 1. It can do nothing else.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from agentloop.errors import SettingsError
from agentloop.groups.killable import CallFailed
from sandbox import CallStatus, Pool, SandboxError

__all__ = ["is_solved"]

_PROGRAM = """\
import json, sys
asked = json.loads(sys.stdin.read())
try:
    import reasoning_gym
except ImportError as error:
    said = {"missing": str(error)}
else:
    where = asked["puzzle"]
    puzzles = reasoning_gym.create_dataset(where["family"], size=where["size"], seed=where["seed"])
    entry = puzzles[where["index"]]
    try:
        said = {"score": float(puzzles.score_answer(asked["answer"], entry))}
    except BaseException as error:
        said = {"raised": type(error).__name__}
print()
print(asked["mark"], json.dumps(said))
"""


async def is_solved(
    pool: Pool, puzzle: Mapping[str, Any], answer: str, *, timeout_s: float
) -> tuple[bool, str]:
    """Whether `answer` scores 1, and what is to be said about it.

    Args:
        puzzle: family, size, seed and index, as `tasks.py` gives them.

    Raises:
        CallFailed: the sandbox could not tell.
        SettingsError: the sandbox's Python has no reasoning-gym.
    """
    mark = secrets.token_hex(16)
    asked = json.dumps({"puzzle": dict(puzzle), "answer": answer, "mark": mark})
    try:
        result = await pool.run(_PROGRAM, stdin=asked, timeout_s=timeout_s)
    except SandboxError as error:
        raise CallFailed(f"{type(error).__name__}: {error}") from error
    said = _last(result.stdout, mark)
    if result.status is not CallStatus.OK:
        raise CallFailed(f"the sandbox says {result.status}: {result.stderr[-500:].strip()}")
    if said is None:
        return False, "it ended the process that scored it"
    if "missing" in said:
        raise SettingsError(
            f"reasoning-gym is not in the sandbox ({said['missing']}): give it an image that has "
            'it, or set sandbox.backend to "process"'
        )
    if "raised" in said:
        return False, f"{puzzle['family']} raised {said['raised']} on it"
    return said["score"] == 1.0, f"{puzzle['family']} scores it {said['score']:g}"


def _last(stdout: str, mark: str) -> dict[str, Any] | None:
    line = stdout.rstrip("\n").rpartition("\n")[2]
    try:
        said = json.loads(line.removeprefix(mark)) if line.startswith(mark) else None
    except ValueError:
        return None
    return said if isinstance(said, dict) else None
