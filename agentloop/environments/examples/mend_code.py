"""A repository to mend, with a shell, an editor and hidden tests: agentloop train mend-code

Each agent has a computer of its own, which takes a Docker Engine on this machine; or, as in the
recipe, commands that are calls in copies of its files, which start a hundred times as fast.

    agentloop env try agentloop.environments.examples.mend_code:mend endpoint.url=URL

What the repository prints for hidden input is compared here, where neither the agent nor its code
can write.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated

from pydantic import Field

import agentloop
from agentloop.environments.program import ProgramSettings, work_in
from agentloop.environments.sandbox import EnvironmentSandbox
from agentloop.sandbox import CommandResult, Computer

# What a module's function returns: in words, in Python, and as it shall be.
FUNCTIONS: Mapping[str, tuple[str, str, Callable[[list[int]], object]]] = {
    "total": ("the sum of the {}", "sum({})", sum),
    "most": ("the largest of the {}", "max({})", max),
    "least": ("the smallest of the {}", "min({})", min),
    "count": ("how many {} there are", "len({})", len),
    "last": ("the last of the {}", "{}[-1]", lambda numbers: numbers[-1]),
    "rising": ("the {} in rising order", "sorted({})", sorted),
}
ARGUMENTS = ("ages", "bids", "days", "fees", "laps", "marks", "sizes", "tips")
MODULE = 'def {}({}):\n    """Return {}."""\n    return {}\n'
MAIN = "import json, sys\n{}\nfor line in sys.stdin:\n    ns = json.loads(line)\n    print([{}])\n"
NUM_TESTS = 6
MAX_BYTES = 1 << 20
RUN = """import os
for path, data in {!r}.items():
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    open(path, "wb").write(data)
os.execvp("bash", ["bash", "-c", {!r}])
"""


def make_task(rng: random.Random, *, level: int = 1) -> Mapping[str, object]:
    """Make a repository of `level` modules, half of them, or one more, with a fault."""
    names = rng.sample(list(FUNCTIONS), level)
    faulty = names[::2]
    files, faults = {}, []
    for name in sorted(names):
        words, code, _ = FUNCTIONS[name]
        argument = rng.choice(ARGUMENTS)
        written = code
        if name in faulty:
            written = rng.choice([other for _, other, _ in FUNCTIONS.values() if other != code])
            faults.append([f"app/{name}.py", argument, written, code])
        texts = (text.format(argument) for text in (words, written))
        files[f"app/{name}.py"] = MODULE.format(name, argument, *texts)
    imports = "\n".join(f"from app.{name} import {name}" for name in names)
    files["main.py"] = MAIN.format(imports, ", ".join(f"{name}(ns)" for name in names))
    tests = [[rng.randrange(-9, 10) for _ in range(rng.randint(3, 8))] for _ in range(NUM_TESTS)]
    expected = [str([FUNCTIONS[name][2](numbers) for name in names]) for numbers in tests]
    return {"files": files, "faults": faults, "tests": tests, "expected": expected}


def teacher(task: agentloop.Task, rng: random.Random) -> Callable[..., agentloop.Message | str]:
    """Return a player that finds the faults, but seldom knows what to write in their place."""

    def play(messages: Sequence[agentloop.Message]) -> agentloop.Message | str:
        num_calls = sum(message["role"] == "tool" for message in messages)
        if num_calls == 0:
            return agentloop.call("bash", command="head -v app/*")
        if num_calls > len(task.faults):
            return "It is mended."
        path, argument, written, right = task.faults[num_calls - 1]
        guess = rng.choice([code for _, code, _ in FUNCTIONS.values() if code != written])
        new = right if rng.random() < 0.4 else guess
        old, new = (code.format(argument) for code in (written, new))
        return agentloop.call("edit_file", path=path, old=old, new=new)

    return play


class Folder:
    """Files of an agent whose commands run as calls, each in a fresh copy of them.

    It has those methods of a computer that are used here. What a command writes is gone with it.
    """

    def __init__(self, sandbox: EnvironmentSandbox, files: Mapping[str, bytes]) -> None:
        self._sandbox, self._files = sandbox, dict(files)

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        result = await self._sandbox.run(RUN.format(self._files, command), timeout_s=timeout_s)
        return CommandResult(
            result.status,
            result.exit_code,
            result.stdout,
            result.stderr,
            result.stdout_bytes,
            result.stderr_bytes,
            result.truncated,
            shell_ended=False,
            elapsed_s=result.run_s,
        )

    async def read(self, path: str) -> bytes:
        if path not in self._files:
            raise FileNotFoundError(f"there is no file {path!r}; there are {sorted(self._files)}")
        return self._files[path]

    async def write(self, path: str, data: bytes) -> None:
        files = self._files | {path: data}
        if sum(map(len, files.values())) > MAX_BYTES:
            raise OSError(f"the files would have more than {MAX_BYTES} bytes")
        self._files = files

    async def kill_processes(self) -> None:
        """Do nothing: no process outlives its command."""

    @asynccontextmanager
    async def fork(self) -> AsyncIterator[Folder]:
        yield Folder(self._sandbox, self._files)


@agentloop.environment(tasks=make_task, teacher=teacher, agent_errors={OSError: 0.0})
async def mend(
    task: agentloop.Task,
    agent: agentloop.Agent,
    *,
    level: Annotated[int, Field(ge=1, le=len(FUNCTIONS))] = 1,
    computers: bool = True,
    image: str = "",
    program: ProgramSettings | None = None,
) -> float:
    """Let the agent mend a repository; the reward is 1 if it then does all that it shall.

    Args:
        level: the number of modules, 1 to 6.
        computers: whether each agent has a computer; else its commands are calls.
        image: a computer's image, with python3; by default the sandbox's own.
        program: works in the computer in place of the agent: the setting `agent`.
    """
    task = replace(task, prompt="A function in app/ does not do what its docstring says. Mend it.")
    files = {path: text.encode() for path, text in task.files.items()}
    if not computers:
        return await judged(task, agent, Folder(agent.sandbox, files), program)
    absolute = {f"/repository/{path}": data for path, data in files.items()}
    async with agent.sandbox.computer(image, files=absolute, workdir="/repository") as box:
        return await judged(task, agent, box, program)


async def judged(
    task: agentloop.Task,
    agent: agentloop.Agent,
    box: Computer | Folder,
    program: ProgramSettings | None,
) -> float:
    await work_in(box, task, agent, program, command_timeout_s=10)
    await box.kill_processes()
    tests = "\n".join(map(str, task.tests))
    async with box.fork() as judge:  # what the agent has left running does not see the tests
        result = await judge.run(f"python3 main.py << END\n{tests}\nEND", timeout_s=10)
    return float(result.stdout.splitlines() == task.expected)
