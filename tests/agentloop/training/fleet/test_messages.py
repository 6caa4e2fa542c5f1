"""The messages between trainer and runtimes: both must have the same version of the package."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentloop.training.fleet import messages
from agentloop.training.fleet.messages import (
    TrainerState,
    VersionError,
    WeightsAnnouncement,
    WorkerStatus,
    incarnation_in,
)
from tests.agentloop.training.fleet_player import RECIPE

WEIGHTS = WeightsAnnouncement(number=1, version="7", folder="/weights/7", timeout_s=30)
STATE = TrainerState(
    incarnation="first",
    recipe=RECIPE,
    lease_s=30,
    max_tries=5,
    max_result_mib=1,
    folder="/results",
    weights=WEIGHTS,
)
STATUS = WorkerStatus(incarnation="first", number=1, checksum="sum", num_servers=2)


def changed(message: TrainerState | WorkerStatus, **fields: Any) -> bytes:
    return json.dumps({**json.loads(message.to_json()), **fields}).encode()


def test_a_state_survives_the_wire() -> None:
    assert TrainerState.from_json(STATE.to_json()) == STATE
    assert WorkerStatus.from_json(STATUS.to_json()) == STATUS


@pytest.mark.parametrize("message", [STATE, STATUS])
def test_another_version_is_refused_and_both_are_named(
    message: TrainerState | WorkerStatus,
) -> None:
    """This holds whatever else is in the message: its fields may have changed, too."""
    data = changed(message, agentloop="0.0.7", incarnation=["of", "another", "type"])
    with pytest.raises(VersionError) as refused:
        type(message).from_json(data)
    assert refused.value.theirs == "0.0.7"
    assert refused.value.ours == messages._version()
    for version in ("0.0.7", messages._version()):
        assert version in str(refused.value)


def test_a_message_from_before_there_were_versions_is_refused() -> None:
    told = json.loads(STATUS.to_json())
    del told["agentloop"]
    with pytest.raises(VersionError, match="version unknown"):
        WorkerStatus.from_json(json.dumps(told).encode())


def test_an_incarnation_is_read_from_a_state_of_any_version() -> None:
    assert incarnation_in(changed(STATE, agentloop="0.0.7", more=1)) == "first"
    assert incarnation_in(b'{"life": "older"}') == ""
