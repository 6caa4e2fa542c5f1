"""Mathematics with Python, as in rStar2-Agent: the model thinks, runs programs and answers.

    agentloop evaluate env=python-math --tasks problems.jsonl
    agentloop train env=python-math tasks.kind=jsonl 'tasks.paths=["problems.jsonl"]'

The problems are those of `tasks`, and answers are checked as `reward` says. To change it, copy the
file, and name the copy: env=my_math:python_math.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import pydantic

import agentloop

__all__ = ["python_math"]

PythonTool = Literal[
    "python_code_with_standard_io", "execute_python_code_with_standard_io", "jupyter_code"
]

# The words of the paper (arXiv 2508.20722, Figure 3).
_SYSTEM = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "user with the answer. The reasoning process and answer are enclosed within <reason> </reason> "
    "and <answer> </answer> tags, respectively, i.e., <reason> reasoning process here "
    "</reason><answer> answer here </answer>."
)
_TEMPLATE = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here "
    "</answer>. And your final answer will be extracted automatically by the \\boxed{} tag.\n"
    "This is the problem:\n{problem}"
)


def _with_problem(template: str) -> str:
    if "{problem}" not in template:
        raise ValueError("must contain {problem}")
    return template


@agentloop.environment
async def python_math(
    task: agentloop.Task,
    agent: agentloop.Agent,
    *,
    tools: Sequence[PythonTool] = ("python_code_with_standard_io",),
    system: str = _SYSTEM,
    template: Annotated[str, pydantic.AfterValidator(_with_problem)] = _TEMPLATE,
) -> agentloop.Trajectory:
    """Let the model solve a problem with Python, and have its answer checked.

    Args:
        tools: how it runs Python: as programs of their own, by the name in the authors' code or in
            their paper (`execute_...`), or in a notebook (`jupyter_code`).
        system: system message; it should ask for the answer in <answer> tags.
        template: the question; {problem} is replaced by the problem. A problem that is a
            conversation already, as by `tasks.system`, is asked as it stands.
    """
    if not isinstance(task.prompt, str):
        return await agent.run(task.prompt, tools=tools)
    question = template.replace("{problem}", task.prompt)
    return await agent.run(question, tools=tools, system=system or None)
