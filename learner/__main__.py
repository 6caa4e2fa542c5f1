"""`python -m learner SETTINGS.json`: one rank of the learner.

Started once per rank, with torch.distributed's environment (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT): by a supervisor, torchrun or DeepSpeed's launcher. Rank 0 says {"ok":
true, "ready": true, ...} when all of them are. What is printed goes to stderr, whoever prints it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

import pydantic

from agentloop.errors import AgentLoopError
from agentloop.openmp import wait_policy
from agentloop.training.learner_settings import LearnerSettings

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m learner", description=__doc__)
    parser.add_argument("settings", type=Path, help="LearnerSettings as JSON")
    parser.add_argument("--socket", help="whom rank 0 talks to, in place of the environment's")
    chosen = parser.parse_args(arguments)
    if chosen.socket:
        os.environ["AGENTLOOP_LEARNER_SOCKET"] = chosen.socket
    os.environ |= wait_policy(os.environ)  # other nodes' launchers hand no environment on
    _die_with_parent()
    os.dup2(2, 1)  # DeepSpeed logs to stdout
    try:
        settings = LearnerSettings.model_validate_json(chosen.settings.read_text("utf-8"))
    except (OSError, pydantic.ValidationError) as error:
        print(f"{chosen.settings}: {error}", file=sys.stderr)
        return 2
    return _run(settings)


def _run(settings: LearnerSettings) -> int:
    # torch takes seconds to import: not before the settings are known to be right.
    from learner.policy import Policy
    from learner.rank import Link, serve
    from learner.world import World

    link = Link.open() if os.environ.get("RANK") == "0" else None
    try:
        world = World(settings.collective_timeout_s)
        policy = Policy(settings, world)
        world.wait()
        if link:
            ready = {"ready": True, "num_ranks": world.size, "device": str(world.device)}
            sizes = {"num_parameters": policy.num_parameters, "num_trained": policy.num_trained}
            link.send({"ok": True, **ready, **sizes})
        serve(policy, link)
        world.leave()
    except Exception as error:
        if link:
            _try_to_tell(link, error)
        raise
    return 0


def _try_to_tell(link: object, error: Exception) -> None:
    """`on_purpose`: to start again would not help."""
    from learner.rank import Link

    assert isinstance(link, Link)
    text, on_purpose = f"{type(error).__name__}: {error}", isinstance(error, AgentLoopError)
    try:
        link.send({"ok": False, "error": text, "fatal": True, "on_purpose": on_purpose})
    except OSError:
        print(json.dumps({"unsent": text}), file=sys.stderr)


def _die_with_parent() -> None:
    """Nobody else ends a rank whose supervisor was killed: peers wait for it, not it for them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
