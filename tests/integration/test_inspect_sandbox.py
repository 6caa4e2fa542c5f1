"""Computers as a sandbox of Inspect: its own checks of a provider, and an evaluation.

Inspect cannot be installed beside SGLang: `tox -e adapters`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import open_process

from agentloop.sandbox.container import LABEL
from agentloop.sandbox.engine import connect
from agentloop.sandbox.image.build import image_tag
from tests.integration.conftest import need
from tests.patience import patient

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.timeout(300),
    # What the library imports is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

# As an ordinary user: root may read and write whatever it likes.
DOCKERFILE = f"""
FROM {image_tag()}
RUN apt-get update && apt-get install -y --no-install-recommends adduser procps
RUN useradd -m -K HOME_MODE=0755 agent
USER agent
WORKDIR /home/agent
"""

if importlib.util.find_spec("inspect_ai") is not None:
    from inspect_ai.util._sandbox.self_check import *  # noqa: F403


def provider() -> Any:
    """The provider, as Inspect finds it."""
    if importlib.util.find_spec("inspect_ai") is None:
        need("inspect-ai: tox -e adapters")
    from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

    return registry_find_sandboxenv("agentloop")


@pytest.fixture(scope="module")
def dockerfile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("image") / "Dockerfile"
    path.write_text(DOCKERFILE)
    return str(path)


@pytest.fixture(scope="module")
async def shared(docker_engine: None, anyio_backend: str, dockerfile: str) -> AsyncIterator[Any]:
    sandbox = provider()
    await sandbox.task_init("checks", dockerfile)
    environments = await sandbox.sample_init("checks", dockerfile, {})
    yield environments["default"]
    await sandbox.sample_cleanup("checks", dockerfile, environments, False)
    await sandbox.task_cleanup("checks", dockerfile, True)


@pytest.fixture
async def sandbox_env(shared: Any) -> Any:
    """What Inspect's checks ask for."""
    return shared


async def names_of_containers(owner: int) -> set[str]:
    async with connect() as docker:
        actual = await docker.containers.list(all=True, filters={"label": [LABEL]})
        names = [container["Names"][0].lstrip("/") for container in actual]
        return {name for name in names if f"-computer-{owner}-" in name}


async def test_background_processes_hold_no_command_up(shared: Any) -> None:
    result = await shared.exec(["sh", "-c", "sleep 1000 & echo $!"], timeout=100)
    assert (await shared.exec(["kill", result.stdout.strip()])).success


async def test_endless_output_ends_the_command(shared: Any) -> None:
    from inspect_ai.util import OutputLimitExceededError

    for command in ("yes", "yes >&2", "(yes &) ; true"):
        with pytest.raises(OutputLimitExceededError):
            await shared.exec(["sh", "-c", f"{command}; sleep 1000"], timeout=200)
    assert (await shared.exec(["echo", "fine"])).stdout == "fine\n"


async def test_cancelling_a_command_kills_its_processes(shared: Any) -> None:
    with anyio.move_on_after(1) as scope:
        await shared.exec(["sh", "-c", "sleep 4321 & sleep 4321"])
    assert scope.cancelled_caught
    with anyio.fail_after(60):
        # Nobody tells.
        while (await shared.exec(["pgrep", "-f", "sleep 4321"])).success:  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def test_missing_programs_and_folders_are_the_commands(shared: Any) -> None:
    assert (await shared.exec(["no-such-program"])).returncode == 127
    assert (await shared.exec(["true"], cwd="/no/such")).returncode == 127
    assert "nobody-here" in (await shared.exec(["true"], user="nobody-here")).stderr


async def test_input_that_nobody_reads_is_dropped(shared: Any) -> None:
    assert (await shared.exec(["true"], input=bytes(5_000_000), timeout=100)).success


async def test_connection_names_the_container(shared: Any) -> None:
    assert (await shared.connection()).container in await names_of_containers(os.getpid())


async def test_name_of_image_is_found_behind_the_tasks_folder(shared: Any, tmp_path: Path) -> None:
    sandbox, image = provider(), str(tmp_path / image_tag())
    environments = await sandbox.sample_init("checks", image, {})
    try:
        assert (await environments["default"].exec(["python3", "--version"])).success
    finally:
        await sandbox.sample_cleanup("checks", image, environments, False)


async def test_file_that_is_no_dockerfile_is_refused(shared: Any, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "compose.yaml").touch()
    with pytest.raises(ValueError, match=r"compose\.yaml is not named Dockerfile"):
        await provider().sample_init("checks", str(tmp_path / "compose.yaml"), {})


async def test_lost_computer_is_unavailable(shared: Any, dockerfile: str) -> None:
    from inspect_ai.util import SandboxUnavailableError

    sandbox = type(shared)
    environments = await sandbox.sample_init("lost", dockerfile, {})
    box = environments["default"]
    async with connect() as docker:
        await docker.containers.container((await box.connection()).container).kill()
    with pytest.raises(SandboxUnavailableError):
        await box.exec(["sleep", "1000"])
    await sandbox.sample_cleanup("lost", dockerfile, environments, True)


EVALUATION = """
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash

outputs = [
    ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "cat /home/agent/secret"}),
    ModelOutput.from_content("mockllm/model", "42"),
]
task = Task(
    dataset=[Sample(input="What is in it?", target="42", files={"secret": "it is 42"})],
    solver=[use_tools(bash(timeout=60)), generate()],
    scorer=match(),
    sandbox=("agentloop", "Dockerfile"),
)
for output in outputs:
    output.usage = ModelUsage()  # else Inspect counts tokens, with a file of the Internet
model = get_model("mockllm/model", custom_outputs=outputs)
(log,) = eval(task, model=model, log_dir="logs", display="none")
assert log.status == "success", log.error
(sample,) = log.samples
print([message.text for message in sample.messages][2], sample.scores["match"].value)
"""


async def test_evaluation_runs_in_computers(docker_engine: None, dockerfile: str) -> None:
    provider()
    async with await open_process(
        [sys.executable, "-c", EVALUATION], cwd=Path(dockerfile).parent, stderr=None
    ) as process:
        assert process.stdout is not None
        with anyio.fail_after(patient(120)):
            output = b"".join([chunk async for chunk in process.stdout])
    assert output.decode().split("\n")[-2] == "it is 42 C"
    assert not await names_of_containers(process.pid)
