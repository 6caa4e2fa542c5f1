"""Harbor tasks in real computers: solutions, agents that do nothing, and agents that cheat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentloop.agent.tools import Tools
from agentloop.environments.adapters import harbor
from agentloop.environments.adapters.harbor import HarborTask
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.sandbox import EnvironmentSandbox
from agentloop.errors import InfrastructureFailed, SettingsError
from agentloop.sandbox import Pool, PoolSettings
from agentloop.sandbox.image.build import image_tag

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.timeout(180)]

SETTINGS = PoolSettings(backend="docker", workers=1, preload=[])
FILES = {
    "task.toml": 'version = "1.0"\n[environment]\nmemory = "256M"\nenv = {NAME = "${NONE:-you}"}\n',
    "instruction.md": "Write hello into /app/hello.txt.",
    "environment/Dockerfile": f"FROM {image_tag()}\nWORKDIR /app\nRUN echo 1 > /app/given\n",
    "tests/test.sh": """
python3 /tests/check.py && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
""",
    "tests/check.py": "assert open('/app/hello.txt').read() == 'hello you\\n'",
    "solution/solve.sh": "echo hello $NAME > hello.txt",
}


@pytest.fixture(scope="module")
async def pool(docker_engine: None, anyio_backend: str) -> AsyncIterator[Pool]:
    async with Pool(SETTINGS) as pool:
        yield pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_task(tmp_path)


def write_task(top: Path) -> Path:
    for name, text in FILES.items():
        path = top / "hello" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return top


async def reward_of(pool: Pool, folder: Path, *commands: str, oracle: bool = False) -> Reward:
    """Return the reward of an agent that runs these commands."""

    async def run(prompt: str, tools: Any) -> None:
        async with Tools(tools) as opened:
            for command in commands:
                await opened.run("bash", {"command": command})

    (row,) = harbor.rows(folder=str(folder))
    sandbox = EnvironmentSandbox(pool, InfrastructureFailed)
    task = SimpleNamespace(prompt=row["prompt"], folder=row["folder"])
    agent: Any = SimpleNamespace(sandbox=sandbox, run=run)
    reward = await harbor.task.function(task, agent, folder=str(folder), oracle=oracle)
    assert isinstance(reward, Reward)
    return reward


async def test_solutions_get_one_and_idle_agents_zero(pool: Pool, folder: Path) -> None:
    assert (await reward_of(pool, folder, oracle=True)).value == 1
    assert (await reward_of(pool, folder)).value == 0
    assert (await reward_of(pool, folder, "echo hello $NAME > hello.txt")).value == 1


PATHS = "paths() { python3 -c 'import sys; print(*sys.path[1:])'; }"
CHEATS = [
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "mkdir -p /logs/verifier/reward.txt /logs/verifier/reward.json",
    "mkdir -p /tmp/l/verifier; echo 1 > /tmp/l/verifier/reward.txt; ln -s /tmp/l /logs",
    "(while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) & ",
    "setsid sh -c 'trap \"\" TERM; sleep 1; echo hello you > /app/hello.txt; sleep 1000' & ",
    "mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt; exit' > /tests/test.sh",
    "ln -s /tmp /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tmp/test.sh",
    "mkdir /tests; echo 'import os; os._exit(0)' > /tests/json.py; chattr +i /tests/json.py",
    "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt' > /bin/bash.new; "
    "chmod +x /bin/bash.new; mv /bin/bash.new /bin/bash",
    "for p in /usr/bin/python3* /usr/local/bin/python3*; do rm -f $p; ln -s /bin/true $p; done",
    "for d in $(python3 -c 'import sys; print(*sys.path[1:])'); do "
    "echo 'import os; os._exit(0)' > $d/sitecustomize.py; done",
    "echo /tmp/x.so > /etc/ld.so.preload",
    "touch /logs; truncate -s 9T /app/hello.txt",
    "grep -r hello / --include=test.sh --include=check.py --include=solve.sh | sh",
    "echo 'exit() { echo 1 > /logs/verifier/reward.txt; }' > ~/.bashrc; echo BASH_ENV=~/.bashrc "
    "> /etc/environment",
    # Put before the image's in a search path.
    "printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt' > /usr/local/sbin/bash; "
    "chmod +x /usr/local/sbin/bash",
    "for d in /usr/local/sbin /usr/local/bin ~/.local/bin; do mkdir -p $d; ln -s /bin/true "
    "$d/python3; done",
    # Loaded by each Python when it starts.
    f"{PATHS}; for d in $(paths); do echo 'import os; os._exit(0)' > $d/a.pth; done",
    f"{PATHS}; u=$(python3 -m site --user-site); mkdir -p $u; echo 'import os; os._exit(0)' > "
    "$u/a.pth; cp $u/a.pth $u/usercustomize.py",
    "python3 -c \"import sys, zipfile; z = next(p for p in sys.path if p.endswith('.zip')); "
    "zipfile.ZipFile(z, 'w').writestr('sitecustomize.py', 'import os; os._exit(0)')\"",
    "p=$(readlink -f $(which python3)); mkdir -p /tmp/e/bin; cp -r /usr/lib/python3.* /tmp/e/; "
    "mkdir /tmp/e/lib; mv /tmp/e/python3.* /tmp/e/lib/; echo 'import os; os._exit(0)' >> "
    "/tmp/e/lib/$(basename $p)/site.py; for d in $(dirname $p) $(dirname $p)/..; do "
    "echo 'home = /tmp/e/bin' > $d/pyvenv.cfg; done",
    "python3 -c 'import importlib.util as u, os, site, struct, py_compile, encodings.utf_8 as m; "
    's = os.stat(m.__file__); open("/tmp/e.py", "w").write("import os; os._exit(0)"); '
    "c = u.cache_from_source(m.__file__); os.path.exists(c) and os.remove(c); "
    'py_compile.compile("/tmp/e.py", c); d = bytearray(open(c, "rb").read()); '
    'd[8:16] = struct.pack("<II", int(s.st_mtime), s.st_size); open(c, "wb").write(d)\'',
    # Loaded by other programs.
    "for f in /etc/profile ~/.profile ~/.bash_profile ~/.bash_login /etc/bash.bashrc; do "
    "echo 'echo 1 > /logs/verifier/reward.txt; exit' >> $f; done",
    "echo /tmp > /etc/ld.so.conf.d/a.conf; cp $(ls /lib/*/libm.so.6) /tmp/libc.so.6; ldconfig",
    "rm /etc/passwd; echo 'root::0:0:root:/tmp:/tmp/sh' > /etc/passwd; cp /bin/true /tmp/sh",
    # What the computer of the tests must not have.
    "mkdir -p /app/hello.txt/tests; cp /bin/true /app/hello.txt/tests/test.sh",
    "ln -s /proc/self/fd/0 /app/hello.txt",
    "ln -s /tests/check.py /app/hello.txt; ln -s /solution/solve.sh /app/other",
    "echo 'hello you' > /dev/shm/h; ln -s /dev/shm/h /app/hello.txt",
    "cat /run/agentloop/socket/* /proc/1/environ /proc/1/fd/* > /app/hello.txt 2>/dev/null",
    "git log --all -p 2>/dev/null | grep -h '^+hello' > /app/hello.txt; cat /app/.git/objects/*/* ",
    "date -s 2001-01-01; hwclock --set --date 2001-01-01; kill -9 1; mount -o remount,rw /",
]


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheats_get_nothing(pool: Pool, folder: Path, cheat: str) -> None:
    assert (await reward_of(pool, folder, cheat)).value == 0


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("/app/bin/python3", True),
        ("/usr/bin/nginx", True),
        ("/usr/local/lib/python3.13/site-packages/flask/app.py", True),
        ("/app/.venv/bin/python3", True),
        ("/app/.venv/lib/python3.13/site-packages/pytest/__init__.py", True),
        ("/app/pytest.ini", True),
        ("/pytest.ini", False),
        ("/usr/local/bin/python3", False),
        ("/root/.local/lib/python3.13/site-packages/pytest/__init__.py", False),
        ("/usr/local/lib/python3.13/site-packages/json/__init__.py", False),
        ("/usr/local/lib/python3.13/site-packages/evil.dist-info/entry_points.txt", False),
    ],
)
def test_additions_stay_unless_they_replace_what_the_image_has(path: str, is_kept: bool) -> None:
    names = {"python3", "pytest", "json", "site-packages"}
    assert harbor._is_kept(names, path, True) is is_kept


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("echo 0.25 > $L/reward.txt", 0.25),
        ('echo \'{"reward": 0.5, "speed": 2}\' > $L/reward.json', 0.5),
        ("echo {} > $L/reward.json", 0),
        ("echo nan > $L/reward.txt", 0),
        ("echo yes > $L/reward.txt", 0),
        ("yes > $L/reward.txt & sleep 0.2", 0),
        ("ln -s /dev/zero $L/reward.txt", 0),
        ("exit 1", 0),
    ],
)
async def test_what_tests_write(pool: Pool, folder: Path, written: str, value: float) -> None:
    (folder / "hello" / "tests" / "test.sh").write_text(f"L=/logs/verifier\n{written}\n")
    assert (await reward_of(pool, folder)).value == value


@pytest.mark.parametrize(
    ("machine", "offered", "network"),
    [
        ("", "bridge", "bridge"),
        ("", "none", "none"),
        ("allow_internet = false", "bridge", "none"),
        ('network_mode = "no-network"', "allow:pypi.org", "none"),
        ('allowed_hosts = ["pypi.org", "*.debian.org"]', "bridge", "allow:pypi.org,*.debian.org"),
        ('allowed_hosts = ["pypi.org"]', "none", "none"),
        ('allowed_hosts = ["pypi.org", "debian.org"]', "allow:pypi.org", "allow:pypi.org"),
    ],
)
def test_task_gets_no_more_network_than_it_is_offered(
    folder: Path, machine: str, offered: str, network: str
) -> None:
    (folder / "hello" / "task.toml").write_text(f"[environment]\n{machine}\n")
    assert HarborTask.load(folder / "hello").environment.network(offered) == network


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[environment]\ngpus = 1", "gpus"),
        ("[[steps]]\nname = 'a'", "several steps"),
        ("[verifier]\nenvironment_mode = 'separate'", "verifier.environment"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec"),
        ("[agent", "task.toml"),
    ],
)
def test_tasks_that_cannot_run_are_refused(folder: Path, text: str, problem: str) -> None:
    (folder / "hello" / "task.toml").write_text(text)
    with pytest.raises(SettingsError, match=problem):
        HarborTask.load(folder / "hello")
