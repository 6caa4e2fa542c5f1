"""A fleet with the real parts: SGLang, the sandbox, DeepSpeed, Redis; a runtime that is killed; two
machines with addresses of their own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.abc
import pytest

from agentloop.cli.console import ProgressLine
from agentloop.cli.train import TrainSettings, train
from agentloop.config import load_settings
from agentloop.errors import ServerError
from agentloop.training.fleet.redis_link import RedisLink
from agentloop.training.fleet.settings import FleetSettings
from agentloop.training.learner_client.launch import free_port
from tests.integration.conftest import need
from tests.integration.test_sandbox_remote_engine import make_certs
from tests.integration.test_train import RECIPE, Said
from tests.redis_server import redis_server
from tests.support import eventually

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("sglang_installed"),
]

SCRIPT = Path(__file__).with_name("two_machines.sh")
SMALL = [
    "loop.prompts_per_step=3",
    "loop.group_size=6",  # of which each is right by a coin: some differ
    "loop.evaluate_tasks=2",
    "tasks.held_out=2",
    "roc.down_sample_to_n=4",
    "roc.reject_equal_reward=false",
    "sampling.temperature=2.5",
    "reward.function=tests.integration.test_train:coin",  # which every machine can import
    "ranks.nproc_per_node=1",
]


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if "reward" in one]


def versions_in(run: Path, group: int) -> set[str]:
    file = run / "trajectories" / f"group-{group:07}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {one for row in rows for one in row["trajectory"]["versions"] if one is not None}


async def test_two_runtimes_roll_out_for_one_learner_and_one_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "fleet"
    said = Said()
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path / "redis"))

        async def start(number: int) -> anyio.abc.Process:
            path = tmp_path / f"runtime-{number}.log"
            log = stack.enter_context(path.open("wb"))
            command = [sys.executable, "-m", "agentloop", "rollouts", "--redis", redis.url]
            command += ["--run", "fleet", "sandbox.backend=process", "sandbox.workers=1"]
            return await stack.enter_async_context(
                await anyio.open_process(command, stdout=log, stderr=log)
            )

        runtimes = [await start(1), await start(2)]

        def is_there(runtime: anyio.abc.Process) -> bool:
            ours = f"-{runtime.pid}-"
            return any(line.startswith("Runtime ") and ours in line for line in said.lines)

        async def kill_one() -> None:
            def has_learned() -> bool:
                return any(line.startswith("step 1/") for line in said.lines)

            await eventually(has_learned, within_s=600)
            runtimes.sort(key=is_there)  # the other may not be up yet
            runtimes.pop().kill()

        overrides = [f"run.folder={run.parent}", "run.name=fleet", "loop.steps=2", *SMALL]
        overrides += [f"fleet.redis={redis.url}", "fleet.lease_s=10"]
        settings = load_settings(TrainSettings, [RECIPE], overrides)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_one)
            await train(settings, cast(ProgressLine, said))
        assert await runtimes[0].wait() == 0  # the run is over
    steps = steps_of(run)
    assert [one["step"] for one in steps] == [1, 2]
    for step in steps:
        assert step["num_rollouts"] == 18
        assert step["num_without_reward"] == 0
        assert step["weights/num_failed"] == 0
        assert abs(step["learner/mismatch_kl"]) < 1e-3
    assert versions_in(run, 1) == {"0"}
    assert versions_in(run, 6) == {"1"}
    assert (
        len([line for line in said.lines if line.endswith("its groups go to other runtimes")]) >= 1
    )


async def test_tls_and_a_password_from_the_url(tmp_path: Path) -> None:
    certs, port = make_certs(tmp_path / "certs"), free_port()
    options = ["--tls-port", str(port), "--tls-ca-cert-file", "ca.pem", "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", "server-cert.pem", "--tls-key-file", "server-key.pem"]
    with redis_server(certs, [*options, "--requirepass", "open-sesame"]):
        url = f"rediss://:open-sesame@127.0.0.1:{port}/0"
        trusted = FleetSettings(redis=f"{url}?ssl_ca_certs={certs}/ca.pem")
        async with RedisLink.open(trusted, "tls") as link:
            await link.do(lambda redis: redis.set("a", "b"))
            assert await link.do(lambda redis: redis.get("a")) == b"b"
        async with RedisLink.open(FleetSettings(redis=url, give_up_s=0.1), "tls") as link:
            with pytest.raises(ServerError, match="certificate"):
                await link.do(lambda redis: redis.get("a"))


async def test_two_machines_with_addresses_of_their_own(tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("ip"):
        need("network namespaces: run as root, and apt-get install iproute2")
    if not shutil.which("redis-server"):
        pytest.fail("missing: redis-server: apt-get install redis-server", pytrace=False)
    done = await anyio.run_process(
        [str(SCRIPT), str(tmp_path), "loop.steps=1", *SMALL],
        env={**os.environ, "PYTHON": sys.executable},
        check=False,
    )
    log = (tmp_path / "runtime.log").read_text()
    assert done.returncode == 0, done.stderr.decode() + log
    assert log.splitlines()[-1] == "The run is over"
    (step,) = steps_of(tmp_path / "two")
    assert step["num_learned"] == 12
    assert step["weights/num_servers"] == 1
    assert b"sesame" not in (tmp_path / "two" / "config.toml").read_bytes()
