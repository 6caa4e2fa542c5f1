"""Problem generator, toolboxes and the emulated tools; needs no torch."""

from __future__ import annotations

import json
from random import Random

import pytest

from tools.small_model import problems
from tools.small_model.calculate import CalculationError, answer_call, run_code
from tools.small_model.episodes import NO_TOOLS, Episode, question, sample, teach
from tools.small_model.names import Names, identifier
from tools.small_model.problems import ADD, GCD, SUM, Calc, held_out
from tools.small_model.toolbox import (
    JUPYTER,
    PYTHON,
    Style,
    Toolbox,
    ToyTool,
    by_meaning,
    custom,
    toolbox,
)

STYLES = tuple(Style)


@pytest.mark.parametrize("unseen", [False, True])
def test_problems_keep_to_their_side_of_the_split(unseen: bool) -> None:
    rng = Random(1)
    for kind in (problems.single, problems.two_step, problems.several):
        for _ in range(100):
            ask = kind(rng, unseen=unseen)
            for calc in ask.rounds[0]:
                assert held_out(f"{calc.a} {calc.b}") is unseen


@pytest.mark.parametrize("names", Names)
def test_names_keep_to_their_side_of_the_split(names: Names) -> None:
    rng = Random(1)
    drawn = [identifier(rng, names, frozenset({"add"})) for _ in range(300)]
    assert {held_out(name) for name in drawn if name != "add"} == {not names.seen}
    assert all(name.isidentifier() for name in drawn)


def test_a_custom_tool_of_unseen_names_has_no_seen_one() -> None:
    rng = Random(1)
    assert all(held_out(custom(rng, Style.OPERANDS, Names.UNSEEN).name) for _ in range(100))


def test_operands_stand_in_the_question() -> None:
    rng = Random(2)
    for _ in range(300):
        ask = problems.single(rng, unseen=False)
        (calc,) = ask.rounds[0]
        assert str(calc.a) in ask.text
        assert str(calc.b) in ask.text or calc.op is problems.POW


@pytest.mark.parametrize("names", Names)
@pytest.mark.parametrize("style", STYLES)
def test_the_teachers_calls_compute_the_answer(style: Style, names: Names) -> None:
    rng = Random(3)
    for _ in range(200):
        box = toolbox(rng, (style,), names)
        ask = question(rng, box)
        for calc in (calc for calls in ask.rounds for calc in calls):
            tool = box.pick(calc)
            assert tool is not None
            body = json.dumps({"name": tool.name, "arguments": tool.arguments(calc)})
            assert answer_call(body, box, calc) == str(calc.value)


def test_the_tool_with_the_telling_name_is_picked() -> None:
    rng = Random(4)
    for _ in range(100):
        box = by_meaning(rng)
        for op in box.ops:
            tool = box.pick(Calc(op, 3, 2))
            assert tool in box.tools


def test_every_kind_of_episode_appears_in_the_mixture() -> None:
    rng = Random(5)
    texts = ["\n".join(str(m["content"]) for m in sample(rng).messages) for _ in range(400)]
    for part in (
        "[error]",
        "[timeout]",
        "Three calls",
        "The call failed",
        "The result is",
        problems.NO_TOOL,
        problems.NOT_MINE,
        problems.ABOUT_ME,
        "math.gcd",
    ):
        assert any(part in text for text in texts), part


def test_a_wrong_attempt_is_shown_but_not_learned() -> None:
    rng = Random(6)
    for _ in range(300):
        episode = sample(rng)
        texts = [m["content"] for m in episode.messages if m["role"] == "assistant"]
        for text, trained in zip(texts, episode.trained, strict=True):
            assert not (trained and "prnt" in text)


def test_without_tools_the_teacher_says_so() -> None:
    episode = Episode()
    teach(Random(7), episode, NO_TOOLS, problems.single(Random(7), unseen=False))
    assert problems.NO_TOOL in episode.messages[-1]["content"]


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(37*48)", "1776"),
        ("import math; print(math.gcd(12, 18))", "6"),
        ("print(sum(range(1, 100+1)))", "5050"),
        ("print((3-5)*2)\nprint(7//2)", "-4\n3"),
    ],
)
def test_code_of_the_small_model_runs(code: str, shown: str) -> None:
    assert run_code(code, show_last=False) == shown


def test_a_notebook_shows_its_last_value_and_plain_python_does_not() -> None:
    assert run_code("37*48", show_last=True) == "1776"
    assert run_code("37*48", show_last=False) == ""


@pytest.mark.parametrize(
    "code",
    [
        "print(",
        "import os",
        "print(open('x'))",
        "print(__import__('os'))",
        "print(1/2)",
        "print(1//0)",
        "print(9**9**9)",
        "print(sum(range(10**9)))",
        "x = 1",
        "print('a')",
        "print(1.5)",
    ],
)
def test_anything_but_integer_arithmetic_is_refused(code: str) -> None:
    with pytest.raises(CalculationError):
        run_code(code, show_last=False)


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "[]",
        '{"name": "mul"}',
        '{"name": "other", "arguments": {"a": 3, "b": 4}}',
        '{"name": "mul", "arguments": {"a": "3", "b": 4}}',
        '{"name": "mul", "arguments": {"b": 4, "a": 3}}',
        '{"name": "mul", "arguments": {"a": 4, "b": 3}}',
    ],
)
def test_a_call_must_fit_tool_names_and_operands(body: str) -> None:
    tool = ToyTool("mul", ("a", "b"), Style.OPERANDS)
    with pytest.raises(CalculationError):
        answer_call(body, Toolbox((tool,), tool), Calc(ADD, 3, 4))


def test_code_of_each_built_in_tool() -> None:
    assert PYTHON.arguments(Calc(GCD, 4, 6)) == {"code": "import math; print(math.gcd(4, 6))"}
    assert JUPYTER.arguments(Calc(SUM, 1, 9)) == {"code": "sum(range(1, 9+1))"}
