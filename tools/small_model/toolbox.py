"""The tools that an episode offers: the two built-in ones, and tools of any name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from tools.small_model.names import Names, identifier
from tools.small_model.problems import OPS, Calc, Op


class Style(StrEnum):
    """The kind of arguments that a tool takes."""

    PYTHON = "python"
    JUPYTER = "jupyter"
    OPERANDS = "operands"
    EXPRESSION = "expression"


@dataclass(frozen=True, slots=True)
class ToyTool:
    name: str
    parameters: tuple[str, ...]
    style: Style

    @property
    def schema(self) -> dict[str, Any]:
        kind = "integer" if self.style is Style.OPERANDS else "string"
        properties = {name: {"type": kind} for name in self.parameters}
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    def arguments(self, calc: Calc) -> dict[str, int | str]:
        """Return the arguments with which the teacher has `calc` computed."""
        match self.style:
            case Style.PYTHON:
                return {"code": f"{calc.op.imports}print({calc.expression})"}
            case Style.JUPYTER:
                return {"code": f"{calc.op.imports}{calc.expression}"}
            case Style.OPERANDS:
                return {self.parameters[0]: calc.a, self.parameters[1]: calc.b}
            case Style.EXPRESSION:
                return {self.parameters[0]: calc.expression}

    def call(self, arguments: dict[str, int | str]) -> str:
        body = json.dumps({"name": self.name, "arguments": arguments})
        return f"<tool_call>\n{body}\n</tool_call>"


PYTHON = ToyTool("python_code_with_standard_io", ("code", "input"), Style.PYTHON)
JUPYTER = ToyTool("jupyter_code", ("code",), Style.JUPYTER)

BY_MEANING = {
    "add": ("add", "plus", "add_numbers", "sum_two", "addition"),
    "sub": ("subtract", "minus", "sub", "difference", "subtract_numbers"),
    "mul": ("multiply", "times", "mul", "product", "multiply_numbers"),
    "div": ("divide", "quotient", "integer_divide", "div"),
    "mod": ("modulo", "remainder", "mod"),
    "gcd": ("gcd", "greatest_common_divisor"),
    "pow": ("power", "pow", "raise_to_power"),
}
_PAIRS = (
    ("a", "b"), ("x", "y"), ("left", "right"), ("first", "second"), ("n", "m"), ("p", "q"),
    ("lhs", "rhs"), ("first_number", "second_number"), ("num1", "num2"), ("i", "j"), ("u", "v"),
    ("value_a", "value_b"), ("x1", "x2"), ("number_one", "number_two"), ("base", "exponent"),
)  # fmt: skip
_ENDS = (("1", "2"), ("_a", "_b"), ("_1", "_2"), ("_one", "_two"), ("A", "B"))
_ONES = ("expression", "expr", "formula", "text", "query", "input", "code", "s", "q", "problem")
_COMMON = frozenset(name for names in BY_MEANING.values() for name in names)


def custom(rng: Random, style: Style, names: Names) -> ToyTool:
    """Return a tool that takes two operands, or one expression."""
    name = identifier(rng, names, _COMMON)
    if names.seen and rng.random() < 0.12:
        name = rng.choice(sorted(_COMMON))
    if style is Style.EXPRESSION:
        argument = identifier(rng, names, _COMMON)
        if names.seen and rng.random() < 0.3:
            argument = rng.choice(_ONES)
        return ToyTool(name, (argument,), style)
    pair = (identifier(rng, names, _COMMON), identifier(rng, names, _COMMON))
    if pair[0] == pair[1] or (names.seen and rng.random() < 0.35):
        pair = rng.choice(_PAIRS)
    elif names.wide and rng.random() < 0.3:
        ends = rng.choice(_ENDS)
        pair = (pair[0] + ends[0], pair[0] + ends[1])
    return ToyTool(name, pair, style)


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of an episode, and which of them serves a calculation.

    `meanings` maps operations to tools if several custom tools are on offer.
    """

    tools: tuple[ToyTool, ...]
    chosen: ToyTool | None = None
    meanings: tuple[tuple[str, ToyTool], ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        """The operations that these tools serve."""
        served = dict(self.meanings)
        return OPS if self.chosen else tuple(op for op in OPS if op.name in served)

    def pick(self, calc: Calc) -> ToyTool | None:
        return dict(self.meanings).get(calc.op.name, self.chosen)


def toolbox(rng: Random, styles: tuple[Style, ...], names: Names) -> Toolbox:
    """Return a toolbox whose chosen tool has one of `styles`; a custom one may come with built-in
    ones."""
    style = rng.choice(styles)
    if style is Style.PYTHON:
        return Toolbox(_shuffle(rng, PYTHON, *([JUPYTER] if rng.random() < 0.3 else [])), PYTHON)
    if style is Style.JUPYTER:
        return Toolbox((JUPYTER,), JUPYTER)
    tool = custom(rng, style, names)
    beside = rng.choices(((), (PYTHON,), (JUPYTER,), (PYTHON, JUPYTER)), (60, 20, 8, 12))[0]
    return Toolbox(_shuffle(rng, tool, *beside), tool)


def by_meaning(rng: Random) -> Toolbox:
    """Return two to four tools with meaningful names, sometimes with Python for all other
    operations."""
    pair = rng.choice(_PAIRS[:6])
    names = rng.sample(sorted(BY_MEANING), rng.randint(2, 4))
    meanings = tuple(
        (op, ToyTool(rng.choice(BY_MEANING[op]), pair, Style.OPERANDS)) for op in names
    )
    tools = [tool for _, tool in meanings]
    if rng.random() < 0.5:
        return Toolbox(_shuffle(rng, *tools), None, meanings)
    return Toolbox(_shuffle(rng, PYTHON, *tools), PYTHON, meanings)


def _shuffle(rng: Random, *tools: ToyTool) -> tuple[ToyTool, ...]:
    return tuple(rng.sample(tools, len(tools)))
