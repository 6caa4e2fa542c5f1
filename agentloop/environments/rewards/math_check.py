r"""Compare answers: numbers exactly, everything else with math-verify.

Run `is_equal` in a process that can be killed, because some answers never terminate and it has no
timeout of its own (math-verify's timeout uses a signal and reports a wrong answer). Only
math-verify's LaTeX parser is used: its other parser passes text to Python's eval.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction

__all__ = ["is_equal", "number", "same_number"]

_MAX_DIGITS = 200  # int() takes quadratic time, and no real answer is longer
_INVISIBLE = re.compile(r"\\[!,;: ]|~|\s+")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_RATIO = re.compile(r"([+-]?\d+)/(\d+)", re.ASCII)
_FRAC = re.compile(r"([+-]?)\\[dt]?frac\{([+-]?\d+)\}\{([+-]?\d+)\}", re.ASCII)


def number(text: str) -> Fraction | None:
    """Return the value of `text` if all of it is an integer, decimal or fraction, else None."""
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
    if match := _FRAC.fullmatch(text):
        sign, above, below = match.groups()
    elif match := _RATIO.fullmatch(text):
        above, below = match.groups()
    else:
        return None
    if int(below) == 0:
        return None
    return Fraction(int(above), int(below)) * (-1 if sign == "-" else 1)


def same_number(gold: str, answer: str) -> bool | None:
    """Return whether both texts denote the same number, or None if that cannot be decided.

    Undecided are texts that are not numbers and decimals that may be rounded, such as 0.333333 for
    1/3.
    """
    if gold.strip() == answer.strip():
        return True
    gold_value, answer_value = number(gold), number(answer)
    if gold_value is None or answer_value is None:
        return None
    if gold_value == answer_value:
        return True
    return False if gold_value.denominator == answer_value.denominator == 1 else None


def is_equal(gold: str, answer: str) -> bool:
    """Return whether math-verify considers `answer` equal to `gold`. May hang or crash.

    Requires the extra `math`.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Box both, so that math-verify parses the whole text and not just a number in it.
    parsed_gold, parsed_answer = (
        parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
        for text in (gold, answer)
    )
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=None))
