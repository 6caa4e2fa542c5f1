"""The wording of what a model reads about its calls: ours, or that of rStar2-Agent. Pure.

    plain     the output, and how the program ended if it failed
    paper     as in the rollouts that the paper shows (arXiv 2508.20722, sections 2.1 and 5.4)
    release   as in the authors' code (microsoft/rStar at ecbfb94, rstar2_agent/tools)

What the paper leaves open, such as the feedback on a call of an unknown tool, is worded as in the
authors' code.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Literal

from agentloop.sandbox import CallResult
from agentloop.sandbox import CallStatus as SandboxStatus
from agentloop.trajectory import ToolCall

ToolFormat = Literal["plain", "paper", "release"]

# Of Code Judge, which runs the authors' programs: the reason and what the program prints.
_TIMEOUT_REASON = "worker_timeout"
_TIMEOUT_LINE = "Suicide from timeout.\n"
_STRING = {"type": "string"}
_PYTHON = (
    "Execute Python code with standard input and capture standard output. This function takes a "
    "Python code string and an input string, provides the input string through standard input "
    "(stdin) to the code, and captures and returns any output produced through standard output "
    "(stdout). If the executed code raises an exception, the error message will be captured and "
    "returned instead."
)
_CODE = (
    "A string containing Python code to be executed. The code can read from standard input using "
    "the input() function."
)
_INPUT = "A string that will be provided as standard input to the code when it calls input()."
_RETURN = (
    "str: The output produced by the executed code through standard output. If an error occurs "
    "during execution, the error message will be returned."
)


def describe(result: CallResult, code: str = "", *, tool_format: ToolFormat = "plain") -> str:
    """Return the text that a model reads of a call that ran.

    Args:
        code: the code that ran, of which the release shows the line that failed.
    """
    match tool_format:
        case "plain":
            return _plain(result)
        case "paper":
            return _paper(result)
        case "release":
            return _release(result, code)


def malformed_call(call: ToolCall, *, tool_format: ToolFormat = "plain") -> str:
    """Return the feedback on a call that cannot be decoded."""
    if tool_format == "plain":
        return f"[malformed tool call] {call.error}"
    return f"Failed to decode tool call: {_decoding_error(call.raw) or call.error}"


def unknown_tool(name: str, known_tools: str, *, tool_format: ToolFormat = "plain") -> str:
    """Return the feedback on a call of a tool that does not exist."""
    if tool_format == "plain":
        return f"[unknown tool] there is no tool {name!r}; the tools are: {known_tools}"
    return f"Error when executing tool: {name!r}"


def bad_arguments(problems: str, *, tool_format: ToolFormat = "plain") -> str:
    """Return the feedback on a call whose arguments do not fit the tool."""
    prefix = "[bad arguments]" if tool_format == "plain" else "Error when executing tool:"
    return f"{prefix} {problems}"


def _plain(result: CallResult) -> str:
    parts = []
    if result.stdout.strip():
        parts.append(result.stdout.rstrip("\n"))
    if result.result is not None:
        parts.append(result.result)
    if result.stderr.strip():
        parts.append("[stderr]\n" + result.stderr.rstrip("\n"))
    if ending := _ending(result):
        parts.append(ending)
    return "\n".join(parts) or "(no output)"


def _ending(result: CallResult) -> str:
    match result.status:
        case SandboxStatus.OK:
            return ""
        case SandboxStatus.ERROR if result.error is not None:
            where = f" (line {result.error.line})" if result.error.line else ""
            return f"[error] {result.error.type}: {result.error.message}{where}"
        case SandboxStatus.ERROR:
            return f"[error] exit code {result.exit_code}"
        case SandboxStatus.TIMEOUT:
            return f"[timeout] stopped after {result.run_s:.3g} s"
        case SandboxStatus.OOM:
            return "[out of memory]"
        case SandboxStatus.OUTPUT_LIMIT:
            return f"[output limit] stopped after {result.stdout_bytes + result.stderr_bytes} bytes"
        case SandboxStatus.KILLED:
            return f"[killed] by signal {result.signal}"
        case _:
            detail = f": {result.error.message}" if result.error else ""
            return f"[{result.status}]{detail}"


def _paper(result: CallResult) -> str:
    """The bare output of a program that succeeds; of one that fails, the reason and its error."""
    if result.status is SandboxStatus.OK:
        return _output(result).rstrip("\n")
    parts = ["tool call failed", f"reason: {_reason(result)}"]
    if result.stderr.strip():
        parts.append("error message: " + result.stderr.rstrip("\n"))
    return "\n".join(parts)


def _release(result: CallResult, code: str) -> str:
    """A line of the outcome, the outputs that there are, and the time that it took."""
    succeeded = result.status is SandboxStatus.OK
    parts = ["Tool call success" if succeeded else "Tool call failure"]
    if not succeeded:
        parts.append(f"reason: {_reason(result)}")
    late = _TIMEOUT_LINE if result.status is SandboxStatus.TIMEOUT else ""
    if stdout := _output(result) + late:
        parts.append(f"stdout: {stdout}")
    if stderr := _short_stderr(result, code):
        parts.append(f"stderr: {stderr}")
    parts.append(f"execution time: {result.run_s:.2f}s")
    return "\n".join(parts)


def _reason(result: CallResult) -> str:
    return _TIMEOUT_REASON if result.status is SandboxStatus.TIMEOUT else ""


def _output(result: CallResult) -> str:
    """Return what was printed, and the value of the last expression as a notebook shows it."""
    return result.stdout + ("" if result.result is None else f"{result.result}\n")


def _short_stderr(result: CallResult, code: str) -> str:
    """Return the standard error with the exception's line of the code in place of its traceback."""
    error = result.error
    if error is None or not error.traceback or not result.stderr.endswith(error.traceback):
        return result.stderr
    before = result.stderr.removesuffix(error.traceback)
    lines = io.StringIO(code, newline=None).readlines()  # as Python counts them
    if error.line is None or not 0 < error.line <= len(lines):
        return f"{before}{error.type}: {error.message}\n"
    line = lines[error.line - 1].rstrip("\n")
    return f"{before}{error.type} at line {error.line}: {error.message}\n  {line}\n"


def _decoding_error(raw: str) -> str:
    """Return the error with which the authors' parser rejects a call, or "" if it accepts it."""
    try:
        call = json.loads(raw)
        call["name"], call["arguments"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return str(error)
    return ""


def python_code_schema(
    name: str, *, tool_format: ToolFormat = "plain", returns: str = ""
) -> dict[str, object]:
    """Return the schema of the tool that runs a program.

    Args:
        returns: description of what it returns, which only the paper's schema has.
    """
    if tool_format == "plain":
        description = (
            "Execute Python code with standard input and capture standard output. Each call is a "
            "program of its own."
        )
        code, standard_input = "The Python program.", "Its standard input. Default: empty."
        required = ["code"]
    else:
        description, code, standard_input, required = _PYTHON, _CODE, _INPUT, ["code", "input"]
    properties = {
        "code": {**_STRING, "description": code},
        "input": {**_STRING, "description": standard_input},
    }
    return _schema(name, description, properties, required, returns)


def paper_schema(name: str) -> dict[str, object]:
    """Return the schema of the paper's tool, which also describes what it returns."""
    return python_code_schema(name, tool_format="paper", returns=_RETURN)


def jupyter_code_schema(name: str, *, tool_format: ToolFormat = "plain") -> dict[str, object]:
    """Return the schema of the tool that runs a notebook's cell."""
    if tool_format == "plain":
        description = (
            "Execute Python code in a Jupyter-like notebook. State persists between calls; the "
            "value of the last expression is shown."
        )
        code = "The cell's code."
    else:
        description = "Execute python code in a Jupyter notebook cell and return result"
        code = "The python code to execute in a single cell"
    return _schema(name, description, {"code": {**_STRING, "description": code}}, ["code"])


def _schema(
    name: str,
    description: str,
    properties: Mapping[str, object],
    required: list[str],
    returns: str = "",
) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    described = {"return": {**_STRING, "description": returns}} if returns else {}
    return {"type": "function", "function": {**function, **described}}
