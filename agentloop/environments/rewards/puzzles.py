"""Score answers to reasoning-gym puzzles with the puzzles' own scorers, in the sandbox.

Some scorers evaluate the answer as Python, so model output must not be scored in this process. Many
give nonsense a score above 0, and some raise: an answer is correct only if its score is exactly 1.

The program prints a line before it scores. A failure before that line is an infrastructure failure
and gives no reward. A failure after it is attributed to the answer, which is then wrong: otherwise
a model could discard a bad rollout with an answer that breaks the scorer. Only a timeout is retried
once, since the machine may have been busy.

An answer written to break out of its scorer can forge a score of 1, but the sandbox confines it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Protocol

from agentloop.environments.rewards.process_pool import CallFailed
from agentloop.errors import SettingsError
from agentloop.sandbox import CallResult, CallStatus, SandboxError

__all__ = ["is_solved", "score"]

_PROGRAM = """\
import json, sys
request = json.loads(sys.stdin.read())
try:
    import reasoning_gym
except ImportError as error:
    outcome = {"missing": str(error)}
else:
    where = request["puzzle"]
    options = where.get("options", {})
    puzzles = reasoning_gym.create_dataset(
        where["family"], size=where["size"], seed=where["seed"], **options
    )
    entry = puzzles[where["index"]]
    print()
    print(request["mark"], "scores", flush=True)
    try:
        outcome = {"score": float(puzzles.score_answer(request["answer"], entry))}
    except BaseException as error:
        outcome = {"raised": type(error).__name__}
print()
print(request["mark"], json.dumps(outcome))
"""


class Programs(Protocol):
    """Runs programs: a sandbox `Pool`, or that of an environment's agent."""

    async def run(self, code: str, stdin: str, *, timeout_s: float) -> CallResult: ...


async def is_solved(
    pool: Programs, puzzle: Mapping[str, object], answer: str, *, timeout_s: float
) -> tuple[bool, str]:
    """Return whether `answer` scores 1, and an explanation. Takes and raises what `score` does."""
    value, reason = await score(pool, puzzle, answer, timeout_s=timeout_s)
    return value == 1, reason


async def score(
    pool: Programs, puzzle: Mapping[str, object], answer: str, *, timeout_s: float
) -> tuple[float, str]:
    """Return the score of `answer`, from 0 to 1, and an explanation.

    Args:
        puzzle: Family, size, seed, index and, if any, further options of the data set.

    Raises:
        CallFailed: The sandbox failed before scoring.
        SettingsError: The sandbox's Python has no reasoning-gym.
    """
    mark = secrets.token_hex(16)
    request = json.dumps({"puzzle": dict(puzzle), "answer": answer, "mark": mark})
    family = str(puzzle["family"])
    for _ in range(2):
        try:
            result = await pool.run(_PROGRAM, stdin=request, timeout_s=timeout_s)
        except SandboxError as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from error
        if result.status.is_unscorable or f"{mark} scores\n" not in result.stdout:
            raise _not_scored(result, mark)
        if result.status is not CallStatus.TIMEOUT:
            return _verdict(result, mark, family)
    return 0.0, f"{family} took longer than {timeout_s:g} s to score it, twice"


def _not_scored(result: CallResult, mark: str) -> Exception:
    """Return the error that kept the program from scoring the answer."""
    outcome = _last_line(result.stdout, mark)
    if outcome is not None and "missing" in outcome:
        return SettingsError(
            f"reasoning-gym is not installed in the sandbox ({outcome['missing']}): use an image "
            'that has it, or set sandbox.backend to "process"'
        )
    reason = result.error.message if result.error is not None else result.stderr[-500:].strip()
    return CallFailed(f"the sandbox call ended with status {result.status}: {reason}")


def _verdict(result: CallResult, mark: str, family: str) -> tuple[float, str]:
    outcome = _last_line(result.stdout, mark)
    if result.status is not CallStatus.OK or outcome is None:
        status = "" if result.status is CallStatus.OK else f" ({result.status})"
        return 0.0, f"it ended the process that scored it{status}"
    if "raised" in outcome:
        return 0.0, f"{family} raised {outcome['raised']} on it"
    value = outcome.get("score")  # untrusted: the answer may have forged it
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        return 0.0, f"{family} gives it no score"
    return float(value), f"{family} scores it {value:g}"


def _last_line(stdout: str, mark: str) -> dict[str, object] | None:
    line = stdout.rstrip("\n").rpartition("\n")[2]
    try:
        outcome = json.loads(line.removeprefix(mark)) if line.startswith(mark) else None
    except ValueError:
        return None
    return outcome if isinstance(outcome, dict) else None
