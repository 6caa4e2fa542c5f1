"""Folders of Harbor tasks, as of Terminal-Bench 2: each task in a computer of its own, unmodified.

    env=harbor:FOLDER

    environment/ ──image──> computer ──bash, edit_file──> the agent, until it has done,
                               │                          or a program of the agent's, inside
                               │ all of its processes are killed
                               ▼ a copy of its files
    tests/ ──────────> another computer ──test.sh──> /logs/verifier/reward.txt ──> the reward

The tests are never in the agent's computer, and its processes never in theirs, so it can neither
read them nor outlive its end. Programs and libraries of the image are the image's again when the
tests run, whatever the agent has put in their place, or before them in a search path. What it has
added otherwise is there: whoever runs a program that the agent has installed, or its code, in the
process that decides, trusts it; also a test.sh that runs `python -m` in a folder of the agent's.

Not covered: compose files, tasks of several steps, MCP servers, GPUs, health checks, verifiers with
an environment of their own. A task that needs one is refused.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Set
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import pydantic

from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.program import ProgramSettings, work_in
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import SettingsError
from agentloop.sandbox import Computer, ComputerLimits

__all__ = ["HarborTask", "task"]

LOGS = "/logs/verifier"
MAX_REWARD_BYTES = 64 << 10
PROGRAMS = ("/bin", "/sbin", "/lib", "/usr", "/opt/venv")  # /lib64 begins with one of them
# What every program of a kind loads when it starts.
LOADED_BY_ALL = re.compile(
    r".*(/sitecustomize\..*|/usercustomize\..*|\.pth|/entry_points\.txt|/__pycache__(/.*)?)"
    r"|/etc/(ld\.so\..*|environment)"
    r"|/(pytest\.ini|\.pytest\.ini|conftest\.py|pyproject\.toml|tox\.ini|setup\.(cfg|py))"
    r"|(/usr|/opt/venv)(/.*)?/(pyvenv\.cfg|python3\d+\.zip)"
)
# Where programs and modules are searched for, by name.
SEARCHED = re.compile(
    r"(?:/usr|/bin|/sbin|/opt/venv|/root/\.local|/home/[^/]+/\.local)(?:/.*?)?"
    r"/(bin|sbin|(?:site|dist)-packages|python3\.\d+)/(?!(?:site|dist)-packages)([^/]+).*"
)
LIST_NAMES = """
ls -A /bin /sbin /usr/sbin /usr/local/bin /usr/local/sbin /opt/venv/bin /usr/lib/python3.* \
    /usr/local/lib/python3.* /usr/lib/python3/dist-packages /opt/venv/lib/python3.* \
    /usr/local/lib/python3.*/*-packages /opt/venv/lib/python3.*/site-packages 2>/dev/null; true
"""
MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
UNSUPPORTED = ("healthcheck", "mcp_servers", "gpus", "skills_dir", "tpu")

User = Annotated[str | None, pydantic.BeforeValidator(lambda v: None if v is None else str(v))]


class _Phase(pydantic.BaseModel):
    """Settings of the agent, the solution or the tests."""

    timeout_sec: pydantic.PositiveFloat = 600.0
    user: User = None
    env: dict[str, str] = pydantic.Field(default_factory=dict)
    environment: dict[str, object] | None = None  # an image of their own
    environment_mode: str = "shared"


class _Machine(pydantic.BaseModel):
    """Settings of the computer."""

    docker_image: str | None = None
    cpus: pydantic.PositiveFloat = 1
    memory_mb: pydantic.PositiveInt = 2048
    storage_mb: pydantic.PositiveInt = 10_240
    allow_internet: bool = True
    network_mode: str | None = None
    allowed_hosts: list[str] = pydantic.Field(default_factory=list)
    workdir: str | None = None
    env: dict[str, str] = pydantic.Field(default_factory=dict)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _check(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        if needed := [name for name in UNSUPPORTED if fields.get(name)]:
            raise ValueError(f"{', '.join(needed)}: not supported")
        for old in ("memory", "storage"):  # of the first version, such as 2G
            if size := re.fullmatch(r"([\d.]+)([KMG])B?", str(fields.get(old)).upper()):
                fields = {**fields, f"{old}_mb": int(float(size[1]) * MIB[size[2]])}
        return fields

    def network(self, offered: str) -> str:
        """Return the computer's network, if the caller offers this one."""
        if not self.allow_internet or self.network_mode == "no-network" or offered == "none":
            return "none"
        if self.allowed_hosts and not offered.startswith("allow:"):
            return f"allow:{','.join(self.allowed_hosts)}"
        return offered


class HarborTask(pydantic.BaseModel):
    """The settings of task.toml, as far as they are needed here."""

    agent: _Phase = _Phase()
    verifier: _Phase = _Phase()
    solution: _Phase = _Phase()
    environment: _Machine = _Machine()
    steps: list[dict[str, object]] = pydantic.Field(default_factory=list)

    @classmethod
    def load(cls, folder: Path) -> HarborTask:
        """Read the settings of a task.

        Raises:
            SettingsError: they are invalid, or need what is not supported.
        """
        try:
            loaded = cls.model_validate(tomllib.loads((folder / "task.toml").read_text()))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise SettingsError(f"{folder}/task.toml: {where}: {first['msg']}") from None
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise SettingsError(f"{folder}/task.toml: {error}") from error
        needed = [
            name
            for name in ("docker-compose.yaml", "docker-compose.yml")
            if (folder / "environment" / name).exists()
        ]
        if not (folder / "tests" / "test.sh").is_file() and not loaded.steps:
            raise SettingsError(f"{folder}/tests: there is no test.sh in it")
        if loaded.steps:
            needed.append("several steps")
        if loaded.verifier.environment or loaded.verifier.environment_mode != "shared":
            needed.append("verifier.environment")
        if needed:
            raise SettingsError(f"{folder}: {', '.join(needed)}: not supported")
        return loaded

    @property
    def limits(self) -> ComputerLimits:
        """The limits of the computer."""
        machine = self.environment
        return ComputerLimits(
            memory_mib=machine.memory_mb, cpus=machine.cpus, disk_mib=machine.storage_mb
        )


@cache
def _folders(folder: str) -> list[Path]:
    """Return the folders of the tasks: the folder itself, or those in it."""
    top = Path(folder).expanduser()
    if (top / "task.toml").is_file():
        return [top]
    found = sorted(path.parent for path in top.glob("*/task.toml"))
    if not found:
        raise SettingsError(
            f"env.args.folder: {top}: neither it nor a folder in it has a task.toml"
        )
    return found


def rows(*, folder: str) -> Iterator[Mapping[str, object]]:
    """Yield a task for each folder. Raises SettingsError if one cannot run."""
    for path in _folders(folder):
        HarborTask.load(path)
        try:
            prompt = (path / "instruction.md").read_text()
        except OSError as error:
            raise SettingsError(f"{path}/instruction.md: {error.strerror}") from error
        yield {"prompt": prompt, "answer": "", "source": "harbor", "folder": path.name}


@environment(tasks=rows)
async def task(
    task: Task,
    agent: Agent,
    *,
    folder: str,
    network: str = "none",
    command_timeout_s: float = 120.0,
    oracle: bool = False,
    program: ProgramSettings | None = None,
) -> Reward:
    """Let the agent work in the task's computer, then run the task's tests on its files.

    Args:
        folder: a task's folder, or one that has them.
        network: `allow:HOST[:PORT],...`, or a network of the engine such as `bridge`, for tasks
            that allow the internet; of the latter, tasks with `allowed_hosts` get these alone. By
            default they have none.
        command_timeout_s: time limit of each of the agent's commands.
        oracle: run the task's solution before the agent begins.
        program: works in the computer in place of the agent: the setting `agent`.
    """
    path = next(path for path in _folders(folder) if path.name == task.folder)
    config = HarborTask.load(path)
    machine = config.environment
    sandbox = agent.sandbox
    image = machine.docker_image or await sandbox.build_image(path / "environment")
    async with sandbox.computer(
        image,
        network=machine.network(network),
        limits=config.limits,
        user=config.agent.user,
        workdir=machine.workdir,
        env={name: _filled(value) for name, value in machine.env.items()},
    ) as box:
        listed = await box.execute(["/bin/sh", "-c", LIST_NAMES], user="root")
        keep = partial(_is_kept, frozenset(listed.stdout.split()))
        if oracle:
            await _solve(box, path, config)
        await work_in(box, task, agent, program, command_timeout_s=command_timeout_s)
        try:
            await box.kill_processes()
            async with box.fork(keep) as judge:
                return await _judge(judge, path, config)
        except OSError as error:  # by what the agent has done to its computer
            return Reward(0.0, None, f"its files cannot be judged: {error}")


def _is_kept(names: Set[str], path: str, is_added: bool) -> bool:
    """Return whether the tests see what the agent has made of a path.

    Args:
        names: names of the image's programs and modules.
    """
    if LOADED_BY_ALL.fullmatch(path):
        return False
    if found := SEARCHED.fullmatch(path):
        kind, name = found.groups()
        module = name.partition(".")[0]
        modules = () if kind in ("bin", "sbin") else (module, f"{module}.py")
        if is_added and not names.isdisjoint((name, *modules)):
            return False
    return is_added or not path.startswith(PROGRAMS)


async def _solve(box: Computer, path: Path, config: HarborTask) -> None:
    await box.put(path / "solution", "/solution", user="root")
    shell = box.shell(env=config.solution.env)
    await shell.run("bash /solution/solve.sh", timeout_s=config.agent.timeout_sec)


async def _judge(box: Computer, path: Path, config: HarborTask) -> Reward:
    """Run the tests on the agent's files, and return the reward that they write."""
    await box.remove("/tests", "/solution", "/logs", user="root")
    await box.put(path / "tests", "/tests", user="root")
    user = config.verifier.user or "root"
    await box.write(f"{LOGS}/test-stdout.txt", b"", user=user)  # no deadline: each chunk has one
    shell = box.shell(user=user, env={n: _filled(v) for n, v in config.verifier.env.items()})
    result = await shell.run("bash /tests/test.sh", timeout_s=config.verifier.timeout_sec)
    await box.kill_processes()
    tail = (result.stdout + result.stderr)[-500:].strip()
    for name in ("reward.txt", "reward.json"):
        try:
            # no deadline: each chunk has one
            data = await box.read(f"{LOGS}/{name}", max_bytes=MAX_REWARD_BYTES, user="root")
            value, parts = _parse(name, data.decode())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            return Reward(0.0, None, f"the tests' {name} is no reward: {error}")
        return Reward(value, None, f"by the tests: {tail}", parts)
    return Reward(0.0, None, f"the tests have written no reward ({result.status}): {tail}")


def _parse(name: str, text: str) -> tuple[float, Mapping[str, float]]:
    """Return the reward of a file, and its parts. Raises ValueError."""
    if name == "reward.txt":
        value, parts = float(text), {}
    else:
        parts = pydantic.TypeAdapter(dict[str, float]).validate_json(text)
        value = parts["reward"] if "reward" in parts else fmean(parts.values())
    if not all(map(math.isfinite, (value, *parts.values()))):
        raise ValueError(f"{value} is not finite")
    return value, parts


def _filled(value: str) -> str:
    """Fill in ${NAME} and ${NAME:-default} from this process's environment."""

    def fill(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name not in os.environ and default is None:
            raise SettingsError(f"the task needs the environment variable {name}")
        return os.environ.get(name, default or "")

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", fill, value)
