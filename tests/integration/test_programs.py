"""An agent that is a program, in real containers: what it reaches, how it ends, what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiodocker
import anyio
import pytest

from agentloop.environments.program import ProgramSettings, program
from agentloop.environments.tasks.sources import Task
from agentloop.errors import InfrastructureFailed, SettingsError
from agentloop.sandbox import (
    CallStatus,
    Pool,
    PoolSettings,
    Program,
    ProgramEnd,
    ProgramUnsupported,
)
from agentloop.sandbox.container import LABEL
from agentloop.sandbox.engine import connect
from tests.model_session import ASK, SessionAgent, model_session
from tests.patience import patient

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("docker_engine"),
]

TASK = Task("t", "What is 6 times 7?", "42")
SETTINGS = PoolSettings(backend="docker", workers=1, preload=[], memory_mib=256)
EXAMPLES = Path(__file__).parents[2] / "examples"
FOREVER = "import time\nwhile True: time.sleep(1)"


@pytest.fixture(scope="module")
async def engine(anyio_backend: str, docker_engine: None) -> AsyncIterator[aiodocker.Docker]:
    async with connect() as docker:
        yield docker


@pytest.fixture(scope="module")
async def pool(anyio_backend: str, docker_engine: None) -> AsyncIterator[Pool]:
    async with Pool(SETTINGS, on_progress=print) as pool:
        yield pool


@pytest.fixture
async def agent(pool: Pool) -> AsyncIterator[SessionAgent]:
    async with model_session(pool) as agent:
        yield agent


def python(code: str, **more: Any) -> ProgramSettings:
    return ProgramSettings(command=("python3", "-c", code), **more)


async def run(agent: SessionAgent, code: str, *, timeout_s: float = 60) -> ProgramEnd:
    """Run Python in a container as the sandbox does it, without the environment around it."""
    job = Program(("python3", "-c", code), agent.socket)
    return await agent.sandbox.run_program(job, timeout_s=timeout_s)


async def containers(engine: aiodocker.Docker, owner: int) -> list[str]:
    """Names of the programs' containers, running or not, that a process has started."""
    labelled = await engine.containers.list(all=True, filters={"label": [LABEL]})
    names = [container["Names"][0] for container in labelled]
    return [name for name in names if name.startswith(f"/agentloop-computer-{owner}-")]


async def wait_until_gone(engine: aiodocker.Docker, owner: int) -> None:
    async def gone() -> bool:
        return not await containers(engine, owner)

    await wait_until(gone)


async def wait_until(happened: Callable[[], Any]) -> None:
    with anyio.fail_after(patient(60)):
        while not await happened():  # noqa: ASYNC110 - the engine sets no event
            await anyio.sleep(0.02)


async def test_programs_output_is_the_answer(agent: SessionAgent, engine: aiodocker.Docker) -> None:
    agent.answer = "The result is 42."
    code = f"{ASK}\nprint('asked:', answer)\nprint(answer.split()[-1].strip('.'))"
    answer = await program.function(TASK, agent, settings=python(code))
    assert answer.text == "<answer>42</answer>"
    assert agent.asked[0]["messages"] == [{"role": "user", "content": TASK.prompt}]
    assert agent.trajectories[0].text == "The result is 42."  # the record is as it was
    await wait_until_gone(engine, os.getpid())


async def test_task_may_be_long(agent: SessionAgent) -> None:
    job = Program(("wc", "-c"), agent.socket, stdin="x" * 5_000_000)
    end = await agent.sandbox.run_program(job, timeout_s=60)
    assert end.stdout == "5000000\n"


async def test_folder_is_the_working_directory(agent: SessionAgent, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def shown(text): return f'<answer>{text}</answer>'")
    code = f"{ASK}\nimport helper\nprint(helper.shown(answer), os.getcwd())"
    (tmp_path / "main.py").write_text(code)
    settings = ProgramSettings(command=("python3", "main.py"), folder=tmp_path)
    os.chmod(tmp_path, 0o700)
    with pytest.raises(SettingsError, match=r"may not enter .*chmod -R o\+rX"):
        await program.function(TASK, agent, settings=settings)
    os.chmod(tmp_path, 0o755)
    answer = await program.function(TASK, agent, settings=settings)
    assert answer.text == "<answer>42</answer> /agent"


async def test_example_runs_the_tools_of_its_model(agent: SessionAgent) -> None:
    arguments = json.dumps({"code": "print(int(input()) * 7)", "input": "6"})
    called = {"name": "python_code_with_standard_io", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": called}
    agent.script = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    agent.answer = "The result is 42.\n\\boxed{42}"
    settings = ProgramSettings(command=("python3", "command_line_agent.py"), folder=EXAMPLES)
    answer = await program.function(TASK, agent, settings=settings)
    assert answer.text == agent.answer
    assert agent.asked[1]["messages"][-1]["content"] == "42\n"
    assert [len(request["tools"]) for request in agent.asked] == [1, 1]


async def test_program_that_hangs_is_killed_and_its_answer_counts(
    agent: SessionAgent, engine: aiodocker.Docker
) -> None:
    agent.time_left_s = 8.0
    code = f"{ASK}\nprint(41)\n{FOREVER}"
    answer = await program.function(TASK, agent, settings=python(code))
    assert answer.text == "<answer>41</answer>"
    await wait_until_gone(engine, os.getpid())


async def test_program_that_waits_for_the_model_is_not_to_blame(agent: SessionAgent) -> None:
    agent.time_left_s = 6.0
    agent.answer = None
    with pytest.raises(InfrastructureFailed, match="before the model had begun"):
        await program.function(TASK, agent, settings=python(ASK))


async def test_crash_after_an_answer_is_the_agents(agent: SessionAgent) -> None:
    answer = await program.function(TASK, agent, settings=python(f"{ASK}\nraise SystemExit(127)"))
    assert answer.text == ""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("no-such-program",), "status 127 .*no-such-program: No such file"),
        (("/etc/hostname",), "status 126 .*Permission denied"),
        (("python3", "-c", "import openai"), "status 1 .*No module named 'openai'"),
        (("true",), "status 0 without an answer"),
    ],
)
async def test_program_that_never_asks_is_the_users_mistake(
    agent: SessionAgent, command: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SettingsError, match=f"(?s){message}"):
        await program.function(TASK, agent, settings=ProgramSettings(command=command))
    assert agent.failures == []


async def test_image_that_is_not_there(agent: SessionAgent) -> None:
    settings = ProgramSettings(command=("true",), image="agentloop-no-such:1")
    with pytest.raises(SettingsError, match="no image 'agentloop-no-such:1': build or pull"):
        await program.function(TASK, agent, settings=settings)


async def test_image_needs_nothing_but_the_program(
    agent: SessionAgent, engine: aiodocker.Docker, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.tar"
    await anyio.run_process(["tar", "--create", "--file", str(empty), "--files-from", "/dev/null"])
    await anyio.run_process(["docker", "import", str(empty), "agentloop-test-empty:1"])
    try:
        settings = ProgramSettings(command=("true",), image="agentloop-test-empty:1")
        with pytest.raises(SettingsError, match=r"(?s)status 127 .*true: No such file"):
            await program.function(TASK, agent, settings=settings)
    finally:
        await engine.images.delete("agentloop-test-empty:1", force=True)


async def test_program_reaches_only_the_model(agent: SessionAgent) -> None:
    code = """
import os, socket
for address in ("1.1.1.1", "172.17.0.1", "10.0.0.1"):
    try:
        socket.create_connection((address, 80), 5)
        print("reached", address)
    except OSError as error:
        print(error.strerror)
try:
    socket.getaddrinfo("example.org", 80)
    print("resolved")
except OSError:
    print("no names")
print(sorted(os.listdir("/sys/class/net")), os.getuid() > 0)
print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("Cap", "NoNew"))])
for path in ("/x", "/run/x", "/usr/x", "/tmp/x"):
    try:
        open(path, "w").close()
        print("wrote", path)
    except OSError:
        pass
"""
    end = await run(agent, code)
    *refused, names, walls, caps, wrote = end.stdout.splitlines()
    assert refused == ["Network is unreachable"] * 3
    assert (names, walls) == ("no names", "['lo'] True")
    assert caps == str(["0" * 16] * 5 + ["1"])
    assert wrote == "wrote /tmp/x"


async def test_fork_bomb_ends_with_its_container(
    agent: SessionAgent, engine: aiodocker.Docker
) -> None:
    code = """
import os, time
num = 0
try:
    while True:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        num += 1
except OSError as error:
    print(num < 200, error.strerror)
"""
    end = await run(agent, code)
    assert end.stdout == "True Resource temporarily unavailable\n"
    await wait_until_gone(engine, os.getpid())


async def test_memory_bomb_is_killed(agent: SessionAgent) -> None:
    end = await run(agent, "held = []\nwhile True: held.append(bytearray(16 << 20))")
    assert (end.status, end.exit_status) == (CallStatus.OOM, 137)


async def test_endless_output_is_cut_off(agent: SessionAgent) -> None:
    end = await run(agent, "while True: print('x' * 1000)")
    assert end.status is CallStatus.OUTPUT_LIMIT
    assert len(end.stdout) == 64 * 1024


async def test_several_of_its_processes_ask_at_a_time(agent: SessionAgent) -> None:
    code = """
import json, subprocess, sys
ask = [sys.executable, "-c", sys.argv[1]]
task = json.dumps({"prompt": "?", "messages": []})
several = [subprocess.Popen(ask, stdin=-1, stdout=-1, text=True) for _ in range(8)]
print(sorted(one.communicate(task)[0] for one in several))
"""
    job = Program(
        ("python3", "-c", code, f"{ASK}\nprint(answer, end='')"),
        agent.socket,
        env={
            "AGENTLOOP_TASK": "?",
            "OPENAI_API_KEY": agent.key,
            "OPENAI_BASE_URL": "http://127.0.0.1:8377/sessions/unguessable/v1",
        },
    )
    end = await agent.sandbox.run_program(job, timeout_s=60)
    assert end.stdout.strip() == str(["42"] * 8), end.stderr


async def test_cancelled_rollout_leaves_no_container(
    agent: SessionAgent, engine: aiodocker.Docker
) -> None:
    async def is_up() -> bool:
        return bool(await containers(engine, os.getpid()))

    async with anyio.create_task_group() as group:
        group.start_soon(run, agent, FOREVER)
        await wait_until(is_up)
        group.cancel_scope.cancel()
    await wait_until_gone(engine, os.getpid())


async def test_killing_the_owner_leaves_no_container(engine: aiodocker.Docker) -> None:
    owner = """
import anyio
from tests.integration.test_programs import FOREVER, SETTINGS, Pool, model_session, run
async def main():
    async with Pool(SETTINGS) as pool, model_session(pool) as agent:
        await run(agent, f"print('up', flush=True)\\n{FOREVER}", timeout_s=600)
anyio.run(main)
"""
    with TemporaryDirectory(prefix="owner-") as folder:  # short: sockets are in it
        async with await anyio.open_process(
            [sys.executable, "-c", owner],
            stdout=subprocess.DEVNULL,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "TMPDIR": folder},
        ) as process:

            async def runs() -> bool:
                """The command has started: beside the first process there is another."""
                names = await containers(engine, process.pid)
                if not names:
                    return False
                try:
                    shown = await anyio.run_process(["docker", "top", names[0][1:]], check=False)
                except OSError:
                    return False
                return shown.stdout.count(b"time.sleep") >= 1

            await wait_until(runs)
            process.send_signal(signal.SIGKILL)

    await wait_until_gone(engine, process.pid)


async def test_engine_elsewhere_is_refused(
    pool: Pool, agent: SessionAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = pool._backends[0]
    for engine in backend._engines:
        monkeypatch.setattr(engine, "local", False)
    with pytest.raises(ProgramUnsupported, match="must be on this machine"):
        await run(agent, "print(1)")
