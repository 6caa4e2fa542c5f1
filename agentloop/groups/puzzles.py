"""Answers to reasoning-gym's puzzles, scored by their own families, in the sandbox.

Some families evaluate the answer as Python, so the model's text must not get near this process.
Many give junk a score above 0, and some raise on it: only a score of exactly 1 is right.

The program says when it begins to score. What ends it before that is ours, and gives no reward.
What ends it later is the answer's doing, and makes it a wrong one: else a model could take back a
bad rollout by an answer that breaks its scorer. Only a scorer that takes too long has a second try,
for the machine may have been busy.

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
from sandbox import CallResult, CallStatus, Pool, SandboxError

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
    print()
    print(asked["mark"], "scores", flush=True)
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
    family = puzzle["family"]
    for _ in range(2):
        try:
            result = await pool.run(_PROGRAM, stdin=asked, timeout_s=timeout_s)
        except SandboxError as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from error
        if result.status.infrastructure or f"{mark} scores\n" not in result.stdout:
            raise _not_scored(result, mark)
        if result.status is not CallStatus.TIMEOUT:
            return _verdict(result, mark, family)
    return False, f"{family} took longer than {timeout_s:g} s on it, twice"


def _not_scored(result: CallResult, mark: str) -> Exception:
    """Why the program did not get as far as the answer."""
    said = _last(result.stdout, mark)
    if said is not None and "missing" in said:
        return SettingsError(
            f"reasoning-gym is not in the sandbox ({said['missing']}): give it an image that has "
            'it, or set sandbox.backend to "process"'
        )
    why = result.error.message if result.error is not None else result.stderr[-500:].strip()
    return CallFailed(f"the sandbox says {result.status}: {why}")


def _verdict(result: CallResult, mark: str, family: str) -> tuple[bool, str]:
    said = _last(result.stdout, mark)
    if result.status is not CallStatus.OK or said is None:
        how = "" if result.status is CallStatus.OK else f" ({result.status})"
        return False, f"it ended the process that scored it{how}"
    if "raised" in said:
        return False, f"{family} raised {said['raised']} on it"
    score = said.get("score")  # by the process's own word, which the answer may have written
    if not isinstance(score, int | float):
        return False, f"{family} gives it no score"
    return score == 1.0, f"{family} scores it {score:g}"


def _last(stdout: str, mark: str) -> dict[str, Any] | None:
    line = stdout.rstrip("\n").rpartition("\n")[2]
    try:
        said = json.loads(line.removeprefix(mark)) if line.startswith(mark) else None
    except ValueError:
        return None
    return said if isinstance(said, dict) else None
