"""Binding the service's address."""

from __future__ import annotations

import pydantic
import pytest

from agentloop.errors import SettingsError
from agentloop.serving.access import ServeSettings
from agentloop.serving.listen import bind


def test_occupied_port_error_says_how_to_get_another() -> None:
    with bind(ServeSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"127\.0\.0\.1:{port}: .*serve\.port=0 takes"):
            bind(ServeSettings(port=port))


def test_address_of_another_machine_is_not_blamed_on_the_port() -> None:
    with pytest.raises(SettingsError, match=r"192\.0\.2\.1") as refused:
        bind(ServeSettings(host="192.0.2.1", token=pydantic.SecretStr("secret")))
    assert "serve.port=0" not in str(refused.value)
