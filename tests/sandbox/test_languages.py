"""Programs in other languages, in local workers; those of compilers are among the real tests."""

from __future__ import annotations

import base64
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from agentloop.sandbox import (
    CallError,
    CallResult,
    CallStatus,
    Pool,
    PoolSettings,
    ProgramUnsupported,
)
from agentloop.sandbox.compat import run_code_answer
from agentloop.sandbox.languages import COMPILE_ERROR, TOOLS, checked, second_call
from agentloop.sandbox.serve import serving
from tests.sandbox.test_serve import Client, service, settings

pytestmark = pytest.mark.timeout(60)

SCRIPT = "read name; echo hello $name; echo error >&2; yes | head -1; exit 3"
OURS = CallError("OSError", "no space", line=4)


@pytest.fixture
async def client(pool: Pool) -> AsyncIterator[Client]:
    async with service(pool) as client:
        yield client


@pytest.fixture
def without_node(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    monkeypatch.setitem(TOOLS, "javascript", replace(TOOLS["javascript"], command="no-node"))
    monkeypatch.setattr(pool, "_languages", {})


async def test_shell_script_has_input_output_and_exit_status(pool: Pool) -> None:
    result = await pool.run(SCRIPT, "you\n", language="bash")
    assert (result.status, result.exit_code) == (CallStatus.ERROR, 3)
    assert (result.stdout, result.stderr) == ("hello you\ny\n", "error\n")
    late = await pool.run("echo begun; sleep 600", timeout_s=2, language="bash")
    assert (late.status, late.stdout) == (CallStatus.TIMEOUT, "begun\n")


async def test_source_is_written_as_it_is(pool: Pool) -> None:
    text = '{"é\\\'\n\n"""}'
    result = await pool.run(f"cat << 'END'\n{text} \ud800\nEND", language="bash")
    assert result.stdout == f"{text} ?\n"


async def test_missing_language_is_named_with_its_remedy(pool: Pool, without_node: None) -> None:
    for _ in range(2):
        with pytest.raises(ProgramUnsupported, match=r'no-node.*packages=\["debian:nodejs"\]'):
            await pool.run("1", language="javascript")


async def test_unknown_language_is_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match="'ruby' is none of python, bash, cpp, javascript"):
        await pool.run("1", language=cast(Any, "ruby"))


async def test_scripts_run_on_another_machine(pool: Pool, without_node: None) -> None:
    async with serving(pool, settings()) as url, Pool(PoolSettings(hosts=[url])) as remote:
        assert (await remote.run("echo $((6 * 7))", language="bash")).stdout == "42\n"
        with pytest.raises(ProgramUnsupported, match="no-node"):
            await remote.run("1", language="javascript")


async def test_service_runs_scripts_and_names_what_is_missing(
    client: Client, without_node: None
) -> None:
    script = {"code": "echo $((6 * 7))", "language": "bash"}
    missing = {"code": "1", "language": "javascript"}
    assert (await client.post("/v1/run", script))[1]["stdout"] == "42\n"
    _, answer = await client.post("/run_code", script)
    assert (answer["status"], answer["run_result"]["stdout"]) == ("Success", "42\n")
    for path, body in (("/v1/run", missing), ("/v1/run/batch", {"calls": [script, missing]})):
        status, answer = await client.post(path, body)
        assert (status, answer["error"]["field"]) == (400, "language")
        assert "no-node" in answer["error"]["message"]
    _, answer = await client.post("/run_code", {**missing, "language": "nodejs"})
    assert answer["status"] == "SandboxError"
    assert "no-node" in answer["message"]


async def test_submission_in_a_missing_language_is_invalid(
    client: Client, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOOLS, "cpp", replace(TOOLS["cpp"], command="no-compiler"))
    monkeypatch.setattr(pool, "_languages", {})
    _, answer = await client.post("/run", {"type": "cpp", "solution": "1"})
    assert (answer["success"], answer["reason"]) == (False, "invalid_input")
    assert "no-compiler" in answer["stderr"]


async def test_sessions_take_no_language(client: Client) -> None:
    _, session = await client.post("/v1/sessions", {})
    status, answer = await client.post(
        f"/v1/sessions/{session['id']}/run", {"code": "1", "language": "bash"}
    )
    assert (status, answer["error"]["field"]) == (400, "language")


def compiled(**changes: Any) -> CallResult:
    output = base64.b64encode(zlib.compress(b"program")).decode()
    return replace(CallResult(1, CallStatus.OK, exit_code=0, stdout=output), **changes)


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"status": CallStatus.ERROR, "stderr": "line 1: no"}, CallStatus.ERROR, "line 1: no"),
        ({"status": CallStatus.TIMEOUT}, CallStatus.TIMEOUT, ""),
        ({"truncated": True}, CallStatus.ERROR, "is longer than"),
        ({"stdout": "what is this?"}, CallStatus.ERROR, ""),
    ],
)
def test_program_that_is_not_compiled_says_so(
    changes: dict[str, Any], status: CallStatus, says: str
) -> None:
    result = second_call(compiled(**changes))
    assert isinstance(result, CallResult)
    assert (result.status, result.stdout) == (status, "")
    assert result.error is not None
    assert result.error.type == COMPILE_ERROR
    assert says in result.error.message
    answer = run_code_answer(result, "cpp")
    assert (answer["status"], answer["run_result"]) == ("Failed", None)
    assert answer["compile_result"] is not None
    # a program in Python cannot pass its own error off as a compiler's
    assert run_code_answer(result, "python")["compile_result"] is None


def test_failure_before_the_program_is_the_sandboxes() -> None:
    failed = compiled(status=CallStatus.ERROR, error=OURS)
    for result in (checked(failed), second_call(failed)):
        assert isinstance(result, CallResult)
        assert result.status is CallStatus.SANDBOX_ERROR
    lost = compiled(status=CallStatus.KILLED, error=CallError("WorkerLost", "it died"))
    assert checked(lost) is lost


async def test_address_space_of_other_programs_is_not_limited(pool: Pool) -> None:
    limit = "ulimit -v; ulimit -Hv"
    assert (await pool.run(limit, language="bash")).stdout == "unlimited\nunlimited\n"
    limits = await pool.run("import resource\nprint(*resource.getrlimit(resource.RLIMIT_AS))")
    soft, hard = map(int, limits.stdout.split())
    assert 0 < soft < hard
    async with pool.session() as session:
        first = await session.run("import resource\nresource.getrlimit(resource.RLIMIT_AS)")
        await session.run("resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))")
        later = await session.run("resource.getrlimit(resource.RLIMIT_AS)")
    assert first.result == f"({soft}, {hard})"
    assert later.result is not None
    assert eval(later.result)[1] == min(hard, 2**30)
