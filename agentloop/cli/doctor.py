"""`agentloop doctor [MODEL]`: what this machine lacks, or how a model's conversations are read.

Without a model, the programs and packages that agentloop needs are looked for (machine.py). With
one, a conversation with a tool is rendered with the model's template, and its call is found again
in the ids that the model would sample. The exit status is 1 if something is lost on the way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import pydantic

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.chat_settings import ChatSettings
from agentloop.agent.openai_messages import function_call, tool_message
from agentloop.cli import console
from agentloop.config import load_settings
from agentloop.errors import AgentLoopError, ModelError, RequestError
from agentloop.inference.sglang.parser_probe import calls_found_by_sglang
from agentloop.launch.machine import examine, report
from agentloop.trajectory import Message

_QUESTION = "What is 37 times 48?"
_RESPONSE = "1776\n"
_ARGUMENTS = {"code": "for n in [37]:\n    print(n * 48)", "timeout_s": 5}
_TOOL = {
    "type": "function",
    "function": {
        "name": "python_code",
        "description": "Run Python.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "A program."},
                "timeout_s": {"type": "integer", "description": "Time limit."},
            },
            "required": ["code"],
        },
    },
}


class DoctorSettings(pydantic.BaseModel):
    """Settings of `agentloop doctor`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    chat: ChatSettings = pydantic.Field(default_factory=ChatSettings)


@dataclass
class Diagnosis:
    """Findings about a model: how it writes, and what was lost.

    Attributes:
        format: The chat format (`chat.format`).
        end_of_turn: The token that ends an answer.
        end_of_calls: The token that ends a turn with calls.
        generation_prompt: The text before the model's first token.
        opens_thought: Whether it opens a thought.
        markers: The format's tags, and whether each is a single token.
        conversation: A rendered conversation with a call and its response.
        turn: The text that the model samples for the call.
        observation: The text between that turn and the next one.
        by_sglang: The calls that SGLang's own parser reads in the turn; None: it was not asked.
        problems: Faults, such as a call that is lost.
        notes: Differences from the template's own prompt that are no faults.
    """

    format: str
    end_of_turn: str
    end_of_calls: str
    generation_prompt: str
    opens_thought: bool
    markers: dict[str, bool]
    conversation: str = ""
    turn: str = ""
    observation: str = ""
    by_sglang: str | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="agentloop doctor",
        description="Without a model: list what this machine lacks, and how to get it. With one: "
        "show how the model's conversations are written and read: the chat format, a rendered "
        "conversation with a tool, and its calls, found again.",
        epilog="The exit status is 0 if nothing is lost or missing, 1 if something is, and 2 if "
        "the model cannot be used. Parts that are optional may be missing.",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="model folder or Hugging Face hub name"
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="overrides, such as chat.format=hermes"
    )
    parser.add_argument(
        "--sglang", action="store_true", help="also ask SGLang's own parser, which takes seconds"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.model is None:
        return _machine(as_json=options.json)
    try:
        files, overrides = console.split_settings(options.settings)
        settings = load_settings(DoctorSettings, files=files, overrides=overrides)
        chat = ChatFormat.load(options.model, settings.chat)
        diagnosis = diagnose(chat, ask_sglang=options.sglang)
    except AgentLoopError as error:
        print(f"agentloop: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        console.print_json(asdict(diagnosis))
    else:
        print(_text(diagnosis))
    return 1 if diagnosis.problems else 0


def _machine(*, as_json: bool) -> int:
    checks = examine()
    if as_json:
        console.print_json([asdict(check) for check in checks])
    else:
        print(report(checks))
    return 0 if all(check.is_there or check.is_optional for check in checks) else 1


def diagnose(chat: ChatFormat, *, ask_sglang: bool = False) -> Diagnosis:
    """Write a conversation in a chat format, read it again, and compare."""
    diagnosis = Diagnosis(
        format=chat.family.name,
        end_of_turn=chat.decode([chat.end_id]),
        end_of_calls=chat.end_of_calls,
        generation_prompt=chat.generation_prompt,
        opens_thought=bool(chat.opened_thought),
        markers={tag: chat.token_id(tag) is not None for tag in chat.family.all_tags},
    )
    question = {"role": "user", "content": _QUESTION}
    # The thought is for templates that write one in each turn.
    calling = {**_calling("abcdef123"), "reasoning_content": "I compute it."}
    try:
        turn = chat.encode_assistant_turn(calling)
    except RequestError as error:
        diagnosis.notes.append(f"a turn of this model cannot be imitated: {error}")
        return diagnosis
    diagnosis.turn = chat.decode(turn)
    stream = chat.family.calls(chat, [_TOOL])
    calls = [call for token in turn for call in stream.feed([token])] + stream.finish()
    if [(call.name, call.arguments, call.error) for call in calls] != [
        ("python_code", _ARGUMENTS, None)
    ]:
        read = [{"name": c.name, "arguments": c.arguments, "error": c.error} for c in calls]
        diagnosis.problems.append(f"the call is read as {read}")
        return diagnosis
    prompt, observation = chat.prompt([question], [_TOOL]), chat.observation([_RESPONSE], calls)
    diagnosis.observation = chat.decode(observation)
    diagnosis.conversation = chat.decode(prompt + turn + observation)
    call_id = chat.family.call_id(calls[0])
    answered = {**_calling(call_id), "reasoning_content": "I compute it."}
    response = tool_message(call_id, _RESPONSE)
    rendered = chat.prompt([question, answered, response], [_TOOL])
    if rendered != prompt + turn + observation:
        diagnosis.notes.append(
            "the template writes the conversation so far in another way than it was sampled, for "
            "example without its thoughts; agentloop keeps what was sampled"
        )
    if ask_sglang and chat.family.sglang_parser:
        pieces = [chat.decode([token]) for token in turn if token not in chat.stop_ids]
        try:
            (by_sglang,) = calls_found_by_sglang(chat.family.sglang_parser, [pieces], [_TOOL])
        except ModelError as error:
            diagnosis.by_sglang = str(error)
        else:
            is_same = by_sglang == [("python_code", _ARGUMENTS)]
            diagnosis.by_sglang = "the same call" if is_same else f"{by_sglang}"
    return diagnosis


def _calling(call_id: str) -> Message:
    call = function_call(call_id, "python_code", _ARGUMENTS)
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _text(diagnosis: Diagnosis) -> str:
    single = [tag for tag, is_single in diagnosis.markers.items() if is_single]
    spelled = [tag for tag, is_single in diagnosis.markers.items() if not is_single]
    rows = [
        ("format", diagnosis.format),
        ("end of a turn", diagnosis.end_of_turn),
        ("end of calls", diagnosis.end_of_calls),
        ("generation prompt", repr(diagnosis.generation_prompt)),
        ("begins in a thought", "yes" if diagnosis.opens_thought else "no"),
        ("single tokens", " ".join(single) or "none"),
        ("spelled in several", " ".join(spelled) or "none"),
    ]
    lines = [f"{name:<20} {value}" for name, value in rows]
    if diagnosis.conversation:
        conversation = (f"    {line}" for line in diagnosis.conversation.splitlines())
        lines += ["", "A conversation with a call:", "", *conversation]
    if diagnosis.turn and not diagnosis.problems:
        lines += ["", "The call is found again as it was written."]
    if diagnosis.by_sglang is not None:
        lines.append(f"SGLang's own parser finds: {diagnosis.by_sglang}")
    lines += [f"note: {note}" for note in diagnosis.notes]
    lines += [f"PROBLEM: {problem}" for problem in diagnosis.problems]
    return "\n".join(lines)
