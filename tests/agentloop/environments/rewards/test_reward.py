"""Rewards: what counts as the answer, what is right, and what must never become a 0."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import anyio
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.environments.rewards.answers import final_answer, last_box, tagged_answers
from agentloop.environments.rewards.math_check import number, same_number
from agentloop.environments.rewards.process_pool import (
    CallDied,
    CallNotStarted,
    CallRaised,
    CallTimedOut,
    ProcessPool,
)
from agentloop.environments.rewards.references import bad_references, require_references
from agentloop.environments.rewards.reward import Grader, Reward, RewardSettings
from agentloop.environments.tasks.sources import Task
from agentloop.environments.tasks.task import line_of
from agentloop.errors import DataError, RewardError, SettingsError
from agentloop.sandbox import CallStatus, SandboxUnavailable
from agentloop.trajectory import StopReason, ToolResult, Trajectory, Turn
from agentloop.trajectory import ToolCallStatus as ToolStatus
from tests.agentloop.environments.rewards import reward_functions
from tests.fakes import Said, scoring_pool
from tests.support import eventually

pytestmark = pytest.mark.timeout(120)  # processes start, and import much

FUNCTIONS = "tests.agentloop.environments.rewards.reward_functions"
FRAGILE = "tests.agentloop.environments.rewards.fragile_check:is_equal"


def rollout(*texts: str, reason: StopReason = StopReason.ANSWERED) -> Trajectory:
    return Trajectory("t", [1], [Turn(text=text) for text in texts], reason)


def task(answer: str = "5", **extra: Any) -> Task:
    return Task("task-1", "What is it?", answer, extra=extra)


def is_alive(pid: Path) -> bool:
    return Path("/proc", pid.read_text()).exists()


@pytest.fixture(scope="module")
async def grader() -> AsyncIterator[Grader]:
    """With the real math-verify."""
    async with Grader(RewardSettings(num_workers=1, timeout_s=60)) as grader:
        yield grader


@asynccontextmanager
async def scoring(function: str, **settings: Any) -> AsyncIterator[Grader]:
    made = RewardSettings(function=f"{FUNCTIONS}:{function}", num_workers=1, **settings)
    async with Grader(made) as grader:
        yield grader


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<answer>\boxed{5}</answer>", "5"),
        (r"<answer>\boxed{4} no, \boxed{5}</answer>", "5"),
        (r"<answer>\boxed{4}</answer> wait <answer>\boxed{5}</answer>", "5"),
        (r"<answer>\boxed{5}</answer> and \boxed{6} outside", "5"),
        (r"<answer> 1776 </answer>", "1776"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{5} and \boxed{6", None),
        (r"\boxed{5}, no: \boxed{\frac{7}{2}", None),
        (r"\boxed{5}, no: \boxed{}", None),
        (r"\boxed{5 or rather \boxed{7}", "7"),
        (r"\boxed{5", None),
        (r"\\boxed{5}", "5"),
        ("\boxed{5}", "5"),
        ("boxed{5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\framebox{5}", "5"),
        (r"$\boxed 25$ is it", "25"),
        (r"$\boxed\frac{1}{2}$", r"\frac{1}{2}"),
        (r"so \boxed 7. That is all", "7"),
        (r"\boxed{5} is in a \boxed form", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed {5}", "5"),
        (r"\fbox{4} \fboxed{5}", "5"),
        (r"} { \boxed{5}", "5"),
        (r"<answer>\boxed{4}</answer> <answer>\boxed{5}", "5"),
        ("<answer>4</answer> <answer>5", None),
        (r"<answer>\boxed{5</answer>", None),
        ("<answer>4 <answer>5</answer>", "5"),
        ("<answer></answer>", None),
        (r"<answer>\boxed{}</answer>", None),
        ("it is 5", None),
        ("", None),
    ],
)
def test_last_box_or_answer_tag_is_the_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think>\boxed{5}</think> I give up", None),
        (r"\boxed{5}</think> I give up", None),
        (r"\boxed{5}</think> it is \boxed{7}", "7"),
        (r"<think>is it \boxed{5}?", None),
        (r"<reason>\boxed{5}</reason>\boxed{6} <reason>\boxed{7}</reason> done", "6"),
        (r"[THINK]\boxed{5}[/THINK] \boxed{6}", "6"),
        (r"<think>say <answer>5</answer>?</think> \boxed{7}", "7"),
        (r"<reason>so <answer>\boxed{5}</answer>", "5"),
        (
            r"<|channel|>analysis<|message|>\boxed{5}<|end|><|start|>assistant<|channel|>final"
            r"<|message|>I give up",
            None,
        ),
    ],
)
def test_boxes_in_thoughts_do_not_count(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "stated", "answer"),
    [
        (r"\boxed{5}", "", None),  # cut off in a thought that the prompt has begun
        (r"It is \boxed{5}.<|im_end|>", r"It is \boxed{5}.", "5"),
        (r'Wait <tool_call>{"code": "\boxed{5}"}</tool_call>', "Wait", None),
        ("<answer>5</answer><|im_end|>", "5", "5"),
        (r"so \boxed{5} <answer>\boxed{6}</answer>", r"so \boxed{5} \boxed{6}", "6"),
    ],
)
def test_chat_format_tells_thoughts_from_rest(text: str, stated: str, answer: str | None) -> None:
    turn = Turn(text=text, output_ids=[1, 2])
    assert final_answer(Trajectory("t", [1], [turn], created_unix_s=1.0, answer=stated)) == answer


def test_printed_text_is_the_answer_of_a_program() -> None:
    turn = Turn(text=r"so \boxed{5}", output_ids=[1])
    assert final_answer(Trajectory("t", [1], [turn], answer="5")) == "5"


@given(st.text(alphabet="{}\\ab<>"), st.text(alphabet="ab"))
def test_box_at_the_end_is_found_after_anything(before: str, inside: str) -> None:
    assert last_box(f"{before} \\boxed{{{inside}}}") == inside


@given(st.lists(st.text(alphabet="<>/ab")))
def test_every_closed_tag_is_counted(inside: list[str]) -> None:
    text = "".join(f"<answer>{single}</answer>" for single in inside)
    assert tagged_answers(text) == inside


def test_unbalanced_text_takes_no_time() -> None:
    """Each search is linear: half a megabyte would else take hours."""
    assert last_box("\\boxed{" * 80_000) == ""
    assert last_box("\\" * 500_000) is None
    assert final_answer("<think>" * 80_000) is None
    assert tagged_answers("<answer>" * 80_000) == []
    assert number("9" * 500_000) is None
    for part in ("9", "\\(", "$", "101_2 ", "1e"):
        assert same_number("5", part * 500_000) is None
        assert same_number("5", part * (3999 // len(part))) is not True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5), ("-5", -5), ("+5", 5), ("005", 5), (" 5. ", 5), ("$5$", 5), ("5.0", 5),
        ("−5", -5), ("1,234,567", 1234567), ("1{,}234", 1234), (r"1\,234", 1234),
        ("0.5", 0.5), (".5", 0.5), ("1/2", 0.5), ("-1/2", -0.5), (r"\frac{1}{2}", 0.5),
        (r"-\dfrac{1}{2}", -0.5), (r"\frac{-1}{2}", -0.5), (r"\tfrac{1}{-2}", -0.5),
        ("**73**", 73), ("`73`", 73), ("$$73$$", 73), (r"\(73\)", 73), (r"\text{73}", 73),
        ("60°", 60), (r"60^\circ", 60), (r"60^{\circ}", 60), ("\u20135", -5),
        ("5e-05", Fraction(1, 20_000)),
        ("3e6", 3_000_000), ("-2.5E3", -2500), (r"3 \times 10^{6}", 3_000_000), ("10^6", 10**6),
        ("101_2", 5), ("101_{2}", 5), ("(101)_2", 5), (r"101_{\text{two}}", 5), ("1A_{16}", 26),
        ("0x1F", 31), ("9_8", None), ("1_000", None), ("x_2", None), ("5\u20137", None),
        ("0,125", None), ("00,012", None), (r"1,\!234", 1234), (r"1,\ 234", None),
        ("12,34", None), ("1,2", None), ("1/0", None), ("5 apples", None), ("x", None),
        ("", None), ("1 2", None), ("1e5", 100_000), ("9e99999", None),
        ("\N{SUPERSCRIPT TWO}", None), ("٣", None),
    ],
)  # fmt: skip
def test_numbers(text: str, value: float | Fraction | None) -> None:
    assert number(text) == value


@given(st.integers(), st.integers())
def test_integers_are_decided_exactly(left: int, right: int) -> None:
    assert same_number(str(left), f"{right:,}") is (left == right)


def test_decimals_are_equal_by_their_relative_difference() -> None:
    for gold, answer, same in [
        ("1/3", "0.333333", True), ("1/3", "0.333", False), ("0.00001", "0.00002", False),
        ("1e-7", "0.0000001", True), ("1e-7", "0.0000002", False), ("123456.5", "123456.6", True),
        ("1000000", "1000000.5", False), ("2", "2.0000001", False), ("0", "1e-9", False),
        ("1/3", "1000000/3000001", False), ("101_2", "101", False), ("101_2", "101_3", False),
        ("101_2", "5", True),
    ]:  # fmt: skip
        assert same_number(gold, answer) is same, (gold, answer)
    assert same_number("1/3", "0.333333", tolerance=Fraction(0)) is False


def test_math_verify_decides_other_answers() -> None:
    assert same_number("5", "x = 5") is None
    assert same_number("x+1", "x+1") is True
    assert same_number("**x+1**", "x+1") is True


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [
        ("5", "5", 1.0),
        ("5", "6", 0.0),
        ("5", "x = 5", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\frac{1}{3}", "0.333", 0.0),
        ("x^2+1", "1+x^2", 1.0),
        ("x^2+1", "x^2-1", 0.0),
        (r"11\sqrt2", r"11\sqrt{2}", 1.0),
        ("1,2,3", "3, 1, 2", 1.0),
        (r"\text{east}", "east", 1.0),
        ("125", "0,125", 0.0),
        ("(0.0000001,1)", "(0.0000002,1)", 0.0),
        ("(5e-05,3e6)", "(0.00005, 3000000)", 1.0),
        (r"\{1/3, 2\}", r"\{2, 0.333333\}", 1.0),
        (r"\begin{pmatrix}1&0.0000001\end{pmatrix}", r"\begin{pmatrix}1&0.0000002\end{pmatrix}",
         0.0),
        (r"\pi\cdot 10^{-20}", r"2\pi\cdot 10^{-20}", 0.0),
        ("25", "25 cm^2", 1.0),
        ("25", "25 cm²", 1.0),
        ("25x^2", "25", 0.0),
        ("12", "12 dollars", 1.0),
        (r"\frac{1}{2}", "½", 1.0),
        ("2.5", "2½", 1.0),
        (r"2\sqrt{12}", "2√12", 1.0),
        ("x^2-1", "x²-1", 1.0),
        ("52", "5²", 0.0),
        ("25", "２５", 1.0),
        ("[0,∞)", r"[0,\infty)", 1.0),
        ("east", "seat", 0.0),
        ("east", "East", 1.0),
        ("ABD", "BAD", 1.0),
        ("5", r"\infty", 0.0),
        (r"\infty", "1/0", 0.0),
        ("[0,1]", r"[0,\infty]", 0.0),
        (r"(-\infty,1)", r"(-\infty,1)", 1.0),
        (r"\sqrt{2}\cdot10^{-9}", r"1.414214\cdot10^{-9}", 1.0),
        ("[0,0.0000001]", "[0,0.0000002]", 0.0),
        (r"\sqrt2\sqrt3", r"\sqrt6", 1.0),
        (r"1000000\pi", "3141592.653", 1.0),
        ("10^{-20}x", r"2\cdot10^{-20}x", 0.0),
        ("(101_2, 1)", "(101, 1)", 0.0),
        ("(60°, 30°)", "(60, 30)", 1.0),
        ("5", "}}} \\frac{{{", 0.0),
        ("5", r"\\\left(\int", 0.0),
        ("5", "\x00\N{PILE OF POO}", 0.0),
        ("5", "the answer is 5, or 6, who knows", 0.0),
        ("5", "9" * 5000, 0.0),
    ],
)  # fmt: skip
@pytest.mark.full
async def test_math(grader: Grader, gold: str, answer: str, value: float) -> None:
    result = await grader.score(rollout(rf"<answer>{answer}</answer>"), task(gold))
    assert (result.value, result.answer) == (value, answer)
    assert result.reason


async def test_models_text_is_never_evaluated(grader: Grader, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for code in (f"open('{mark}','w')", f"__import__('pathlib').Path('{mark}').touch()"):
        result = await grader.score(rollout(f"<answer>{code}</answer>"), task())
        assert result.value == 0.0
    assert not mark.exists()


async def test_only_the_last_turn_answers(grader: Grader) -> None:
    result = await grader.score(rollout(r"\boxed{5}", "I give up."), task())
    assert (result.value, result.answer) == (0.0, None)
    assert (await grader.score(rollout(), task())).value == 0.0


async def test_rollout_cut_short_is_wrong(grader: Grader) -> None:
    for reason in (StopReason.TOKEN_BUDGET, StopReason.TURN_BUDGET):
        result = await grader.score(rollout(r"so \boxed{5", reason=reason), task())
        assert result.value == 0.0


async def test_rollout_that_ran_out_of_time_has_no_reward(grader: Grader) -> None:
    result = await grader.score(rollout(r"\boxed{5", reason=StopReason.TIME_BUDGET), task())
    assert result.value is None
    assert "ran out of time" in result.reason


@pytest.mark.parametrize(
    ("text", "value"), [("while I compute", 0.0), (r"\boxed{5}", 1.0), (r"\boxed{6}", 0.0)]
)
async def test_rollout_that_used_up_its_time_is_scored(
    grader: Grader, text: str, value: float
) -> None:
    used = rollout(text, reason=StopReason.TIME_BUDGET)
    used.elapsed_s = 10.0
    used.turns[0].results = [ToolResult("c", "sleep", ToolStatus.TIMEOUT, "", 0.0, 1.0, 7.0)]
    assert (await grader.score(used, task())).value == value


async def test_infrastructure_has_no_reward(grader: Grader) -> None:
    broken = rollout(r"\boxed{5}", reason=StopReason.INFRASTRUCTURE)
    broken.error = "the server died"
    result = await grader.score(broken, task())
    assert (result.value, result.answer) == (None, None)
    assert "the server died" in result.reason


async def test_cancelled_rollout_has_no_reward_from_any_grader(grader: Grader) -> None:
    cancelled = rollout(r"\boxed{5}", reason=StopReason.CANCELLED)
    assert await grader.score(cancelled, task()) == Reward(None, None, "it was cancelled")
    async with Grader(RewardSettings(function="exact"), lambda trajectory, task: 1.0) as second:
        assert (await second.score(cancelled, task())).value is None


@pytest.mark.full
async def test_answer_that_hangs_math_verify_is_wrong() -> None:
    settings = RewardSettings(num_workers=1, timeout_s=6, retries=0)
    async with Grader(settings) as grader:
        result = await grader.score(rollout(r"\boxed{9^{9^{9^{9}}} + x}"), task("x"))
        assert (result.value, result.answer) == (0.0, "9^{9^{9^{9}}} + x")
        assert re.search(r"no result after 6 s|the process ended", result.reason)
        assert "(2 tries)" in result.reason
        settings.timeout_s = 60
        assert (await grader.score(rollout(r"\boxed{1+x}"), task("x+1"))).value == 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "value", "problem"),
    [
        ("g", "hangs", 0.0, "no result after 3 s (2 tries): the answer breaks the check"),
        ("g", "crashes", 0.0, "the process ended by SIGSEGV (2 tries): the answer breaks"),
        ("g", "exits", 0.0, "the process ended with status 71 (2 tries): the answer breaks"),
        ("g", "raises", 0.0, "RecursionError: too deep (2 tries): the answer breaks the check"),
        ("g", "raises where it is not the first call", 1.0, "equal to the reference answer"),
        ("g", "is killed", None, "the process ended by SIGKILL (2 tries)"),
        ("hangs", "raises", None, "on the reference answer it fails, too"),
    ],
)
@pytest.mark.full
async def test_failed_check_is_attributed_to_its_cause(
    monkeypatch: pytest.MonkeyPatch, gold: str, answer: str, value: float | None, problem: str
) -> None:
    monkeypatch.setattr("agentloop.environments.rewards.reward._IS_EQUAL", FRAGILE)
    async with Grader(RewardSettings(num_workers=1, timeout_s=3)) as grader:
        assert (await grader.score(rollout(r"\boxed{good}"), task("g"))).value == 1.0
        result = await grader.score(rollout(rf"\boxed{{{answer}}}"), task(gold))
        assert (result.value, result.answer) == (value, answer)
        assert problem in result.reason


@pytest.mark.full
async def test_check_that_was_killed_once_is_not_the_answers_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One hang is no proof: the second try has to show it, and was killed from outside."""
    monkeypatch.setattr("agentloop.environments.rewards.reward._IS_EQUAL", FRAGILE)
    async with Grader(RewardSettings(num_workers=1, timeout_s=3)) as grader:
        answer = f"hangs, then is killed: {tmp_path / 'mark'}"
        result = await grader.score(rollout(rf"\boxed{{{answer}}}"), task("g"))
        assert result.value is None
        assert "SIGKILL" in result.reason


async def test_check_that_cannot_be_started_gives_no_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Grader(RewardSettings(num_workers=1)) as grader:
        monkeypatch.setattr(grader._processes, "_preload", ["no.such:thing"])
        result = await grader.score(rollout(r"\boxed{x}"), task("y"))
        assert result.value is None
        assert "No module named 'no'" in result.reason


async def test_exact_compares_numbers_and_text_only() -> None:
    async with Grader(RewardSettings(function="exact")) as grader:
        assert (await grader.score(rollout(r"\boxed{1+x}"), task("x+1"))).value == 0.0
        assert (await grader.score(rollout(r"\boxed{0.5}"), task(r"\frac12"))).value == 0.0
        assert (await grader.score(rollout(r"\boxed{0.5}"), task("1/2"))).value == 1.0


@pytest.mark.full
async def test_function_by_name_runs_in_a_process() -> None:
    async with scoring("length") as grader:
        assert (await grader.score(rollout("four"), task())).value == 4.0
    async with scoring("judged") as grader:
        result = await grader.score(rollout("a text"), task())
        assert result == Reward(0.25, "a text", "judged for task-1")
    async with scoring("reads") as grader:
        assert (await grader.score(rollout(), task())).value == 0.0


async def test_processes_are_used_again() -> None:
    async with scoring("process") as grader:
        first = await grader.score(rollout(), task())
        assert await grader.score(rollout(), task()) == first
        assert first.value != os.getpid()


async def test_values_that_a_reward_function_may_return() -> None:
    async with scoring("says") as grader:
        assert (await grader.score(rollout(), task("none"))).value is None
        assert (await grader.score(rollout(), task("true"))).value == 1.0
        assert (await grader.score(rollout(), task("decimal"))).value == 0.5
        unknown = await grader.score(rollout(), task("nan"))
        assert unknown.value is None  # a model's text may decide a number: that ends no run
        assert re.fullmatch(f"{FUNCTIONS}:says: reward: expected .* got nan", unknown.reason)
        for stated, cause in [("text", "'a text'"), ("set", "{1, 2}"), ("long", "'xxx")]:
            with pytest.raises(RewardError, match=cause):
                await grader.score(rollout(), task(stated))


@pytest.mark.parametrize(
    ("function", "text", "value"),
    [
        ("verl", "#### 5<|im_end|>", 1.0),
        ("verl", "#### 6", 0.0),
        ("verl_number", "it is 5", 2.0),
        ("trl", "It is 5", 1.0),
        ("trl", "It is 6", 0.0),
        ("trl_messages", "It is 5", 1.0),
        ("trl_of_a_column", "It is 5", 3.0),
    ],
)
async def test_functions_of_other_libraries(function: str, text: str, value: float) -> None:
    async with scoring(function) as grader:
        await grader.ready()
        assert (await grader.score(rollout(text), task(difficulty=3))).value == value


async def test_numbers_beside_the_score_of_verl_are_parts() -> None:
    async with scoring("verl") as grader:
        assert (await grader.score(rollout("#### 5"), task())).parts == {"acc": 1.0}
    async with Grader(function=reward_functions.verl) as grader:
        assert (await grader.score(rollout("#### 5"), task())).parts == {"acc": 1.0}


async def test_messages_are_completed_by_messages() -> None:
    requests = Task("task-1", [{"role": "user", "content": "What?"}], "5")
    async with scoring("trl_messages") as grader:
        assert (await grader.score(rollout("It is 5"), requests)).value == 1.0
    async with scoring("trl") as grader:
        with pytest.raises(RewardError, match="AttributeError"):
            await grader.score(rollout("It is 5"), requests)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        ("other_library", r"\(completion: .*, answer: .*\)"),
        ("one_parameter", r"\(trajectory: .*\)"),
    ],
)
async def test_other_parameters_are_refused_at_the_start(function: str, parameters: str) -> None:
    line = line_of(getattr(reward_functions, function))
    async with scoring(function) as grader:
        expected = rf"{re.escape(line)}: its parameters are {parameters}.*the forms that work are"
        with pytest.raises(SettingsError, match=expected):
            await grader.ready()


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("raises", "KeyError: 'no such judge'"),
        ("verl_without_score", "a dict with 'score'"),
        ("trl_number", "a list with one number"),
        ("trl_of_a_column", "the task has no 'difficulty'"),
    ],
)
async def test_errors_name_the_line_of_the_function(function: str, problem: str) -> None:
    async with scoring(function, retries=0) as grader:
        with pytest.raises(RewardError, match=re.escape(problem)) as caught:
            await grader.score(rollout("5"), task())
    first = getattr(reward_functions, function).__code__.co_firstlineno
    named = re.search(rf"\({re.escape(reward_functions.__file__)}:(\d+)\)$", str(caught.value))
    assert named
    assert first <= int(named[1]) <= first + 3


@pytest.mark.parametrize(
    ("function", "answer", "problem"),
    [
        ("math", "72", None),
        ("math", r"\frac{1}{2}", None),
        ("math", r"\text{the day before Tuesday}", None),
        ("math", "all functions of the form $f(x) = ax + b$ where a and b are rational", None),
        ("math", "She sold 24 clips in June.\nThat makes 72 in all", "is a text of 9 words"),
        ("math", "She sold 72 clips. That is the answer", "is a text of 7 words"),
        ("exact", r"\frac{1}{2", "has braces that do not match"),
        ("never", "72", r"gives the row's own answer, '72', the reward 0 "),
        ("shaped", "72", None),
        ("verl", "72", None),
    ],
)
async def test_references_that_no_answer_equals(
    function: str, answer: str, problem: str | None
) -> None:
    name = function if function in ("math", "exact") else f"{FUNCTIONS}:{function}"
    row = Task("1", "What?", answer, source_line="data.jsonl: line 3")
    for settings in (RewardSettings(function=name), RewardSettings(function=name, retries=0)):
        if problem is None:
            await require_references(settings, [row])
        else:
            with pytest.raises(DataError, match=rf"^data.jsonl: line 3: .*{re.escape(problem)}"):
                await require_references(settings, [row])


async def test_first_thousand_references_are_checked() -> None:
    good = [Task(str(n), "What?", "5", source_line=f"line {n}") for n in range(1000)]
    bad = Task("x", "What?", "{", source_line="the last line")
    await require_references(RewardSettings(), [*good, bad])
    with pytest.raises(DataError, match="the last line"):
        await require_references(RewardSettings(), [*good[1:], bad])
    assert len(await bad_references(RewardSettings(), [*good, bad])) == 1


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("raises", "reward_functions.py:41) (3 tries)"),
        ("crashes", "the process ended by SIGSEGV"),
        ("exits", "the process ended with status 3"),
        ("eats_memory", "the process ended with status 71"),
        ("is_not_there", "AttributeError"),
    ],
)
@pytest.mark.full
async def test_function_that_fails_is_error_and_never_a_reward(function: str, problem: str) -> None:
    async with scoring(function, retries=2) as grader:
        with pytest.raises(RewardError, match=re.escape(problem)) as caught:
            await grader.score(rollout(), task())
        assert f"{FUNCTIONS}:{function}: task task-1: " in str(caught.value)


@pytest.mark.full
async def test_function_that_hangs_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    async with scoring("hangs", timeout_s=2, retries=0) as grader:
        with pytest.raises(RewardError, match=r"no result after 2 s$"):
            await grader.score(rollout(), task(pid=str(pid)))
        assert not is_alive(pid)


@pytest.mark.full
async def test_caller_who_leaves_takes_the_process_along(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    async with scoring("hangs") as grader, anyio.create_task_group() as tasks:
        tasks.start_soon(grader.score, rollout(), task(pid=str(pid)))
        await eventually(lambda: pid.exists() and pid.read_text() != "", within_s=60)
        tasks.cancel_scope.cancel()
    assert not is_alive(pid)


@pytest.mark.full
async def test_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = f"""
import anyio
from tests.agentloop.environments.rewards.test_reward import rollout, scoring, task

async def main():
    async with scoring("hangs") as scorer:
        await scorer.score(rollout(), task(pid={str(pid)!r}))

anyio.run(main)
"""
    async with await anyio.open_process([sys.executable, "-c", program], stderr=None) as parent:
        await eventually(lambda: pid.exists() and pid.read_text() != "", within_s=60)
        parent.kill()
    await eventually(lambda: not is_alive(pid))


async def test_function_that_failed_once_is_asked_again(tmp_path: Path) -> None:
    async with scoring("fails_once") as grader:
        result = await grader.score(rollout(), task(mark=str(tmp_path / "mark")))
        assert result.value == 1.0


async def test_function_of_this_process() -> None:
    async def judge(trajectory: Trajectory, task: Task) -> Reward:
        await anyio.lowlevel.checkpoint()
        return Reward(0.5, trajectory.text, task.id)

    async with Grader(function=judge) as grader:
        assert await grader.score(rollout("x"), task()) == Reward(0.5, "x", "task-1")
    async with Grader(function=lambda trajectory, task: len(trajectory.text)) as grader:
        assert (await grader.score(rollout("four"), task())).value == 4.0


async def test_function_of_this_process_that_fails() -> None:
    calls = 0

    async def hangs(trajectory: Trajectory, task: Task) -> float:
        nonlocal calls
        calls += 1
        await anyio.sleep_forever()
        return 1.0

    def raises(trajectory: Trajectory, task: Task) -> float:
        raise TimeoutError("the judge's own")

    settings = RewardSettings(timeout_s=0.05, retries=1)
    async with Grader(settings, hangs) as grader:
        with pytest.raises(RewardError, match=r"hangs: task task-1: no result after 0.05 s \(2 "):
            await grader.score(rollout(), task())
        assert calls == 2
    async with Grader(RewardSettings(retries=0), raises) as grader:
        with pytest.raises(RewardError, match="TimeoutError: the judge's own"):
            await grader.score(rollout(), task())


PUZZLE = {"family": "countdown", "size": 9, "seed": 1, "index": 3}


@pytest.mark.parametrize(
    ("stated", "value", "problem"),
    [
        ({"score": 1.0}, 1.0, "countdown scores it 1"),
        ({"score": 0.99}, 0.0, "countdown scores it 0.99"),
        ({"raised": "SyntaxError"}, 0.0, "raised SyntaxError"),
        ({"score": "1"}, 0.0, "countdown gives it no score"),
        ({"missing": "forged"}, 0.0, "countdown gives it no score"),
        ({}, 0.0, "it ended the process that scored it"),
        (CallStatus.TIMEOUT, 0.0, "countdown took longer than 10 s to score it, twice"),
        (CallStatus.OOM, 0.0, "it ended the process that scored it (oom)"),
        (CallStatus.KILLED, 0.0, "it ended the process that scored it (killed)"),
        (CallStatus.ERROR, 0.0, "it ended the process that scored it (error)"),
        (CallStatus.OUTPUT_LIMIT, 0.0, "it ended the process that scored it (output_limit)"),
        (CallStatus.SANDBOX_ERROR, None,
         "the sandbox call ended with status sandbox_error: no luck (2 tries)"),
        (CallStatus.OVERLOADED, None,
         "the sandbox call ended with status overloaded: no luck (2 tries)"),
        (SandboxUnavailable("gone"), None, "SandboxUnavailable: gone (2 tries)"),
    ],
)  # fmt: skip
async def test_puzzles_are_scored_in_the_sandbox(
    stated: Said, value: float | None, problem: str
) -> None:
    """What ends the scorer is a wrong answer: a model must not be able to take its rollout back."""
    pool = scoring_pool(stated, stated)
    async with Grader(RewardSettings(function="exact"), pool=cast(Any, pool)) as grader:
        result = await grader.score(
            rollout("<answer>1+1</answer>"), task("7", reasoning_gym=PUZZLE)
        )
    assert (result.value, result.answer) == (value, "1+1")
    assert problem in result.reason
    assert json.loads(pool.asked[0][1]) | {"mark": ""} == {
        "puzzle": PUZZLE,
        "answer": "1+1",
        "mark": "",
    }


@pytest.mark.parametrize("ending", [status for status in CallStatus if status is not CallStatus.OK])
async def test_sandbox_failure_before_scoring_is_not_the_answers_fault(ending: CallStatus) -> None:
    pool = scoring_pool(ending, ending, gets_far=False)
    async with Grader(RewardSettings(function="exact"), pool=cast(Any, pool)) as grader:
        result = await grader.score(
            rollout("<answer>1+1</answer>"), task("7", reasoning_gym=PUZZLE)
        )
    assert (result.value, result.answer) == (None, "1+1")
    assert f"the sandbox call ended with status {ending}: no luck (2 tries)" in result.reason


async def test_scorer_that_was_slow_once_has_a_second_try() -> None:
    pool = scoring_pool(CallStatus.TIMEOUT, {"score": 1})
    async with Grader(RewardSettings(function="exact"), pool=cast(Any, pool)) as grader:
        result = await grader.score(
            rollout("<answer>1+1</answer>"), task("7", reasoning_gym=PUZZLE)
        )
    assert result.value == 1.0


async def test_puzzles_own_answer_needs_no_scorer() -> None:
    async with Grader(RewardSettings(function="exact")) as grader:
        puzzle = task("7", reasoning_gym=PUZZLE)
        assert (await grader.score(rollout("<answer>7</answer>"), puzzle)).value == 1.0
        with pytest.raises(SettingsError, match="scored in a sandbox; there is none"):
            await grader.score(rollout("<answer>8</answer>"), puzzle)


async def test_sandbox_without_the_package_is_an_error() -> None:
    pool = scoring_pool({"missing": "No module named 'reasoning_gym'"}, gets_far=False)
    async with Grader(RewardSettings(function="exact"), pool=cast(Any, pool)) as grader:
        with pytest.raises(SettingsError, match="reasoning-gym is not installed in the sandbox"):
            await grader.score(rollout("<answer>8</answer>"), task("7", reasoning_gym=PUZZLE))


@dataclass
class Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError("not this one")


@pytest.mark.full
async def test_calls_and_processes_one_by_one() -> None:
    """What reward.py makes of each is above; here, what it is told."""
    async with ProcessPool(1, preload=["math:sqrt"]) as processes:
        assert await processes.call("math:sqrt", 9, timeout_s=60) == 3.0
        with pytest.raises(CallRaised, match="ValueError"):
            await processes.call("math:sqrt", -1, timeout_s=60)
        with pytest.raises(CallTimedOut):
            await processes.call("time:sleep", 100, timeout_s=0.1)
        with pytest.raises(CallDied) as caught:
            await processes.call("os:_exit", 0, timeout_s=60)
        assert not caught.value.from_outside
        with pytest.raises(CallDied, match="SIGTERM") as caught:
            await processes.call("signal:raise_signal", int(signal.SIGTERM), timeout_s=60)
        assert caught.value.from_outside
        first = await processes.call("os:getpid", timeout_s=60)
        assert await processes.call("os:getpid", timeout_s=60) == first
        assert await processes.call("os:getpid", timeout_s=60, fresh=True) != first
        with pytest.raises(TypeError, match="not this one"):
            await processes.call("math:sqrt", Unpicklable(), timeout_s=60)
        assert await processes.call("math:sqrt", 4, timeout_s=60) == 2.0
    async with ProcessPool(1, preload=["no.such:thing"]) as processes:
        with pytest.raises(CallNotStarted, match="No module named 'no'"):
            await processes.call("math:sqrt", 9, timeout_s=60)


@pytest.mark.parametrize("function", ["", "verify", "module:", ":name"])
def test_settings_that_name_no_function(function: str) -> None:
    with pytest.raises(pydantic.ValidationError, match='is not "math"'):
        RewardSettings(function=function)
