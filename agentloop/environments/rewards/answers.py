r"""Extract a rollout's answer: the text in <answer>...</answer> and, within it, in \boxed{}."""

from __future__ import annotations

import re

__all__ = ["final_answer", "last_box", "tagged_answers"]

# Match the innermost pair, so a tag that is opened twice and closed once gives one answer.
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BRACES = re.compile(r"(?P<boxed>\\f?boxed\s*\{)|\\.|[{}]", re.DOTALL)


def tagged_answers(text: str) -> list[str]:
    """Return the text of each closed <answer>...</answer>, in order."""
    return _TAGGED.findall(text)


def last_box(text: str) -> str | None:
    r"""Return the text of the last balanced `\boxed{...}`, ignoring escaped braces such as `\{`."""
    open_braces: list[int | None] = []  # start of the text for a box, None for a plain brace
    start, end = -1, -1
    for brace in _BRACES.finditer(text):
        if brace["boxed"]:
            open_braces.append(brace.end())
        elif brace[0] == "{":
            open_braces.append(None)
        elif brace[0] == "}" and open_braces:
            began = open_braces.pop()
            if began is not None and began > start:
                start, end = began, brace.start()
    return text[start:end].strip() if start >= 0 else None


def final_answer(text: str) -> str | None:
    r"""Return the answer in the text of the last turn, or None if it has none.

    The answer is the last `\boxed{}` in the last <answer>, or all of that <answer> if nothing in it
    is boxed. If there is no <answer>, it is the last `\boxed{}` of the text.
    """
    answers = tagged_answers(text)
    if not answers:
        return last_box(text) or None
    inside = last_box(answers[-1])
    return (answers[-1].strip() if inside is None else inside) or None
