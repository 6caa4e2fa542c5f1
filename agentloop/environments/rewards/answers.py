r"""Extract a rollout's answer: the text in <answer>...</answer> and, within it, in \boxed{}.

What counts is what the model has said last: neither what it thought nor what it passed to a tool,
and no earlier answer if the last one was cut off.
"""

from __future__ import annotations

import re

from agentloop.environments.tasks.boxes import last_box
from agentloop.trajectory import Trajectory

__all__ = ["final_answer", "last_box", "tagged_answers", "without_thoughts"]

# Match the innermost pair, so a tag that is opened twice and closed once gives one answer.
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_THOUGHT_TAG = re.compile(
    r"<(?P<closes>/)?(?:think|thinking|thought|reason|reasoning|seed:think)>"
    r"|\[(?P<closes_too>/)?THINK\]"
)
_ANALYSIS = re.compile(
    r"<\|channel\|>analysis.*?(?:<\|end\|>|<\|start\|>|(?=<\|channel\|>)|\Z)", re.DOTALL
)


def tagged_answers(text: str) -> list[str]:
    """Return the text of each closed <answer>...</answer>, in order."""
    return _TAGGED.findall(text)


def without_thoughts(text: str) -> str:
    """Return a turn's text without its thoughts, of which the last may be cut off.

    The first may have begun before the text, which then has its closing tag only. An <answer> ends
    a thought that is not closed.
    """
    text = _ANALYSIS.sub("", text)
    spoken: list[str] = []
    start, begun_at, is_first = 0, None, True
    for tag in _THOUGHT_TAG.finditer(text):
        if tag["closes"] or tag["closes_too"]:
            if begun_at is not None or is_first:
                start, begun_at = tag.end(), None
        elif begun_at is None:
            spoken.append(text[start : tag.start()])
            begun_at = tag.end()
        is_first = False
    if begun_at is not None:
        start = text.find("<answer>", begun_at)
    return "".join([*spoken, text[start:] if start >= 0 else ""])


def final_answer(rollout: Trajectory | str) -> str | None:
    r"""Return the answer of a rollout, or in the text of its last turn; None if it has none.

    The answer is the last `\boxed{}` in the last <answer>, or all of that <answer> if nothing in it
    is boxed. If there is no <answer>, it is the last `\boxed{}` of the text. Thoughts and calls of
    tools do not count: of a rollout, its chat format has told them from the rest.
    """
    if isinstance(rollout, str):
        return _answer_in(without_thoughts(rollout))
    text = without_thoughts(rollout.text)
    if not rollout.answer:
        # A rollout that ran, and said nothing, ended in a thought, which the prompt may have begun.
        return None if rollout.created_unix_s else _answer_in(text)
    answer = _answer_in(text)
    if answer == rollout.answer:  # such as that of a program
        return answer
    if "<answer>" not in text:
        return last_box(rollout.answer) or None
    return answer if answer is not None and answer in rollout.answer else None


def _answer_in(text: str) -> str | None:
    _, tag, after = text.rpartition("<answer>")
    if tag and "</answer>" not in after:  # cut off, or not closed
        return last_box(after) or None
    answers = tagged_answers(text)
    if not answers:
        return last_box(text) or None
    inside = last_box(answers[-1])
    return (answers[-1].strip() if inside is None else inside) or None
