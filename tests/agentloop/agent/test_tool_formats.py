"""The feedback that a model reads about its calls, in each wording."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.agent.formats.values import decode_call
from agentloop.agent.tool_formats import (
    ToolFormat,
    bad_arguments,
    describe,
    jupyter_code_schema,
    malformed_call,
    paper_schema,
    python_code_schema,
    unknown_tool,
)
from agentloop.agent.truncation import without_middle
from agentloop.sandbox import CallError, CallResult
from agentloop.sandbox import CallStatus as SandboxStatus
from agentloop.trajectory import ToolCall

TRACEBACK = """Traceback (most recent call last):
  File "<program>", line 2, in <module>
    print(x)
NameError: name 'x' is not defined
"""
NAME_ERROR = CallError("NameError", "name 'x' is not defined", line=2, traceback=TRACEBACK)
CODE = "y = 1\nprint(x)"


def result(status: SandboxStatus = SandboxStatus.OK, **fields: Any) -> CallResult:
    return CallResult(1, status, run_s=0.126, **fields)


FAILED = result(SandboxStatus.ERROR, stdout="so\n", stderr=f"oh\n{TRACEBACK}", error=NAME_ERROR)

# From arXiv 2508.20722: Figure 10, section 2.1 (the value as a notebook shows it), Figure 11.
PAPER = [
    (result(stdout="Total valid colorings: 24\n"), "Total valid colorings: 24"),
    (result(stdout="24\n", stderr="a warning\n"), "24"),
    (result(result="(1, 2)"), "(1, 2)"),
    (result(stdout="a\n", result="3"), "a\n3"),
    (result(), ""),
    (FAILED, f"tool call failed\nreason: \nerror message: oh\n{TRACEBACK.rstrip()}"),
    (result(SandboxStatus.TIMEOUT, stdout="1\n"), "tool call failed\nreason: worker_timeout"),
    (result(SandboxStatus.OOM), "tool call failed\nreason: "),
]
# Of microsoft/rStar at ecbfb94: what code_judge_utils.py makes of Code Judge's results.
RELEASE = [
    (result(stdout="24\n"), "Tool call success\nstdout: 24\n\nexecution time: 0.13s"),
    (result(stdout="24\n", stderr="a warning\n"),
     "Tool call success\nstdout: 24\n\nstderr: a warning\n\nexecution time: 0.13s"),
    (result(stdout="a\n", result="3"), "Tool call success\nstdout: a\n3\n\nexecution time: 0.13s"),
    (result(), "Tool call success\nexecution time: 0.13s"),
    (
        FAILED,
        "Tool call failure\nreason: \nstdout: so\n\nstderr: oh\nNameError at line 2: "
        "name 'x' is not defined\n  print(x)\n\nexecution time: 0.13s",
    ),
    (
        result(SandboxStatus.TIMEOUT, stdout="1\n"),
        "Tool call failure\nreason: worker_timeout\nstdout: 1\nSuicide from timeout.\n\n"
        "execution time: 0.13s",
    ),
    (result(SandboxStatus.ERROR, stderr="bye\n", exit_code=3),
     "Tool call failure\nreason: \nstderr: bye\n\nexecution time: 0.13s"),
]  # fmt: skip


@pytest.mark.parametrize(("call_result", "text"), PAPER)
def test_response_in_the_papers_form(call_result: CallResult, text: str) -> None:
    assert describe(call_result, CODE, tool_format="paper") == text


@pytest.mark.parametrize(("call_result", "text"), RELEASE)
def test_response_in_the_releases_form(call_result: CallResult, text: str) -> None:
    assert describe(call_result, CODE, tool_format="release") == text


@pytest.mark.parametrize("line", [None, 0, 9])
def test_error_without_a_source_line_is_shown(line: int | None) -> None:
    error = CallError("E", "no", line=line, traceback="T\n")
    text = describe(
        result(SandboxStatus.ERROR, stderr="T\n", error=error), CODE, tool_format="release"
    )
    assert "stderr: E: no\n" in text


def test_traceback_that_was_cut_is_kept_as_it_is() -> None:
    cut = result(SandboxStatus.ERROR, stderr="...efined\n", error=NAME_ERROR)
    assert "stderr: ...efined\n" in describe(cut, CODE, tool_format="release")


def parse_call(raw: str) -> ToolCall:
    name, arguments, error = decode_call(raw)
    return ToolCall("call_0", name, arguments, raw, 0, 1, error)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        ("\n{broken\n", "Expecting property name enclosed in double quotes: line 2 column 2"),
        ('{"arguments": {}}', "'name'"),
        ("[]", "list indices must be integers or slices, not str"),
        ('{"name": "a", "arguments": 3}', '"arguments" must be a JSON object'),  # only ours
    ],
)
@pytest.mark.parametrize("tool_format", ["paper", "release"])
def test_feedback_on_a_call_that_cannot_be_decoded(
    raw: str, error: str, tool_format: ToolFormat
) -> None:
    text = malformed_call(parse_call(raw), tool_format=tool_format)
    assert text.startswith(f"Failed to decode tool call: {error}")


@given(st.text(max_size=20))
def test_every_malformed_call_gets_a_reason(raw: str) -> None:
    call = parse_call(raw)
    if call.error is not None:
        assert malformed_call(call) == f"[malformed tool call] {call.error}"
        feedback = malformed_call(call, tool_format="release")
        assert feedback.removeprefix("Failed to decode tool call: ").strip()


def test_feedback_on_calls_that_cannot_run() -> None:
    assert unknown_tool("find", "a, b").endswith("no tool 'find'; the tools are: a, b")
    assert (
        unknown_tool("find", "a, b", tool_format="release") == "Error when executing tool: 'find'"
    )
    assert bad_arguments("code: missing") == "[bad arguments] code: missing"
    assert (
        bad_arguments("code: missing", tool_format="paper")
        == "Error when executing tool: code: missing"
    )


def test_schemas_by_wording() -> None:
    forms: Any = ("plain", "release")
    schemas: Any = [python_code_schema("run", tool_format=form) for form in forms]
    plain, release = schemas
    assert plain["function"]["parameters"]["required"] == ["code"]
    assert release["function"]["parameters"]["required"] == ["code", "input"]
    paper: Any = paper_schema("run")
    returned = paper["function"].pop("return")
    assert returned["description"].startswith("str: The output produced")
    assert paper == release
    cells: Any = [jupyter_code_schema("cell", tool_format=form) for form in forms]
    assert cells[0] != cells[1]
    for schema in (plain, release, *cells):
        parameters = schema["function"]["parameters"]
        assert set(parameters["required"]) <= set(parameters["properties"])


@given(st.text(max_size=40), st.integers(2, 30))
def test_middle_of_a_long_text_is_cut_out(content: str, limit: int) -> None:
    shortened = without_middle(content, limit)
    if len(content) <= limit:
        assert shortened == content
        return
    half = limit // 2
    assert shortened[half:-half] == "...(truncated)..."
    assert content.startswith(shortened[:half])
    assert content.endswith(shortened[-half:])
    assert without_middle(content, None) == content
