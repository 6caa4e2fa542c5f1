"""A program that works inside of its task's computer: rewards, ends, and what it can't reach."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from agentloop.agent.rollout import Budget
from agentloop.config import load_settings
from agentloop.environments.environment import EnvSettings, load, open_tasks
from agentloop.environments.tasks.sources import TasksSettings
from agentloop.errors import RequestError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.record import NoReward, RolloutRecord
from agentloop.sandbox import Pool
from agentloop.serving.sessions import listening_for_sessions
from agentloop.training.plan.settings import TrainSettings
from tests.agentloop.serving.test_app import CHAT, says
from tests.fakes import NoModel
from tests.integration.test_harbor import FILES, SETTINGS
from tests.patience import patient
from tests.rollouts import records_of
from tests.support import ScriptedEngine, Step

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.timeout(300)]

# Runs each message of the model as a command, until one is "done".
AGENT = """
import json, os, subprocess, sys, urllib.request
messages = json.load(sys.stdin)["messages"]
while True:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    if message["content"] == "done":
        break
    done = subprocess.run(message["content"], shell=True, capture_output=True, text=True)
    messages += [message, {"role": "user", "content": done.stdout + done.stderr + "."}]
print("done")
"""
RIGHT = "echo hello $NAME > hello.txt"
ASK = "python3 /agent/agent.py"


@pytest.fixture(scope="module")
async def pool(docker_engine: None, anyio_backend: str) -> AsyncIterator[Pool]:
    async with Pool(SETTINGS) as pool:
        yield pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task in `task`, and the agent's own folder beside it."""
    for name, text in FILES.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/agent.py").write_text(AGENT)
    return tmp_path


def settings_of(*overrides: str) -> EnvSettings:
    return load_settings(TrainSettings, [], overrides).environment


async def played(pool: Pool, env: EnvSettings, engine: ScriptedEngine) -> RolloutRecord:
    """Run a rollout of an environment's task, whose model a script plays."""
    environment, budget = load(env), Budget(timeout_s=patient(60))
    assert environment is not None
    task = next(open_tasks(TasksSettings(held_out=0), environment))
    async with listening_for_sessions(
        engine, CHAT, model_name="fake", sampling=Sampling(), budget=budget
    ) as listener:
        host = NoModel(pool, session_listener=listener)
        player = EnvironmentPlayer(environment, host, sampling=Sampling(seed=1))
        (record,) = await records_of(player, task, budget=budget)
    return record


async def worked(
    pool: Pool, folder: Path, *turns: Sequence[Step], command: str = ASK, more: Sequence[str] = ()
) -> RolloutRecord:
    """Run a program in the computer of the Harbor task."""
    agent = f"agent.folder={folder / 'agent'}", f"agent.command={command}"
    env = settings_of(f"env=harbor:{folder / 'task'}", *agent, *more)
    return await played(pool, env, ScriptedEngine(*turns))


def value_of(record: RolloutRecord) -> float | None:
    return record.reward.value if record.reward is not None else None


async def test_tests_judge_what_the_program_has_done(pool: Pool, folder: Path) -> None:
    right = await worked(pool, folder, says("pwd; cat given"), says(RIGHT), says("done"))
    assert value_of(right) == 1
    (conversation,) = right.trained
    assert len(conversation.turns) == 3
    assert "/app\n1\n." in CHAT.decode(conversation.ids)
    assert len(conversation.ids) == len(conversation.mask) == len(conversation.logprobs)
    assert value_of(await worked(pool, folder, says("true"), says("done"))) == 0


async def test_program_of_the_image_needs_no_folder(pool: Pool, folder: Path) -> None:
    (folder / "task/environment/agent.py").write_text(AGENT)
    with (folder / "task/environment/Dockerfile").open("a") as file:
        file.write("COPY agent.py /opt/agent.py\n")
    env = settings_of(f"env=harbor:{folder / 'task'}", "agent=python3 /opt/agent.py")
    assert value_of(await played(pool, env, ScriptedEngine(says(RIGHT), says("done")))) == 1


async def test_program_mends_a_repository(pool: Pool, folder: Path) -> None:
    environment = "agentloop.environments.examples.mend_code:mend"
    agent = f"agent={ASK}", f"agent.folder={folder / 'agent'}"
    env = settings_of(f"env={environment}", *agent)
    task = next(open_tasks(TasksSettings(held_out=0), load(env)))
    ((path, name, _, new),) = task.faults
    edit = f"sed -i 's/return .*/return {new.format(name)}/' {path}"
    assert value_of(await played(pool, env, ScriptedEngine(says(edit), says("done")))) == 1
    assert value_of(await played(pool, env, ScriptedEngine(says("ls"), says("done")))) == 0
    without = settings_of(f"env={environment}", *agent, "env.args.computers=false")
    with pytest.raises(RequestError, match="a program needs a computer"):
        await played(pool, without, ScriptedEngine())


# -- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "more"),
    [
        ("exit 3", ()),
        ("kill -9 $$", ()),
        ("yes", ("agent.max_output_kib=64",)),
        ("sleep 1000", (f"agent.timeout_s={patient(4)}",)),
        ("setsid sleep 1000 & exit 0", ()),
    ],
)
async def test_files_are_judged_however_the_program_ends(
    pool: Pool, folder: Path, end: str, more: Sequence[str]
) -> None:
    turns = says(RIGHT), says("done")
    record = await worked(pool, folder, *turns, command=f"sh -c '{ASK}; {end}'", more=more)
    assert value_of(record) == 1


async def test_program_that_never_asks_has_no_reward(pool: Pool, folder: Path) -> None:
    with pytest.raises(RequestError, match=r"status 127 without an answer.*/no-such: No such file"):
        await worked(pool, folder, command="no-such")


@pytest.mark.parametrize("by_program", [True, False])
async def test_only_a_program_can_lose_its_computer_for_a_reward(
    pool: Pool, folder: Path, by_program: bool
) -> None:
    async def lose() -> None:
        assert pool._fleet is not None
        for machine in list(pool._fleet.machines):
            machine.channel.lose("a test", by_program=by_program)

    record = await worked(pool, folder, says(RIGHT), [*says("true"), lose])
    assert value_of(record) == (0 if by_program else None)
    assert record.no_reward is (None if by_program else NoReward.INFRASTRUCTURE)


# -- what it cannot reach -----------------------------------------------------------------------

LATER = f"(sleep 1; while :; do {ASK} < /app/task; {RIGHT}; done) > /tmp/log 2>&1"
CHEATS = [
    "cat /tests/* /solution/* /logs/verifier/* > /app/hello.txt; find / -name check.py",
    "sh -c 'while :; do cp -r /tests /app/; cp /app/tests/check.py /app/hello.txt; done' "
    "> /dev/null 2>&1 &",
    f"echo '{{\"messages\": []}}' > /app/task; setsid sh -c '{LATER}' > /dev/null 2>&1 &",
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; mkdir /tests; "
    "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
]


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheats_get_nothing(pool: Pool, folder: Path, cheat: str) -> None:
    assert value_of(await worked(pool, folder, says(cheat), says("done"), says(RIGHT))) == 0


PRELUDE = r"""
import os, socket, sys
from urllib.parse import urlsplit
OURS, OTHER, SERVER, ENGINE, NEXT, SOCKET, HOST = os.environ["PLACES"].split()
OUR = urlsplit(OURS)
PORT = lambda address: int(address.rpartition(":")[2])
BODY = '{"model": "any", "messages": [{"role": "user", "content": "hello"}]}'
CHAT = "/v1/chat/completions"
def send(*parts, to=(OUR.hostname, OUR.port)):
    with socket.create_connection(to, 5) as s:
        s.settimeout(5)
        for part in parts: s.sendall(part.encode())
        got = b""
        try:
            while part := s.recv(65536): got += part
        except OSError: pass
        print(got.decode("latin-1"))
def request(target, *headers, body=BODY, method="POST"):
    lines = [f"{method} {target} HTTP/1.1", f"Host: {SERVER}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", *headers, "", ""]) + body
def post(target, *headers, **more):
    send(request(target, *headers, **more))
OTHERS = request(OTHER + CHAT)
"""


@dataclass(frozen=True)
class Attempt:
    """A program inside. Whoever is reached says so: the model, or what listens on this machine."""

    name: str
    script: str


def attempts(table: Mapping[str, str]) -> list[Attempt]:
    return [Attempt(name, script) for name, script in table.items()]


MUST_PASS = attempts(
    {
        "the session": "post(OUR.path + CHAT)",
        "the session as a stream": "post(OUR.path + CHAT, body=BODY[:-1] + ', \"stream\": true}')",
        "the session of an ordinary user": "os.setuid(65534); post(OUR.path + CHAT)",
        "the session with a query": "post(OUR.path + CHAT + '?beta=true')",
        "a large body": "post(OUR.path + CHAT, body=BODY + ' ' * (1 << 20))",
        "a key of another": "post(OUR.path + CHAT, 'Authorization: Bearer ' + OTHER[-32:])",
        "a host of another": "post(OUR.path + CHAT, 'X-Forwarded-Host: ' + ENGINE)",
    }
)
MUST_FAIL = attempts(
    {
        "another session": "post(OTHER + CHAT)",
        "another session by dots": "post(f'{OUR.path}/../{OTHER[-32:]}{CHAT}')",
        "another session by written dots": "post(f'{OUR.path}/%2e%2e/{OTHER[-32:]}{CHAT}')",
        "another session by a written slash": "post(f'{OUR.path}/..%2f{OTHER[-32:]}{CHAT}')",
        "another session by a backslash": r"post(f'{OUR.path}/..\\{OTHER[-32:]}{CHAT}')",
        "another session by two slashes": "post(f'/{OTHER}{CHAT}')",
        "another session by a whole url": "post(f'http://{SERVER}{OTHER}{CHAT}')",
        "another session after ours": "send(request(OUR.path + '/v1/none', body=''), OTHERS)",
        "another session behind a body": (
            "post(OUR.path + '/v1/none', body='', method='GET'); "
            "send(request(OUR.path + '/v1/none', body='x') + OTHERS)"
        ),
        "another session behind two lengths": (
            "send(request(OUR.path + '/v1/none', 'Content-Length: 999', body='') + OTHERS)"
        ),
        "another session behind chunks": (
            "send(request(OUR.path + '/v1/none', 'Transfer-Encoding: chunked', body='')"
            " + '0\\r\\n\\r\\n' + OTHERS)"
        ),
        "another session behind a line feed": (
            "send(request(OUR.path + '/v1/none', 'A: 1\\n\\n' + OTHERS))"
        ),
        "another session after an upgrade": (
            "send(request(OUR.path + '/v1/none', 'Connection: Upgrade', 'Upgrade: h2c', body=''),"
            " OTHERS)"
        ),
        "a path that begins like ours": "post(OUR.path + 'x' + CHAT)",
        "all sessions": "post('/v1/sessions', method='GET')",
        "the server's root": "post('/', method='GET')",
        "the engine by a whole url": "post(f'http://{ENGINE}/', method='GET')",
        "the engine by a tunnel": "send(f'CONNECT {ENGINE} HTTP/1.1\\r\\n\\r\\n', request('/'))",
        "a tunnel by our path": "post(OUR.path + '/', method='CONNECT')",
        "the engine as a user's host": "post(f'{OUR.path}/@{ENGINE}/')",
        "the engine's port": "send(request('/'), to=('127.0.0.1', PORT(ENGINE)))",
        "the engine's port by ipv6": "send(request('/'), to=('::1', PORT(ENGINE)))",
        "the engine's port at the bridge": "send(request('/'), to=('172.17.0.1', PORT(ENGINE)))",
        "the engine's port at this machine": "send(request('/'), to=(HOST, PORT(ENGINE)))",
        "the sessions' port": "send(request(OUR.path + CHAT), to=('127.0.0.1', PORT(SERVER)))",
        "the port of another computer": (
            "send(request(OTHER + CHAT), to=('127.0.0.1', PORT(NEXT)))"
        ),
        "the sessions' socket": (
            "s = socket.socket(socket.AF_UNIX); s.connect(SOCKET); s.sendall(OTHERS.encode()); "
            "print(s.recv(9999))"
        ),
        "the computer's socket": (
            "s = socket.socket(socket.AF_UNIX); s.connect('/run/agentloop/socket/computer'); "
            "print('reached')"
        ),
        "a name": "print('reached', socket.getaddrinfo('example.org', 80))",
    }
)


@dataclass(frozen=True)
class Result:
    """What an attempt has printed, how often it has asked, and what the other session has."""

    output: str
    problem: str
    num_asked: int = 0
    num_others: int = 0


@pytest.fixture(scope="module")
async def results(pool: Pool) -> Mapping[str, Result]:
    """All attempts, in a computer beside another one with a session of its own."""
    engine = ScriptedEngine(*([says("reached")] * len(MUST_PASS + MUST_FAIL)))
    budget = Budget(timeout_s=600)
    found: dict[str, Result] = {}

    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.send(b"HTTP/1.1 200 OK\r\n\r\nreached")

    async with (
        listening_for_sessions(
            engine, CHAT, model_name="fake", sampling=Sampling(), budget=budget
        ) as listener,
        await anyio.create_tcp_listener(local_host="0.0.0.0") as server,
        anyio.create_task_group() as group,
        pool.computer() as box,
        pool.computer() as other_box,
    ):
        group.start_soon(server.serve, answer)
        sessions = [
            listener.sessions.open(name, sampling=Sampling(), budget=budget, is_rollout=True)
            for name in ("1-t.0+api", "1-t.1+api")
        ]
        urls = [listener.url_of(session) for session in sessions]
        origin, other_path = urls[1].split("/v1/")[0], f"/v1/{urls[1].partition('/v1/')[2]}"
        assert other_path.endswith(f"/{sessions[1].key}")
        assert len(sessions[1].key) == 32
        async with box.lead_to(urls[0]) as url, other_box.lead_to(urls[1]) as other_url:
            near = f"127.0.0.1:{server.extra(SocketAttribute.local_port)}"
            places = [url, other_path, origin.removeprefix("http://"), near]
            places += [other_url.split("/")[2], str(listener.socket), address_of_this_machine()]
            for attempt in MUST_PASS + MUST_FAIL:
                before = len(engine.asked)
                done = await box.execute(
                    ["python3", "-c", PRELUDE + attempt.script],
                    env={"PLACES": " ".join(places)},
                    timeout_s=patient(60),
                )
                others, asked = sessions[1].trajectories, len(engine.asked) - before
                found[attempt.name] = Result(done.stdout, done.stderr, asked, len(others))
        again = ["python3", "-c", PRELUDE + MUST_PASS[0].script]
        done = await box.execute(again, env={"PLACES": " ".join(places)})
        found["afterwards"] = Result(done.stdout, done.stderr)
        group.cancel_scope.cancel()
    return found


def address_of_this_machine() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:  # it has no network
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


@pytest.mark.parametrize("attempt", MUST_PASS, ids=lambda attempt: attempt.name)
def test_own_session_is_reached(results: Mapping[str, Result], attempt: Attempt) -> None:
    result = results[attempt.name]
    assert result.output.startswith("HTTP/1.1 200 "), result
    assert "reached" in result.output or "[DONE]" in result.output, result
    assert (result.num_asked, result.num_others) == (1, 0)


@pytest.mark.parametrize("attempt", MUST_FAIL, ids=lambda attempt: attempt.name)
def test_nothing_else_is_reached(results: Mapping[str, Result], attempt: Attempt) -> None:
    result = results[attempt.name]
    assert "reached" not in result.output, result
    assert (result.num_asked, result.num_others) == (0, 0)


def test_session_is_reached_no_longer_than_the_program_runs(
    results: Mapping[str, Result],
) -> None:
    assert "Connection refused" in results["afterwards"].problem
