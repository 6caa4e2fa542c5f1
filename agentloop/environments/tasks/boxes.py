r"""The text in `\boxed{}`, in the forms that models and data sets write. Pure."""

from __future__ import annotations

import re

__all__ = ["last_box"]

_BRACES = re.compile(
    # In JSON or Python the backslash is doubled, or \b has become a backspace.
    r"(?P<boxed>(?:\\{0,4}(?<![A-Za-z])f?boxed|\x08oxed|\\{1,4}(?:fbox|framebox))\s*\{)|\\.|[{}]",
    re.DOTALL,
)
_BARE_BOX = re.compile(r"\\f?boxed(?![A-Za-z])[ \t]*(?P<text>[^\n]*)")
_MATH_END = re.compile(r"\$|\\\)|\\\]")


def last_box(text: str) -> str | None:
    r"""Return the text of the last `\boxed{...}`, empty if it does not end; None if there is none.

    Escaped braces such as `\{` are ignored. Where no box has braces, it is what follows `\boxed`.
    """
    open_braces: list[int | None] = []  # start of the text for a box, None for a plain brace
    last_start, box = -1, ""
    for brace in _BRACES.finditer(text):
        if brace["boxed"]:
            open_braces.append(brace.end())
            last_start, box = brace.end(), ""
        elif brace[0] == "{":
            open_braces.append(None)
        elif brace[0] == "}" and open_braces and open_braces.pop() == last_start:
            box = text[last_start : brace.start()].strip()
    return _last_bare_box(text) if last_start < 0 else box


def _last_bare_box(text: str) -> str | None:
    boxes = [match["text"] for match in _BARE_BOX.finditer(text)]
    if not boxes:
        return None
    in_math, *after = _MATH_END.split(boxes[-1], maxsplit=1)
    words = in_math.split()
    inside = in_math if after else words[0] if words else ""
    return inside.strip().rstrip(".,;:!?")
