"""Integer problems, as tasks of Inspect AI; run by it, in its own environment (test_inspect.py).

`integers`: the agent runs its own tools, and Inspect sees the answer. `with_tools`: Inspect brings
the tool and runs the calls.
"""

from __future__ import annotations

import re

from inspect_ai import Task, task
from inspect_ai.dataset import json_dataset
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

BOXED = r"\\boxed\{(-?\d+)\}"


@task  # type: ignore[untyped-decorator]
def integers(problems: str) -> Task:
    return Task(json_dataset(problems), solver=generate(), scorer=pattern(BOXED))


@task  # type: ignore[untyped-decorator]
def with_tools(problems: str) -> Task:
    solver = [use_tools(python_code_with_standard_io()), generate()]
    return Task(json_dataset(problems), solver=solver, scorer=pattern(BOXED))


@tool  # type: ignore[untyped-decorator]
def python_code_with_standard_io() -> Tool:
    async def execute(code: str, input: str = "") -> str:
        """Run Python. Here it knows sums of integers alone, for nothing keeps it in a sandbox.

        Args:
            code: The program.
            input: What it reads.
        """
        stated = re.fullmatch(r"\s*print\(([-+*() \d]{1,100})\)\s*", code)
        return str(eval(stated[1])) if stated else "SyntaxError: print(SUM) is expected"

    return execute
