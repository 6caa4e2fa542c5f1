"""Check before a run that the reward function gives reference answers the reward of right ones.

tasks ──their answers, as a model would write them──> Grader ──below 1?──> file, line and why
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentloop.environments.rewards.answers import last_box
from agentloop.environments.rewards.reward import Grader, Reward, RewardSettings
from agentloop.environments.tasks.task import Task
from agentloop.errors import DataError, RewardError, SettingsError
from agentloop.trajectory import StopReason, Trajectory, Turn

__all__ = ["MAX_CHECKED", "BadReference", "bad_references", "require_references"]

MAX_CHECKED = 1000
"""Number of tasks that are checked at the start of a run; `agentloop data check` checks all."""

_MAX_CHECK_S = 15.0  # of a start: a user's function may ask a model
_MAX_WORDS, _MAX_WORDS_OF_SENTENCES = 25, 5
_MAX_SHOWN = 60
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_IN_BOX = "\\boxed{{{}}}"
_FORMS = (_IN_BOX, f"<think>\n\n</think>\n<answer>{_IN_BOX}</answer>", "{}", "#### {}")
_NEXT_SENTENCE = re.compile(r"\n|[.!?]\s+[A-Z]")


@dataclass(frozen=True, slots=True)
class BadReference:
    """A task whose own answer is worth nothing, and why, for people."""

    task: Task
    reason: str

    def __str__(self) -> str:
        return f"{self.task.source_line or f'task {self.task.id}'}: {self.reason}"


async def require_references(settings: RewardSettings, tasks: Iterable[Task]) -> None:
    """Check the first rows of files and data sets among the tasks, for some seconds at most.

    Raises:
        DataError: an answer is worth nothing; the message names its file and line.
        SettingsError: the user's function cannot be loaded or called, or failed.
    """
    rows = (task for task in tasks if task.source_line and "reasoning_gym" not in task.extra)
    checked = [*itertools.islice(rows, MAX_CHECKED)]
    if bad := await bad_references(settings, checked, within_s=_MAX_CHECK_S):
        share = f" ({len(bad):,} of the first {len(checked):,})" if len(checked) > 1 else ""
        raise DataError(f"{bad[0]}{share}; `agentloop data check` shows all")


async def bad_references(
    settings: RewardSettings, tasks: Sequence[Task], *, within_s: float = math.inf
) -> list[BadReference]:
    """Return the tasks whose own answer gets the reward 0.

    `math` and `exact` know no reward but 0 and 1. A user's function may have another scale, and may
    know only some of the forms in which a model writes an answer: one that is not 0 suffices.

    Args:
        within_s: no task is checked after this time, except the first.

    Raises:
        SettingsError: the user's function cannot be loaded or called, or failed.
    """
    bad: list[BadReference] = []
    is_own = ":" in settings.function
    forms = list(_FORMS) if is_own else [_IN_BOX]
    async with Grader(settings) as grader:
        await grader.ready()
        begun_s = time.monotonic()
        for index, task in enumerate(tasks):
            if index and time.monotonic() - begun_s > within_s:
                break
            reason = "" if is_own else _why_not_an_answer(task.answer)
            for number, form in enumerate(forms if not reason else ()):
                text = form.format(task.answer)
                record = Trajectory("reference", [], [Turn(text=text)], StopReason.ANSWERED)
                try:
                    reward = await grader.score(record, task)
                except RewardError as error:
                    where = task.source_line
                    raise SettingsError(
                        f"reward.function, with the answer of {where}: {error}"
                    ) from error
                if reward.value != 0:
                    forms.insert(0, forms.pop(number))  # to be tried first for the next task
                    break
            else:
                bad.append(BadReference(task, reason or _without_reward(settings, task, reward)))
    return bad


def _without_reward(settings: RewardSettings, task: Task, reward: Reward) -> str:
    return (
        f"reward.function = {settings.function!r} gives the row's own answer, "
        f"{_shorten(task.answer)}, the reward 0 ({reward.reason})"
    )


def _why_not_an_answer(answer: str) -> str:
    """Return why no model would put this text into a box, or an empty text."""
    num_words = len(_WORD.findall(answer))
    has_sentences = bool(_NEXT_SENTENCE.search(answer))
    if num_words > (_MAX_WORDS_OF_SENTENCES if has_sentences else _MAX_WORDS):
        return (
            f"the answer {_shorten(answer)} is a text of {num_words} words, which no right "
            "answer equals: name the column of the answer with tasks.fields.answer=NAME, or set "
            "reward.function to a function of your own"
        )
    if last_box(_IN_BOX.format(answer)) != answer:
        return f"the answer {_shorten(answer)} has braces that do not match"
    return ""


def _shorten(answer: str) -> str:
    return repr(answer if len(answer) <= _MAX_SHOWN else f"{answer[:_MAX_SHOWN]}...")
