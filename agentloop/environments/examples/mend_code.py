"""A program to mend: in a computer of its own, with a shell, an editor and tests that come later.

    agentloop env try agentloop.environments.examples.mend_code:mend endpoint.url=URL

It needs a Docker Engine. What the program prints for hidden input is compared here, where neither
the agent nor its program can write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random

import agentloop
from agentloop.agent.computer_tools import Bash, EditFile

__all__ = ["mend"]

# What a function shall do, and does; and the code of one that does something else.
FUNCTIONS: tuple[tuple[str, Callable[[list[int]], object], str], ...] = (
    ("the largest number", max, "max(numbers[1:])"),
    ("the numbers in falling order", lambda ns: sorted(ns, reverse=True), "sorted(numbers)"),
    ("the number of different numbers", lambda ns: len(set(ns)), "len(numbers)"),
    ("the numbers without the first", lambda ns: ns[1:], "numbers[:1]"),
    ("the sum of the squares", lambda ns: sum(n * n for n in ns), "sum(numbers) ** 2"),
)
PROGRAM = """import json


def solve(numbers):
    \"\"\"Return {what}.\"\"\"
    return {code}


print(json.dumps(solve(json.loads(input()))))
"""
NUM_TESTS = 4


def make_task(rng: Random) -> Mapping[str, object]:
    """Choose a function, and the fault in it."""
    what, solve, fault = rng.choice(FUNCTIONS)
    inputs = [[rng.randrange(-9, 10) for _ in range(rng.randint(3, 8))] for _ in range(NUM_TESTS)]
    return {
        "program": PROGRAM.format(what=what, code=fault),
        "tests": [[str(numbers), json.dumps(solve(numbers))] for numbers in inputs],
    }


@agentloop.environment(tasks=make_task, agent_errors={OSError: 0.0})
async def mend(task: agentloop.Task, agent: agentloop.Agent, *, image: str = "") -> float:
    """Let the agent mend /app/program.py; the reward is the share of hidden tests that pass.

    Args:
        image: an image with python3; by default the sandbox's own.
    """
    files = {"/app/program.py": task.program.encode()}
    async with agent.sandbox.computer(image, files=files, workdir="/app") as box:
        question = (
            "The function in /app/program.py does not do what its docstring says. Mend it. "
            'Try it with: echo "[1, 2]" | python3 program.py'
        )
        await agent.run(question, tools=[Bash(box, timeout_s=10), EditFile(box)])
        await box.kill_processes()
        async with box.fork() as judge:  # what the agent has left running does not see the tests
            outputs = [
                (await judge.run(f"echo '{numbers}' | python3 program.py", timeout_s=10)).stdout
                for numbers, _ in task.tests
            ]
    expected: list[str] = [output for _, output in task.tests]
    return sum(a.strip() == b for a, b in zip(outputs, expected, strict=True)) / len(expected)
