"""An agent that is a program of its own: a command line, which asks our model over HTTP.

    agentloop train agent="python3 my_agent.py" agent.folder=. ...

    task ──stdin, AGENTLOOP_TASK──> the program ──answer──> its standard output ──> `reward`
                                        │ OPENAI_BASE_URL, ANTHROPIC_BASE_URL
                                        └──> the rollout's session, which records exact ids

Each rollout runs it in a container of its own, without a network: the session's socket is mounted,
and all that it can reach (agentloop/sandbox/program.py). Where the environment has a computer for
each task, `env=... agent=...`, it runs in that (`work_in`), and a port of the computer's loopback
leads to the rollout's session alone. Failures are attributed by one rule: once
the model has sampled anything for it, a rollout is void only for what no program can bring about.

    the container did not start, the engine was lost       infrastructure: no reward
    a request has failed, and none like it succeeded since infrastructure: no reward
    it ran out of time, mostly while its only request
        waited for a place at a server                     infrastructure: no reward
    it ran out of time while it waited for the model,
        which had not sampled anything yet                 infrastructure: no reward
    it ended without asking the model                      the environment's failure
    all else, also a crash or a time-out                   what it has printed is its answer

Time that the model takes to sample is the rollout's own: otherwise a policy that makes a program
ask for very long answers could have its bad rollouts repeated. So is waiting for a place while
several requests are in flight, since they may wait for each other. A message that the model is
writing when the time is over is kept as a conversation that ended there.
"""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

import anyio
import pydantic

from agentloop.agent.computer_tools import Bash, Box, EditFile
from agentloop.environments.agent import Agent
from agentloop.environments.environment import EnvSettings, environment
from agentloop.environments.local_program import run_locally
from agentloop.environments.rewards.answers import final_answer
from agentloop.environments.tasks.sources import Task
from agentloop.errors import InfrastructureFailed, SettingsError
from agentloop.plain_json import dumps
from agentloop.sandbox import (
    CallStatus,
    Computer,
    ComputerLost,
    Program,
    ProgramEnd,
    ProgramUnsupported,
)
from agentloop.sandbox.computer.machine import FOLDER
from agentloop.sandbox.program import KEPT_BYTES, PORT
from agentloop.trajectory import Message, StopReason, Trajectory, Turn

__all__ = ["PROGRAM", "AgentProgram", "ProgramSettings", "program", "work_in"]

PROGRAM = f"{__name__}:program"
"""The environment that is nothing but a program."""

_OURS = (
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
    "AGENTLOOP_TASK",
)
# Linux allows 128 KiB for each variable of the environment.
_MAX_VARIABLE_BYTES = 100_000
_QUOTED_CHARS = 2000


class ProgramSettings(pydantic.BaseModel):
    """The agent as a program. `agent = "command"` is short for `agent.command`."""

    SHORT_FORM: ClassVar = "command"

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...] = pydantic.Field(
        (), description="Command line of a program that is the agent, as a string or a list."
    )
    image: str = pydantic.Field(
        "",
        description="Image of its containers. By default, that of the sandbox.",
    )
    folder: Path | None = pydantic.Field(
        None,
        description="Folder of this machine that it finds, read-only, as its working directory "
        "/agent. By default, it works in the image's own.",
    )
    env: dict[str, str] = pydantic.Field(
        default_factory=dict, description="Further variables of its environment."
    )
    task_fields: tuple[str, ...] = pydantic.Field(
        (),
        description="Fields of a task, besides the prompt, that it may read. The answer, and what "
        "gives it away, must not be among them.",
    )
    timeout_s: pydantic.PositiveFloat | None = pydantic.Field(
        None,
        description="Time limit of one run, including the start of its container. By default, "
        "budget.timeout_s.",
    )
    max_output_kib: pydantic.PositiveInt = pydantic.Field(
        16 * 1024, description="Output at which it is killed. The last 64 KiB are read."
    )
    writable: bool = pydantic.Field(
        False,
        description="Let it write to the image's files: to a copy for each rollout, on disk. "
        "Otherwise it writes to /tmp only, which is in memory.",
    )

    @pydantic.field_validator("command", mode="before")
    @classmethod
    def _split(cls, command: object) -> object:
        return shlex.split(command) if isinstance(command, str) else command

    @pydantic.field_validator("folder")
    @classmethod
    def _is_a_folder(cls, folder: Path | None) -> Path | None:
        if folder is None:
            return None
        if not folder.expanduser().is_dir():
            raise ValueError(f"{str(folder)!r} is not a folder")
        return folder.expanduser().resolve()

    @pydantic.field_validator("env", mode="before")
    @classmethod
    def _numbers_are_text(cls, env: object) -> object:
        """Accept agent.env.NAME=1, where TOML has a number."""
        if not isinstance(env, dict):
            return env
        return {
            name: str(value) if type(value) in (int, float) else value
            for name, value in env.items()
        }

    @pydantic.field_validator("env")
    @classmethod
    def _has_no_name_of_ours(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if name in _OURS or not name or "=" in name:
                raise ValueError(f"{name!r} is set by agentloop, or is no name: remove it")
        return env

    def environment(self, env: EnvSettings) -> EnvSettings:
        """Return the environment that runs the program, or `env` if there is none.

        Raises:
            SettingsError: there are settings but no command, or some that an environment decides.
        """
        if not self.command:
            if self != ProgramSettings():
                raise SettingsError(
                    "agent.command: must be set where other settings of the agent are"
                )
            return env
        values = self.model_dump(mode="json", exclude_defaults=True)
        if not env.name:
            return EnvSettings(name=PROGRAM, args={**env.args, "settings": values})
        if refused := {"image", "writable"} & values.keys():
            raise SettingsError(f"agent.{min(refused)}: not with env: its computer has an image")
        return EnvSettings(name=env.name, args={**env.args, "program": values})


AgentProgram = Annotated[
    ProgramSettings,
    pydantic.Field(
        json_schema_extra={"is_one_setting": True},
        description="A program that is the agent: its command line, or a table with command, "
        "image, folder, env, task_fields, timeout_s, max_output_kib and writable "
        "(docs/guides/your-agent.md).",
    ),
]
"""The setting `agent` of a command."""


@environment
async def program(task: Task, agent: Agent, *, settings: ProgramSettings) -> Trajectory:
    """Let a program do the task, and have checked what it prints.

    Raises:
        InfrastructureFailed: the infrastructure failed.
        SettingsError: it cannot be run, or has ended without an answer of the model.
    """
    return await _answer_of(agent, settings, partial(_run_program, task, agent, settings))


async def work_in(
    box: Box,
    task: Task,
    agent: Agent,
    program: ProgramSettings | None = None,
    *,
    command_timeout_s: float = 60.0,
) -> Trajectory:
    """Let the agent do a task in its computer, with `bash` and `edit_file`; or a program, inside.

    The program begins in the computer's working directory; its folder is copied to /agent. What
    either has started may go on, until `box.kill_processes`.

    Returns:
        The conversation that ended last; what a program has printed is its answer.

    Raises:
        InfrastructureFailed, ComputerLost: the infrastructure failed.
        SettingsError: the program cannot be run, or has ended without an answer of the model.
    """
    if program is None:
        tools = [Bash(box, timeout_s=command_timeout_s), EditFile(box)]
        return await agent.run(task.prompt, tools=tools)
    if not isinstance(box, Computer):
        raise SettingsError("agent: a program needs a computer, which the environment's tasks lack")
    return await _answer_of(agent, program, partial(_run_inside, box, task, agent, program))


async def _answer_of(
    agent: Agent,
    settings: ProgramSettings,
    run: Callable[[float], Awaitable[ProgramEnd]],
) -> Trajectory:
    """Run a program for a time, and return its answer. Raises as `program`."""
    limit_s = min(settings.timeout_s or agent.time_left_s, agent.time_left_s)
    end = _without_key(agent.key, await run(limit_s))
    is_timeout = end.status is CallStatus.TIMEOUT
    was_waiting = (is_timeout or not agent.trajectories) and agent.stop_requests()
    if is_timeout:
        if agent.queued_s > end.elapsed_s / 2:
            raise InfrastructureFailed(
                "the agent's program ran out of time, mostly waiting for a server"
            )
        if was_waiting and not agent.trajectories:
            raise InfrastructureFailed(
                "the agent's program ran out of time before the model had begun"
            )
    if not agent.trajectories:
        raise SettingsError(
            f"agent.command: {settings.command[0]} {_describe_end(end, limit_s)} without an answer "
            f"of the model, at OPENAI_BASE_URL or ANTHROPIC_BASE_URL; {_quote_stderr(end)}"
        )
    last = max(agent.trajectories, key=lambda item: item.created_unix_s + item.elapsed_s)
    return _with_answer(last, end)


async def _run_program(
    task: Task, agent: Agent, settings: ProgramSettings, limit_s: float
) -> ProgramEnd:
    in_container = agent.sandbox.has_containers
    url = urlsplit(agent.url.removesuffix("/v1"))
    if in_container:
        url = url._replace(netloc=f"127.0.0.1:{PORT}")
    job = _job_of(task, agent, settings, url.geturl())
    try:
        if in_container:
            _check_access(settings.folder)
            return await agent.sandbox.run_program(job, timeout_s=limit_s)
        if not agent.sandbox.allows_weak_isolation:
            raise ProgramUnsupported(
                "a program runs in a container of its own, which needs a Docker Engine on this "
                "machine; for a program that you trust, with a model that you trust, set "
                "sandbox.allow_weak_isolation=true: it then runs as a local process"
            )
        return await run_locally(job, limit_s)
    except ProgramUnsupported as error:
        raise SettingsError(f"agent: {error}") from error


async def _run_inside(
    box: Computer, task: Task, agent: Agent, settings: ProgramSettings, limit_s: float
) -> ProgramEnd:
    began = anyio.current_time()
    if settings.folder is not None:
        try:
            await box.put(settings.folder, FOLDER, user="root")
        except TimeoutError as error:
            raise ComputerLost(f"the computer does not take {settings.folder}") from error
        except (OSError, ValueError) as error:
            raise SettingsError(f"agent.folder: {settings.folder}: {error}") from error
    async with box.lead_to(agent.url.removesuffix("/v1")) as url:
        job = _job_of(task, agent, settings, url)
        result = await box.execute(
            job.command,
            stdin=job.stdin.encode(),
            timeout_s=began + limit_s - anyio.current_time(),
            max_output_bytes=job.max_output_bytes,
            kept_bytes=KEPT_BYTES,
            env=job.env,
        )
    output = result.stdout, result.stderr
    return ProgramEnd(result.status, result.exit_status, *output, result.elapsed_s)


def _job_of(task: Task, agent: Agent, settings: ProgramSettings, url: str) -> Program:
    """Return a program with what it is told.

    Args:
        url: base URL of the session, as the program reaches it.
    """
    prompt = _prompt_of(task)
    env = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": agent.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": agent.key,
        "PYTHONUNBUFFERED": "1",  # or what it has printed would be lost where it is killed
        **settings.env,
    }
    if len(prompt.encode()) <= _MAX_VARIABLE_BYTES and "\0" not in prompt:
        env["AGENTLOOP_TASK"] = prompt
    return Program(
        command=settings.command,
        socket=agent.socket,
        stdin=dumps(_task_for(task, prompt, settings.task_fields)).decode() + "\n",
        image=settings.image,
        folder=settings.folder,
        env=env,
        is_writable=settings.writable,
        max_output_bytes=settings.max_output_kib << 10,
    )


def _without_key(key: str, end: ProgramEnd) -> ProgramEnd:
    """Return the end with the key of the session removed: clients like to log their URLs."""
    output = {name: getattr(end, name).replace(key, "[key]") for name in ("stdout", "stderr")}
    return replace(end, **output)


def _check_access(folder: Path | None) -> None:
    """Check that other users may enter the folder, since the program runs as one."""
    if folder is not None and (folder.stat().st_mode & 0o5) != 0o5:
        raise SettingsError(
            f"agent.folder: the program runs as another user, who may not enter {folder}: "
            f"chmod -R o+rX {shlex.quote(str(folder))}"
        )


def _task_for(task: Task, prompt: str, fields: Iterable[str]) -> dict[str, object]:
    """Return the task as the program reads it. The answer is not in it unless a field has it."""
    messages = task.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    chosen = {}
    for name in fields:
        if name not in task.extra:
            names = ", ".join(task.extra) or "none"
            raise SettingsError(f"agent.task_fields: task {task.id} has no {name!r} ({names})")
        chosen[name] = task.extra[name]
    return {**chosen, "id": task.id, "prompt": prompt, "messages": list(messages)}


def _prompt_of(task: Task) -> str:
    """Return the task's prompt, or the last message of the user in it."""
    if isinstance(task.prompt, str):
        return task.prompt
    questions: list[Message] = [message for message in task.prompt if message.get("role") == "user"]
    content = questions[-1].get("content") if questions else None
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return content or ""


def _with_answer(last: Trajectory, end: ProgramEnd) -> Trajectory:
    """Return a copy of the conversation that ended last, whose answer is the program's.

    It is the <answer> or the box in what it has printed, or the last line of that; if it has
    printed nothing and not failed, it is the last message of the model.
    """
    if last.stop_reason in (StopReason.INFRASTRUCTURE, StopReason.CANCELLED):
        return last
    printed = end.stdout.strip()
    if not printed and end.status is CallStatus.OK:
        return last
    answer = final_answer(printed)
    text = printed
    if answer is None and printed:
        answer = printed.splitlines()[-1].strip()
        text = f"<answer>{answer}</answer>"
    turn = replace(last.turns[-1] if last.turns else Turn(), text=text)
    return replace(
        last,
        turns=[*last.turns[:-1], turn],
        answer=answer or "",
        stop_reason=StopReason.ANSWERED,
    )


def _describe_end(end: ProgramEnd, limit_s: float) -> str:
    match end.status:
        case CallStatus.TIMEOUT:
            return f"ran out of time ({limit_s:.3g} s)"
        case CallStatus.OUTPUT_LIMIT:
            return "was killed for its output (agent.max_output_kib)"
        case _:
            return f"ended with status {end.exit_status}"


def _quote_stderr(end: ProgramEnd) -> str:
    if stderr := end.stderr.strip():
        return f"the end of its stderr: {stderr[-_QUOTED_CHARS:]}"
    return "it has written nothing to stderr"
