"""Tool calls as the models of each family write them."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FORMS", "Call", "Form"]

Call = tuple[str, dict[str, Any]]
"""The name of a tool, and the arguments."""


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def parameters(arguments: dict[str, Any], before: str, between: str, after: str) -> str:
    return "".join(f"{before}{k}{between}{plain(v)}{after}" for k, v in arguments.items())


def dsml(section: str, calls: Sequence[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        is_text = "true" if isinstance(value, str) else "false"
        opening = f'<｜DSML｜parameter name="{key}" string="{is_text}">'
        return f"{opening}{plain(value)}</｜DSML｜parameter>\n"

    body = "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(itertools.starmap(parameter, arguments.items()))
        + "</｜DSML｜invoke>\n"
        for name, arguments in calls
    )
    return f"\n\n<｜DSML｜{section}>\n{body}</｜DSML｜{section}>"


def each(text: Callable[[int, str, dict[str, Any]], str], joined: str = "") -> Any:
    return lambda calls: joined.join(text(i, *call) for i, call in enumerate(calls))


def harmony(calls: Sequence[Call]) -> str:
    name, arguments = calls[0]  # a turn has one
    return (
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"
    )


def python(calls: Sequence[Call]) -> str:
    made = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"[{', '.join(made)}]"


@dataclass(frozen=True)
class Form:
    """The calls of a family's models, and the text before them."""

    text: Callable[[Sequence[Call]], str]
    before: str = "I look.\n"
    one_call: bool = False


FORMS = {
    "hermes": Form(
        each(
            lambda i, n, a: f'<tool_call>\n{{"name": "{n}", "arguments": {dumps(a)}}}\n</tool_call>'
        )
    ),
    "qwen3-coder": Form(
        each(
            lambda i, n, a: (
                f"<tool_call>\n<function={n}>\n"
                + parameters(a, "<parameter=", ">\n", "\n</parameter>\n")
                + "</function>\n</tool_call>"
            ),
            "\n",
        )
    ),
    "glm": Form(
        each(
            lambda i, n, a: (
                f"<tool_call>{n}\n"
                + parameters(a, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
                + "</tool_call>"
            )
        )
    ),
    "deepseek-v3.1": Form(
        lambda calls: (
            "<｜tool▁calls▁begin｜>"
            + "".join(
                f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>"
                for n, a in calls
            )
            + "<｜tool▁calls▁end｜>"
        )
    ),
    "deepseek-v3": Form(
        lambda calls: (
            "<｜tool▁calls▁begin｜>"
            + "\n".join(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>"
                for n, a in calls
            )
            + "<｜tool▁calls▁end｜>"
        )
    ),
    "deepseek-v3.2": Form(functools.partial(dsml, "function_calls")),
    "deepseek-v4": Form(functools.partial(dsml, "tool_calls")),
    "kimi-k2": Form(
        lambda calls: (
            "<|tool_calls_section_begin|>"
            + "".join(
                f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}"
                "<|tool_call_end|>"
                for i, (n, a) in enumerate(calls)
            )
            + "<|tool_calls_section_end|>"
        )
    ),
    "minimax-m2": Form(
        lambda calls: (
            "\n<minimax:tool_call>\n"
            + "".join(
                f'<invoke name="{n}">\n'
                + parameters(a, '<parameter name="', '">', "</parameter>\n")
                + "</invoke>\n"
                for n, a in calls
            )
            + "</minimax:tool_call>"
        )
    ),
    "harmony": Form(harmony, before="", one_call=True),
    "llama-json": Form(
        each(lambda i, n, a: f'{{"name": "{n}", "parameters": {dumps(a)}}}', "; "), before=""
    ),
    "llama-pythonic": Form(python, before=""),
    "mistral": Form(
        lambda calls: (
            "[TOOL_CALLS]"
            + dumps(
                [
                    {"name": n, "arguments": a, "id": f"abcdefgh{i}"}
                    for i, (n, a) in enumerate(calls)
                ]
            )
        )
    ),
    "mistral-v11": Form(each(lambda i, n, a: f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}")),
    "nemotron": Form(
        lambda calls: (
            f"<TOOLCALL>{dumps([{'name': n, 'arguments': a} for n, a in calls])}</TOOLCALL>"
        )
    ),
}
