r"""What a rollout gives as its answer: the text in <answer>...</answer>, and there in \boxed{}."""

from __future__ import annotations

import re

__all__ = ["boxed", "final_answer", "tagged"]

# The innermost pair: a tag that is opened twice and closed once holds one answer.
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BRACES = re.compile(r"(?P<boxed>\\f?boxed\s*\{)|\\.|[{}]", re.DOTALL)


def tagged(text: str) -> list[str]:
    """What stands in each <answer>...</answer> that is closed, in order."""
    return _TAGGED.findall(text)


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` whose braces balance; those of `\{` do not count."""
    open_braces: list[int | None] = []  # where the text in it begins, for each box
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
    r"""The answer of a last turn that reads `text`; None where there is none.

    The last <answer> counts, and in it the last `\boxed{}`, or all of it where nothing is boxed.
    Without the tag it is the last `\boxed{}` of the text.
    """
    answers = tagged(text)
    if not answers:
        return boxed(text) or None
    inside = boxed(answers[-1])
    return (answers[-1].strip() if inside is None else inside) or None
