r"""Compare answers: numbers by their values, everything else with math-verify.

Run `is_equal` in a process that can be killed, because some answers never terminate and it has no
timeout of its own (math-verify's timeout uses a signal and reports a wrong answer). Only
math-verify's LaTeX parser is used: its other parser passes text to Python's eval.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

__all__ = ["TOLERANCE", "is_equal", "number", "same_number"]

TOLERANCE = Fraction(1, 10**6)
"""Largest difference of a rounded decimal from the value, relative to the larger of both."""

_MAX_CHARS = 4000  # of an answer that is compared as more than text
_MAX_DIGITS = 200  # int() takes quadratic time, and no real answer is longer
_MARKS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\*{1,3}([^*]+)\*{1,3}",
        r"_{2}([^_]+)_{2}",
        r"`+([^`]+)`+",
        r"\${1,2}([^$]+)\${1,2}",
        r"\\\((.+)\\\)",
        r"\\\[(.+)\\\]",
    )
]
_MINUS = re.compile(r"[\u2212\ufe63\uff0d]|(?<!\d)[\u2010\u2011\u2013]|[\u2010\u2011\u2013](?!\d)")
_UNICODE = str.maketrans(
    {
        "\u00b2": "^{2}",
        "\u00b3": "^{3}",
        "\u00bd": r"\frac{1}{2}",
        "\u00bc": r"\frac{1}{4}",
        "\u00be": r"\frac{3}{4}",
        "\N{FRACTION SLASH}": "/",
        "\N{INFINITY}": r"\infty ",
        "\N{DEGREE SIGN}": r"^{\circ}",
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},  # of full width
    }
)
_ROOT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))", re.ASCII)
# Those that math-verify does not know.
_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:[cdkm]m|ft|in|yd|km/h|mph|dollars?|USD)\s*(?:\^\s*\{?[23]\}?)?$"
)
_WORD = re.compile(r"[A-Za-z][a-z]{2,}")
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,4})(?![\w.])", re.ASCII)
_BASE = re.compile(
    r"(?<![\w.\\])(?:(?P<digits>\d[\da-zA-Z]*)|\((?P<enclosed>\d[\da-zA-Z]*)\))\s*"
    r"(?:_(?P<short>\d)(?!\d)|_\{(?P<subscript>[^{}]*(?:\{[^{}]*\})?[^{}]*)\}"
    r"|(?:\\text\{)?\s*\(?base[- ](?P<words>\w+)\)?\}?)",
    re.ASCII,
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
          "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16}  # fmt: skip
_FONT = re.compile(r"\\(?:text|textbf|textrm|mathbf|mathrm|bf|rm)\s*\{([^{}\\]*)\}")
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree)$")
_INVISIBLE = re.compile(r"(?<!,)\\[!,;: ]|,\\!|~|[\u2009\u202f]|\s+")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)", re.ASCII)
_POWER_OF_TEN = re.compile(
    r"([+-]?)(?:(\d+\.?\d*|\.\d+)(?:\\cdot|\\times|[*\u00d7\u00b7]))?10\^(?:\{([+-]?\d{1,4})\}|(\d))",
    re.ASCII,
)
_RATIO = re.compile(r"([+-]?\d+)/(\d+)", re.ASCII)
_FRAC = re.compile(r"([+-]?)\\[dt]?frac\{([+-]?\d+)\}\{([+-]?\d+)\}", re.ASCII)
_LITERAL = re.compile(r"([+-]?)(0[xX][\da-fA-F]+|0[bB][01]+|0[oO][0-7]+)", re.ASCII)


def plain(text: str) -> str:
    """Return the text without the marks around it, such as `**` and `$`, and with signs of Unicode,
    powers of ten and numbers of other bases as LaTeX has them."""
    text = text.strip()
    while match := next((m for m in (mark.fullmatch(text) for mark in _MARKS) if m), None):
        text = match[1].strip()
    text = _MINUS.sub("-", text.removesuffix(".")).translate(_UNICODE)
    text = _ROOT.sub(r"\\sqrt{\1\2}", text)
    text = _EXPONENT.sub(r"\1\\cdot10^{\2}", text)
    return _BASE.sub(_in_base_ten, text) if "_" in text or "base" in text else text


def _in_base_ten(match: re.Match[str]) -> str:
    name = match["short"] or match["words"] or match["subscript"]
    name = re.sub(r"\\(?:text|mathrm)|base|[\s{}()~-]", "", name)
    base = int(name) if name.isascii() and name.isdecimal() else _BASES.get(name, 0)
    digits = match["digits"] or match["enclosed"]
    if not 2 <= base <= 36 or len(digits) > _MAX_DIGITS:
        return match[0]
    try:
        return str(int(digits, base))
    except ValueError:  # not digits of this base
        return match[0]


def number(text: str) -> Fraction | None:
    """Return the value of `text` if all of it is an integer, decimal or fraction, else None."""
    if len(text) > _MAX_DIGITS:
        return None
    text = plain(text)
    if match := _FONT.fullmatch(text):
        text = plain(match[1])
    text = _DEGREES.sub("", text).replace("{,}", ",")
    if re.search(r"\\|~|[\u2009\u202f]", text):
        text = _INVISIBLE.sub(lambda space: "," if space[0].startswith(",") else "", text)
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    if match := _POWER_OF_TEN.fullmatch(text):
        sign, factor, exponent, digit = match.groups()
        return Fraction(f"{sign}{factor or 1}") * Fraction(10) ** int(exponent or digit)
    if match := _LITERAL.fullmatch(text):
        return Fraction(int(match[0], 0))
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


def same_number(gold: str, answer: str, *, tolerance: Fraction = TOLERANCE) -> bool | None:
    """Return whether both texts denote the same number, or None if one is not a number.

    Integers are equal exactly, and so are fractions; a decimal, which may be rounded, is equal to
    a number that is not an integer within `tolerance`.
    """
    if max(len(gold), len(answer)) > _MAX_CHARS:
        return True if gold.strip() == answer.strip() else None
    gold_text, answer_text = plain(gold), plain(answer)
    if gold_text == answer_text:
        return True
    values = number(gold), number(answer)
    if values[0] is None or values[1] is None:
        return None
    is_exact = not any("." in text or "10^" in text for text in (gold_text, answer_text))
    return _is_close(values[0], values[1], 0 if is_exact else tolerance)


def _is_close(gold: Any, answer: Any, tolerance: Any) -> bool:
    """Compare rational numbers, of Python or of sympy."""
    if gold == answer:
        return True
    if gold.denominator == 1 or answer.denominator == 1:
        return False
    return bool(abs(gold - answer) <= tolerance * max(abs(gold), abs(answer)))


def is_equal(gold: str, answer: str) -> bool:
    """Return whether math-verify considers `answer` equal to `gold`. May hang or crash."""
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _compare_numbers_by_size()
    gold, answer = (_UNIT.sub("", plain(text)) for text in (gold, answer))
    if _WORD.fullmatch(gold) and _WORD.fullmatch(answer):  # to math-verify, products of letters
        return gold.casefold() == answer.casefold()
    # Box both, so that math-verify parses the whole text and not just a number in it.
    parsed_gold, parsed_answer = (
        parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
        for text in (gold, answer)
    )
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=None))


@cache
def _compare_numbers_by_size() -> None:
    """Make math-verify compare numbers as `same_number` does, in tuples and matrices as well.

    Its own function rounds to six decimals, so all small numbers are equal to it. Everything in
    math-verify that compares parts of answers calls that one function.
    """
    from math_verify import grader

    grader.sympy_numeric_eq = _numeric_eq(grader, grader.sympy_numeric_eq)


def _numeric_eq(grader: Any, original: Callable[..., bool]) -> Callable[..., bool]:
    import sympy

    matrices = sympy.MatrixBase, sympy.MatrixExpr

    def numeric_eq(gold: Any, answer: Any, float_rounding: int, numeric_precision: int) -> bool:
        if isinstance(gold, matrices) or isinstance(answer, matrices):  # calls this for elements
            return original(gold, answer, float_rounding, numeric_precision)
        if all(grader.is_atomic_or_pct_atomic(it, sympy.Integer) for it in (gold, answer)):
            return original(gold, answer, float_rounding, numeric_precision)  # 9% is 9
        try:
            gold, answer = grader.safe_sympy_doit(gold), grader.safe_sympy_doit(answer)
            is_rounded = gold.has(sympy.Float) or answer.has(sympy.Float)
            gold, answer = (
                it.xreplace(
                    {decimal: sympy.Rational(str(decimal)) for decimal in it.atoms(sympy.Float)}
                )
                for it in (gold, answer)
            )
            if gold.is_Rational and answer.is_Rational:
                return _is_close(gold, answer, sympy.Rational(TOLERANCE) if is_rounded else 0)
            difference = (gold - answer).evalf(numeric_precision)
            if difference == 0:
                return True
            if gold.is_Integer or answer.is_Integer:
                is_rounded = False
            size = max(abs(gold.evalf(numeric_precision)), abs(answer.evalf(numeric_precision)))
            if not size.is_finite:  # or infinity would be close to every number
                return False
            tolerance = TOLERANCE if is_rounded else Fraction(1, 10**12)
            return bool(abs(difference) <= sympy.Rational(tolerance) * size)
        except Exception:  # symbols have no size; sympy raises anything
            return False

    return numeric_eq
