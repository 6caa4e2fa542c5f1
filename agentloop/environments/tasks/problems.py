"""Generate problems of a given level whose answer, always an integer, is known. Pure.

Nothing is solved: an equation is built around its root, and an integrand is the derivative of a
polynomial. All randomness comes from the `random.Random` argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

__all__ = ["GENERATORS", "Problem", "arithmetic", "symbolic"]


@dataclass(frozen=True, slots=True)
class Problem:
    text: str
    answer: int


def arithmetic(level: int, rng: Random) -> Problem:
    """Make a chain of sums, differences and products.

    Numbers have up to 1, 2 and 3 digits at levels 1 to 3; every three levels add a step.
    """
    digits, steps = 1 + (level - 1) % 3, 1 + (level - 1) // 3
    value, first = _number(digits, rng), _number(digits, rng)
    op = rng.choice(_OPS)
    text = f"{value} {op.between} {first}"
    value = op.apply(value, first)
    if steps == 1:
        return Problem(f"What is {text}?", value)
    for _ in range(steps - 1):
        op, operand = rng.choice(_OPS), _number(digits, rng)
        text += f", then {op.then} {operand}"
        value = op.apply(value, operand)
    return Problem(f"Take {text}. What is the result?", value)


@dataclass(frozen=True, slots=True)
class _Op:
    between: str
    then: str
    apply: Callable[[int, int], int]


_OPS = (
    _Op("plus", "add", int.__add__),
    _Op("minus", "subtract", int.__sub__),
    _Op("times", "multiply by", int.__mul__),
)


def _number(digits: int, rng: Random) -> int:
    return rng.randrange(1, 10 ** rng.randint(1, digits))


def symbolic(level: int, rng: Random) -> Problem:
    """Make an equation, derivative or integral; degrees and coefficients grow with the level."""
    return rng.choice((_linear, _quadratic, _system, _derivative, _integral))(level, rng)


def _linear(level: int, rng: Random) -> Problem:
    root = _coefficient(level, rng)
    left_slope, right_slope = rng.sample(range(-9 * level, 9 * level + 1), 2)
    constant = _coefficient(level, rng)
    right_constant = (left_slope - right_slope) * root + constant
    equation = f"{polynomial([constant, left_slope])} = {polynomial([right_constant, right_slope])}"
    return Problem(f"Solve for x: {equation}", root)


def _quadratic(level: int, rng: Random) -> Problem:
    roots = _coefficient(level, rng), _coefficient(level, rng)
    scale = rng.randint(1, level)
    terms = [scale * roots[0] * roots[1], -scale * sum(roots), scale]
    return Problem(f"What is the largest solution of {polynomial(terms)} = 0?", max(roots))


def _system(level: int, rng: Random) -> Problem:
    x, y = _coefficient(level, rng), _coefficient(level, rng)
    a, b, c = (_coefficient(level, rng) for _ in range(3))
    d = rng.choice([d for d in range(-9, 10) if d and a * d != b * c])
    equations = f"{_two_terms(a, b)} = {a * x + b * y} and {_two_terms(c, d)} = {c * x + d * y}"
    return Problem(f"Let {equations}. What is x + y?", x + y)


def _derivative(level: int, rng: Random) -> Problem:
    terms = [_coefficient(level, rng) for _ in range(level + 2)]
    at = rng.randint(-3, 3)
    value = evaluate(derivative(terms), at)
    return Problem(f"Let f(x) = {polynomial(terms)}. What is f'({at})?", value)


def _integral(level: int, rng: Random) -> Problem:
    terms = [0, *(_coefficient(level, rng) for _ in range(level + 1))]
    low, high = sorted(rng.sample(range(-3, 4), 2))
    value = evaluate(terms, high) - evaluate(terms, low)
    integrand = polynomial(derivative(terms))
    return Problem(f"What is the integral of {integrand} from x = {low} to x = {high}?", value)


GENERATORS: dict[str, Callable[[int, Random], Problem]] = {
    "arithmetic": arithmetic,
    "symbolic": symbolic,
}


def evaluate(terms: Sequence[int], x: int) -> int:
    """Return the value at `x` of a polynomial with coefficients `terms`, constant first."""
    return sum(term * x**power for power, term in enumerate(terms))


def derivative(terms: Sequence[int]) -> list[int]:
    return [power * term for power, term in enumerate(terms)][1:]


def polynomial(terms: Sequence[int]) -> str:
    """Format a polynomial in the usual notation, highest power first."""
    parts = []
    for power, term in reversed(list(enumerate(terms))):
        if term:
            variable = {0: "", 1: "x"}.get(power, f"x^{power}")
            parts.append(_term(term, variable))
    return _join(parts)


def _two_terms(a: int, b: int) -> str:
    return _join([_term(a, "x"), _term(b, "y")])


def _term(number: int, variable: str) -> str:
    if variable and abs(number) == 1:
        return variable if number > 0 else f"-{variable}"
    return f"{number}{variable}"


def _join(parts: Sequence[str]) -> str:
    return " + ".join(parts).replace("+ -", "- ") or "0"


def _coefficient(level: int, rng: Random) -> int:
    """Return a nonzero coefficient, of one digit at level 1."""
    return rng.choice((-1, 1)) * rng.randint(1, 9 * level)
