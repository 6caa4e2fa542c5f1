"""An agent that is a program: its settings, what it is told, and who is to blame for its end."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentloop.config import load_settings, to_toml
from agentloop.environments.environment import EnvSettings, load
from agentloop.environments.program import ProgramSettings, program
from agentloop.environments.rewards.reward import Grader
from agentloop.environments.tasks.sources import Task
from agentloop.errors import DataError, InfrastructureFailed, SettingsError
from agentloop.sandbox import (
    CallStatus,
    Program,
    ProgramEnd,
    ProgramUnsupported,
    SandboxUnavailable,
)
from agentloop.training.plan.settings import TrainSettings
from agentloop.trajectory import Message, StopReason, Trajectory, Turn
from tests.model_session import ASK, SessionAgent, model_session

pytestmark = pytest.mark.anyio

TASK = Task("t", "What is 6 times 7?", "42", extra={"repo": "a/b", "patch": "secret"})
SETTINGS = ProgramSettings(command=("agent",))
SESSION = "http://127.0.0.1:4000/sessions/x"


# -- settings ---------------------------------------------------------------------------------


def settings_of(*overrides: str) -> TrainSettings:
    return load_settings(TrainSettings, [], overrides)


def test_command_line_is_a_setting(tmp_path: Path) -> None:
    result = settings_of('agent=python3 main.py --name "a b"', f"agent.folder={tmp_path}")
    assert result.agent.command == ("python3", "main.py", "--name", "a b")
    environment = load(result.environment)
    assert environment is not None
    assert environment.arguments == {"settings": result.agent}
    file = tmp_path / "config.toml"
    file.write_text(to_toml(result))
    assert load_settings(TrainSettings, [file]).agent == result.agent


def test_variable_may_look_like_a_number() -> None:
    result = settings_of("agent=x", "agent.env.LEVEL=1", "agent.env.NAME=a").agent
    assert result.env == {"LEVEL": "1", "NAME": "a"}
    with pytest.raises(SettingsError, match=r"agent\.env\.ON: Input should be a valid string"):
        settings_of("agent=x", "agent.env.ON=true")


def test_without_a_command_the_environment_is_that_of_the_settings() -> None:
    env = EnvSettings(name="python-math")
    assert ProgramSettings().environment(env) is env


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["agent=x", "env=python-math", "agent.image=mine"], "agent.image: not with env"),
        (["agent.image=mine"], "agent.command: must be set"),
        (["agent=x", "agent.folder=/no/such"], "agent.folder: '/no/such' is not a folder"),
        (["agent=x", "agent.env.OPENAI_API_KEY=k"], "'OPENAI_API_KEY' is set by agentloop"),
        (["agent=x", "agent.imagine=y"], "did you mean 'agent.image'"),
        (["agent=python3 'x"], "agent.command: No closing quotation"),
    ],
)
def test_mistakes_are_named(overrides: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        _ = settings_of(*overrides).environments


def test_environment_with_computers_gets_the_program(tmp_path: Path) -> None:
    environment = "env=agentloop.environments.examples.mend_code:mend"
    result = settings_of(environment, "env.args.level=2", "agent=x", f"agent.folder={tmp_path}")
    loaded = load(result.environment)
    assert loaded is not None
    assert (loaded.arguments["level"], loaded.arguments["program"]) == (2, result.agent)


async def test_answers_are_not_checked_where_an_environment_judges() -> None:
    without_answer = Task("t", "What?", "", source_line="tasks.jsonl:1")
    judged = settings_of("agent=x", "env=harbor:somewhere")
    await judged.check_references([without_answer])
    with pytest.raises(DataError):
        await settings_of("agent=x").check_references([without_answer])


def test_environment_without_computers_takes_no_program() -> None:
    with pytest.raises(SettingsError, match="agent, env: both are set, and guess takes no program"):
        load(
            settings_of(
                "agent=x", "env=agentloop.environments.examples.guess_number:guess"
            ).environment
        )


# -- what it is told --------------------------------------------------------------------------


ANSWERED = ProgramEnd(CallStatus.OK, 0, "42\n", "", 2.0)


@dataclass
class FakePool:
    """Says how each program ended, and runs none."""

    end: ProgramEnd | Exception = ANSWERED
    has_containers: bool = True
    settings: Any = field(default_factory=lambda: SimpleNamespace(allow_weak_isolation=False))
    jobs: list[tuple[Program, float]] = field(default_factory=list)

    async def run_program(self, job: Program, timeout_s: float) -> ProgramEnd:
        self.jobs.append((job, timeout_s))
        if isinstance(self.end, Exception):
            raise self.end
        return self.end


def agent_of(pool: FakePool, *conversations: Trajectory) -> SessionAgent:
    agent = SessionAgent(pool, SESSION, Path("/run/model"), 100.0)
    agent.trajectories = list(conversations)
    return agent


def conversation(text: str = "I say 41.", **more: Any) -> Trajectory:
    turn = Turn([2], [-1.0], text=text)
    return Trajectory("1-t.0", [1], [turn], StopReason.ANSWERED, **more)


async def job_of(task: Task, settings: ProgramSettings = SETTINGS) -> tuple[Program, float]:
    pool = FakePool()
    await program.function(task, agent_of(pool, conversation()), settings=settings)
    return pool.jobs[0]


async def test_program_is_told_its_task_and_not_the_answer() -> None:
    job, timeout_s = await job_of(TASK, ProgramSettings(command=("agent",), env={"MORE": "1"}))
    assert json.loads(job.stdin) == {
        "id": "t",
        "prompt": TASK.prompt,
        "messages": [{"role": "user", "content": TASK.prompt}],
    }
    assert job.env == {
        "OPENAI_BASE_URL": "http://127.0.0.1:8377/sessions/x/v1",
        "OPENAI_API_KEY": "secret",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8377/sessions/x",
        "ANTHROPIC_API_KEY": "secret",
        "AGENTLOOP_TASK": TASK.prompt,
        "PYTHONUNBUFFERED": "1",
        "MORE": "1",
    }
    assert timeout_s == 100.0


async def test_fields_of_the_task_are_told_by_name() -> None:
    job, _ = await job_of(TASK, ProgramSettings(command=("agent",), task_fields=("repo",)))
    assert json.loads(job.stdin)["repo"] == "a/b"
    with pytest.raises(SettingsError, match=r"task_fields: task t has no 'rep' \(repo, patch\)"):
        await job_of(TASK, ProgramSettings(command=("agent",), task_fields=("rep",)))


async def test_conversation_is_told_whole_and_by_its_last_question() -> None:
    messages: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    ]
    job, _ = await job_of(replace(TASK, prompt=messages))
    assert json.loads(job.stdin)["messages"] == messages
    assert job.env["AGENTLOOP_TASK"] == "Why?"


async def test_task_too_long_for_a_variable_is_on_standard_input() -> None:
    job, _ = await job_of(replace(TASK, prompt="x" * 200_000))
    assert "AGENTLOOP_TASK" not in job.env
    assert len(json.loads(job.stdin)["prompt"]) == 200_000


async def test_shorter_limit_of_time_holds() -> None:
    for local, expected in ((7.0, 7.0), (700.0, 100.0)):
        _, timeout_s = await job_of(TASK, ProgramSettings(command=("agent",), timeout_s=local))
        assert timeout_s == expected


# -- its answer -------------------------------------------------------------------------------


async def answered(end: ProgramEnd, *conversations: Trajectory) -> Trajectory:
    agent = agent_of(FakePool(end), *(conversations or [conversation()]))
    result = await program.function(TASK, agent, settings=SETTINGS)
    assert isinstance(result, Trajectory)
    return result


@pytest.mark.parametrize(
    ("stdout", "value", "answer"),
    [
        ("thinking\n 42 \n\n", 1.0, "42"),
        ("<answer>42</answer>\nbye\n", 1.0, "42"),
        ("so: \\boxed{42}\nDone in 3 s\n", 1.0, "42"),
        ("42\nDone in 3 s\n", 0.0, "Done in 3 s"),
    ],
)
@pytest.mark.full
async def test_output_of_a_program_is_graded(stdout: str, value: float, answer: str) -> None:
    result = await answered(ProgramEnd(CallStatus.OK, 0, stdout, "", 1.0))
    async with Grader() as grader:
        reward = await grader.score(result, TASK)
    assert (reward.value, reward.answer) == (value, answer)


@pytest.mark.parametrize(
    "end",
    [
        ProgramEnd(CallStatus.ERROR, 1, "", "Traceback", 1.0),
        ProgramEnd(CallStatus.ERROR, 127, "", "", 1.0),
        ProgramEnd(CallStatus.KILLED, 137, "", "", 1.0),
        ProgramEnd(CallStatus.TIMEOUT, None, "", "", 90.0),
        ProgramEnd(CallStatus.OUTPUT_LIMIT, None, "\n", "", 1.0),
    ],
)
async def test_failure_after_an_answer_is_a_wrong_answer(end: ProgramEnd) -> None:
    """Also if the last message of the model were right: the program has not given it."""
    async with Grader() as grader:
        reward = await grader.score(await answered(end, conversation("\\boxed{42}")), TASK)
        assert reward.value == 0.0
        reward = await grader.score(await answered(replace(end, stdout="42")), TASK)
        assert reward.value == 1.0


async def test_last_message_counts_if_nothing_is_printed() -> None:
    last = conversation("\\boxed{42}", elapsed_s=1.0)
    result = await answered(ProgramEnd(CallStatus.OK, 0, "\n", "", 1.0), conversation(), last)
    assert result is last


async def test_record_is_not_changed() -> None:
    record = conversation()
    result = await answered(ProgramEnd(CallStatus.OK, 0, "42", "", 1.0), record)
    assert result is not record
    assert record == conversation()
    assert result.ids == record.ids


# -- who is to blame --------------------------------------------------------------------------


async def failing(end: ProgramEnd | Exception, *conversations: Trajectory) -> SessionAgent:
    agent = agent_of(FakePool(end), *conversations)
    await program.function(TASK, agent, settings=SETTINGS)
    return agent


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            ProgramEnd(CallStatus.ERROR, 127, "", "agentloop: agent: No such file", 1.0),
            "agent ended with status 127 without an answer .* its stderr: agentloop: agent: No",
        ),
        (ProgramEnd(CallStatus.OK, 0, "42", "", 1.0), "status 0 .* nothing to stderr"),
        (ProgramEnd(CallStatus.TIMEOUT, None, "", "", 100.0), r"ran out of time \(100 s\)"),
        (ProgramEnd(CallStatus.OUTPUT_LIMIT, None, "", "", 1.0), "agent.max_output_kib"),
        (ProgramUnsupported("no image"), "agent: no image"),
    ],
)
async def test_program_that_fails_without_an_answer_is_a_user_error(
    end: ProgramEnd | Exception, said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        await failing(end)


async def test_engine_that_fails_is_infrastructure() -> None:
    agent = agent_of(FakePool(SandboxUnavailable("the engine is gone")))
    with pytest.raises(InfrastructureFailed, match="the engine is gone"):
        await program.function(TASK, agent, settings=SETTINGS)
    assert agent.failures == ["sandbox: the engine is gone"]


TIMED_OUT = ProgramEnd(CallStatus.TIMEOUT, None, "42", "", 100.0)


@pytest.mark.parametrize("has_answered", [True, False])
async def test_time_spent_waiting_for_a_server_is_not_the_programs(has_answered: bool) -> None:
    agent = agent_of(FakePool(TIMED_OUT), *([conversation()] if has_answered else []))
    agent.queued_s = 60.0
    with pytest.raises(InfrastructureFailed, match="mostly waiting for a server"):
        await program.function(TASK, agent, settings=SETTINGS)
    agent.queued_s = 40.0
    if has_answered:
        result = await program.function(TASK, agent, settings=SETTINGS)
        assert result.text == "<answer>42</answer>"
    else:
        with pytest.raises(SettingsError, match="ran out of time"):
            await program.function(TASK, agent, settings=SETTINGS)


async def test_time_in_which_the_model_samples_is_the_rollouts_own() -> None:
    agent = agent_of(FakePool(TIMED_OUT))
    agent.in_flight = [conversation("and so on, and")]
    result = await program.function(TASK, agent, settings=SETTINGS)
    assert result.text == "<answer>42</answer>"
    assert result.id == agent.trajectories[0].id


async def test_silent_model_at_the_timeout_is_an_infrastructure_failure() -> None:
    agent = agent_of(FakePool(TIMED_OUT))
    agent.in_flight = [None]
    with pytest.raises(InfrastructureFailed, match="before the model had begun"):
        await program.function(TASK, agent, settings=SETTINGS)
    # A program that goes by itself has not waited.
    agent = agent_of(FakePool(ProgramEnd(CallStatus.ERROR, 1, "", "", 1.0)))
    agent.in_flight = [None]
    with pytest.raises(SettingsError, match="without an answer"):
        await program.function(TASK, agent, settings=SETTINGS)


async def test_program_that_ends_leaves_its_other_requests_unrecorded() -> None:
    agent = agent_of(FakePool(), conversation())
    agent.in_flight = [conversation("a sub-agent's")]
    await program.function(TASK, agent, settings=SETTINGS)
    assert len(agent.trajectories) == 1


async def test_conversation_that_ended_last_is_the_one_that_counts() -> None:
    main = conversation("\\boxed{42}", created_unix_s=1.0, elapsed_s=9.0)
    helper = conversation("sub-task done", created_unix_s=5.0, elapsed_s=1.0)
    result = await answered(ProgramEnd(CallStatus.OK, 0, "", "", 10.0), main, helper)
    assert result is main


async def test_conversation_that_infrastructure_broke_is_not_graded() -> None:
    broken = conversation()
    broken.stop_reason = StopReason.INFRASTRUCTURE
    assert await answered(ProgramEnd(CallStatus.OK, 0, "42", "", 1.0), broken) is broken


# -- as a local process -----------------------------------------------------------------------


def local_pool(*, trusted: bool) -> FakePool:
    settings = SimpleNamespace(allow_weak_isolation=trusted)
    return FakePool(has_containers=False, settings=settings)


async def test_without_containers_a_program_must_be_trusted() -> None:
    agent = agent_of(local_pool(trusted=False))
    with pytest.raises(SettingsError, match=r"sandbox\.allow_weak_isolation=true"):
        await program.function(TASK, agent, settings=SETTINGS)


def python(code: str, **more: Any) -> ProgramSettings:
    return ProgramSettings(command=("python3", "-c", code), **more)


async def test_local_process_asks_over_tcp() -> None:
    async with model_session(local_pool(trusted=True)) as agent:
        code = f"{ASK}\nprint(answer, end='')"
        result = await program.function(TASK, agent, settings=python(code))
    assert result.text == "<answer>42</answer>"
    assert agent.asked[0]["messages"][0]["content"] == TASK.prompt


@pytest.mark.full
async def test_local_process_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""{ASK}
import subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open({str(pids)!r}, "w") as file: print(os.getpid(), child.pid, file=file)
print(answer, flush=True)
time.sleep(600)
"""
    async with model_session(local_pool(trusted=True), timeout_s=5) as agent:
        result = await program.function(TASK, agent, settings=python(code))
    assert result.text == "<answer>42</answer>"
    running = os.listdir("/proc")
    assert [pid for pid in pids.read_text().split() if pid in running] == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("no-such-program",), "status 127 .*there is no such program"),
        (("sh", "-c", "exit 3"), "status 3"),
        (("sh", "-c", "kill -9 $$"), "status 137"),
        (("yes",), "max_output_kib"),
    ],
)
async def test_local_process_that_never_asks(command: tuple[str, ...], said: str) -> None:
    agent = agent_of(local_pool(trusted=True))
    settings = ProgramSettings(command=command, max_output_kib=100)
    with pytest.raises(SettingsError, match=said):
        await program.function(TASK, agent, settings=settings)


async def test_session_key_is_in_no_error_and_no_answer() -> None:
    stated = "POST http://127.0.0.1:8377/v1/sessions/secret/v1/messages"
    failed = FakePool(ProgramEnd(CallStatus.ERROR, 1, "", stated, 2.0))
    with pytest.raises(SettingsError, match=r"sessions/\[key\]/v1/messages") as result:
        await program.function(TASK, agent_of(failed), settings=SETTINGS)
    assert "secret" not in str(result.value)
    printed = FakePool(ProgramEnd(CallStatus.OK, 0, stated, "", 2.0))
    record = await program.function(TASK, agent_of(printed, conversation()), settings=SETTINGS)
    assert "secret" not in record.text + record.answer
