"""`python -m agentloop.learner SETTINGS.json`: one rank of the learner.

A supervisor starts it once per rank, with torch.distributed's environment (RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Rank 0 sends a `ReadyReply` when all ranks are ready
(agentloop/training/learner_client/protocol.py). Everything printed goes to stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pydantic

from agentloop.child_environment import wait_policy
from agentloop.errors import AgentLoopError
from agentloop.training.learner_client.protocol import Failure, ReadyReply
from agentloop.training.learner_client.settings import LearnerSettings

if TYPE_CHECKING:
    from agentloop.learner.rank import ControlChannel

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m agentloop.learner", description=__doc__)
    parser.add_argument("settings", type=Path, help="LearnerSettings as JSON")
    chosen = parser.parse_args(arguments)
    os.environ |= wait_policy(os.environ)  # a rank on another node has that node's environment
    _die_with_parent()
    os.dup2(2, 1)  # DeepSpeed logs to stdout
    try:
        settings = LearnerSettings.model_validate_json(chosen.settings.read_text("utf-8"))
    except (OSError, pydantic.ValidationError) as error:
        print(f"{chosen.settings}: {error}", file=sys.stderr)
        return 2
    return _run(settings)


def _run(settings: LearnerSettings) -> int:
    # Importing torch takes seconds: check the settings first. It makes so many objects that last
    # that garbage collections would add a sixth to the time.
    gc.disable()
    from agentloop.learner.policy import Policy
    from agentloop.learner.rank import ControlChannel, serve
    from agentloop.learner.world import World, made_with

    link = ControlChannel.open() if os.environ.get("RANK") == "0" else None
    try:
        world = World(settings.collective_timeout_s)
        policy = Policy(settings, world)
        world.wait()
        gc.enable()
        if link:
            link.send(
                ReadyReply(
                    num_ranks=world.size,
                    device=str(world.device),
                    num_parameters=policy.num_parameters,
                    num_trained=policy.num_trained,
                    made_with=made_with(world),
                )
            )
        serve(policy, link)
        world.leave()
    except Exception as error:
        if link:
            _try_to_report(link, error)
        raise
    return 0


def _try_to_report(link: ControlChannel, error: Exception) -> None:
    """Report the error to the supervisor; `on_purpose` means that a restart would not help."""
    text, on_purpose = f"{type(error).__name__}: {error}", isinstance(error, AgentLoopError)
    try:
        link.send(Failure(error=text, fatal=True, on_purpose=on_purpose))
    except OSError:
        print(json.dumps({"unsent": text}), file=sys.stderr)


def _die_with_parent() -> None:
    """Ask Linux to kill this rank when its parent dies.

    Nothing else would end a rank whose supervisor was killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
