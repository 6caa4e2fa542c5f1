"""Emulation of the tools for the evaluation: an interpreter of whitelisted syntax, without eval."""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable
from typing import Any

from tools.small_model.problems import Calc
from tools.small_model.toolbox import Style, Toolbox

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_POWER, _MAX_BITS = 8, 4096


class CalculationError(Exception):
    """The model's text is not a call, or its code is not plain integer arithmetic."""


def value(node: ast.expr) -> int | range:
    """Return the value of an integer expression with + - * // % **, gcd, sum and range."""
    match node:
        case ast.Constant(value=int() as number) if number.bit_length() <= _MAX_BITS:
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_integer(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            power = _integer(right)
            if not 0 <= power <= _MAX_POWER:
                raise CalculationError(f"power {power}")
            return int(_integer(left) ** power)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            try:
                return int(_BINARY[type(op)](_integer(left), _integer(right)))
            except ZeroDivisionError as error:
                raise CalculationError("ZeroDivisionError") from error
        case ast.Call(func=ast.Name(id="range"), args=arguments, keywords=[]):
            return range(*map(_integer, arguments))
        case ast.Call(func=ast.Name(id="sum"), args=[argument], keywords=[]):
            numbers = value(argument)
            if isinstance(numbers, range) and len(numbers) <= 100_000:
                return sum(numbers)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="gcd"), args=arguments):
            return math.gcd(*map(_integer, arguments))
    raise CalculationError(f"not arithmetic: {ast.unparse(node)}")


def _integer(node: ast.expr) -> int:
    number = value(node)
    if isinstance(number, range):
        raise CalculationError("a range is not a number")
    return number


def run_code(code: str, *, show_last: bool) -> str:
    """Return the output of `code`; with `show_last`, its last line's value, as in a notebook."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError) as error:
        raise CalculationError(str(error)) from error
    lines = []
    for number, statement in enumerate(body):
        match statement:
            case ast.Import(names=[ast.alias(name="math", asname=None)]):
                pass
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=[argument], keywords=[])):
                lines.append(str(_integer(argument)))
            case ast.Expr(value=expression) if show_last and number + 1 == len(body):
                lines.append(str(_integer(expression)))
            case ast.Expr(value=expression):
                _integer(expression)
            case _:
                raise CalculationError(f"not allowed: {ast.unparse(statement)}")
    return "\n".join(lines)


def answer_call(text: str, box: Toolbox, expected: Calc) -> str:
    """Return the response to the body of a `<tool_call>`; `expected` gives the right operands."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
    except (ValueError, KeyError, TypeError) as error:
        raise CalculationError(f"not a call: {text!r}") from error
    tool = box.pick(expected)
    if tool is None or name != tool.name or not isinstance(arguments, dict):
        raise CalculationError(f"calls {name!r}")
    if tool.style is Style.OPERANDS:
        values = [arguments.get(parameter) for parameter in tool.parameters]
        if list(arguments) != list(tool.parameters) or values != [expected.a, expected.b]:
            raise CalculationError(f"arguments {arguments}")
        return str(expected.value)
    argument = arguments.get(tool.parameters[0])
    if not isinstance(argument, str):
        raise CalculationError(f"arguments {arguments}")
    return run_code(argument, show_last=tool.style is not Style.PYTHON)
