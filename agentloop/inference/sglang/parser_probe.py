"""Run SGLang's own parser of tool calls on streamed text.

SGLang is imported in a process of its own: `python -m agentloop.inference.sglang.parser_probe`
reads a request from its standard input, and writes the calls that it found.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentloop.child_environment import for_our_python
from agentloop.errors import ModelError

if TYPE_CHECKING:
    from sglang.srt.function_call.base_format_detector import BaseFormatDetector
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

_TIMEOUT_S = 300.0  # importing SGLang takes up to a minute on a busy machine
_TAIL = 300


def calls_found_by_sglang(
    parser: str, turns: Sequence[Sequence[str]], tools: Sequence[Mapping[str, object]]
) -> list[list[tuple[str, object]]]:
    """Return the names and arguments that SGLang finds in each turn; it blocks for some seconds.

    Args:
        parser: Name of the parser.
        turns: The text of each turn, in the pieces in which it arrives.
        tools: JSON schemas of the tools, in OpenAI's form.

    Raises:
        ModelError: SGLang is not installed, or its parser failed.
    """
    request = json.dumps({"parser": parser, "turns": turns, "tools": tools})
    command = [sys.executable, "-m", "agentloop.inference.sglang.parser_probe"]
    try:
        done = subprocess.run(
            command,
            input=request,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=for_our_python(),
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"SGLang's parser took longer than {_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise ModelError(f"SGLang's parser failed: {done.stderr.strip()[-_TAIL:]}")
    calls_by_turn = json.loads(done.stdout.splitlines()[-1])
    return [[(name, arguments) for name, arguments in turn] for turn in calls_by_turn]


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


def read_calls(
    parser: str, turns: Sequence[Sequence[str]], tools: Sequence[Mapping[str, object]]
) -> list[list[tuple[str, object]]]:
    """Return what `calls_found_by_sglang` does, in this process, which imports SGLang."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    models = [Tool.model_validate(tool) for tool in tools]
    return [_read_turn(FunctionCallParser(models, parser), pieces) for pieces in turns]


def _read_turn(parser: FunctionCallParser, pieces: Sequence[str]) -> list[tuple[str, object]]:
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        try:
            _, items = parser.parse_stream_chunk(piece)
        except Exception:  # a call that makes it fail is lost
            continue
        for item in items:
            call = calls.setdefault(item.tool_index, ["", ""])
            call[0] = item.name or call[0]
            call[1] += item.parameters or ""
    index, unstreamed = _rest_of_last_call(parser.detector)
    if index in calls:
        calls[index][1] += unstreamed
    return [(name, _json_or_text(text)) for _, (name, text) in sorted(calls.items())]


def _rest_of_last_call(detector: BaseFormatDetector) -> tuple[int, str]:
    """Return what SGLang's server adds to the last call when the stream ends, and to which one.

    The detector has read those arguments, and has not streamed all of them.
    """
    read, streamed = detector.prev_tool_call_arr, detector.streamed_args_for_tool
    index = len(read) - 1
    if not 0 <= index < len(streamed):
        return -1, ""
    arguments = read[index].get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    beginning = streamed[index]
    return index, arguments[len(beginning) :] if arguments.startswith(beginning) else ""


def _main() -> None:
    request = json.load(sys.stdin)
    print(json.dumps(read_calls(request["parser"], request["turns"], request["tools"])))


if __name__ == "__main__":
    _main()
