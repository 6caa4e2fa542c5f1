r"""Whether two answers mean the same: exactly for numbers, by math-verify for the rest.

`verified` runs in a process that can be killed: it has no deadline of its own (math-verify's would
turn a timeout into a wrong answer, by a signal), and some answers never end. Of the parsers that
math-verify has, only the one for LaTeX is used: the other hands text to Python's eval.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

__all__ = ["number", "same_number", "verified"]

_MAX_DIGITS = 200  # of a number; int() is quadratic, and no answer is that long
_INVISIBLE = re.compile(r"\\[!,;: ]|~|\s+")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_RATIO = re.compile(r"([+-]?\d+)/(\d+)", re.ASCII)
_FRAC = re.compile(r"([+-]?)\\[dt]?frac\{([+-]?\d+)\}\{([+-]?\d+)\}", re.ASCII)


def number(text: str) -> Fraction | None:
    """The number that `text` is as a whole: an integer, a decimal or a fraction; else None."""
    text = text.strip().removeprefix("$").removesuffix("$").strip()
    text = text.removesuffix(".").replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    if len(text) > _MAX_DIGITS:
        return None
    text = _INVISIBLE.sub("", text) if "\\" in text or "~" in text else text
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    sign = "+"
    if found := _FRAC.fullmatch(text):
        sign, above, below = found.groups()
    elif found := _RATIO.fullmatch(text):
        above, below = found.groups()
    else:
        return None
    if int(below) == 0:
        return None
    return Fraction(int(above), int(below)) * (-1 if sign == "-" else 1)


def same_number(gold: str, answer: str) -> bool | None:
    """Whether both are one number. None: this does not decide it, as with 0.333333 and 1/3."""
    if gold.strip() == answer.strip():
        return True
    left, right = number(gold), number(answer)
    if left is None or right is None:
        return None
    if left == right:
        return True
    return False if left.denominator == right.denominator == 1 else None


def verified(gold: str, answer: str) -> bool:
    """Whether math-verify takes `answer` for `gold`. May hang, and may crash: see above.

    Needs the extra `math`.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Both are boxed, so that all of the text is the answer, not a number that stands in it.
    left, right = (
        parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
        for text in (gold, answer)
    )
    return bool(verify(left, right, timeout_seconds=None))
