"""`agentloop rollouts` as a whole: its own settings and the trainer's."""

from __future__ import annotations

import pytest

from agentloop.agent.rollout import Budget
from agentloop.cli.rollouts import RolloutsSettings, _settings_of, main
from agentloop.cli.train import TrainSettings, recipe_of
from agentloop.config import load_settings
from agentloop.models import SMALL
from agentloop.runtime import Settings
from agentloop.training.fleet.messages import Recipe


def test_a_runtime_has_the_trainers_recipe_and_its_own_machine() -> None:
    told = ["budget.max_turns=3", "sampling.temperature=0.7", "roc.down_sample_to_n=2"]
    told.append(
        f"chat.template={SMALL / 'chat_template.jinja'}"
    )  # no file of the runtime's machine
    trainers = load_settings(
        TrainSettings, overrides=[*told, "tools=['python_code_with_standard_io']", "model=/theirs"]
    )
    own = load_settings(RolloutsSettings, overrides=["server.count=2", "sandbox.workers=1"])
    recipe = recipe_of(trainers)
    settings = _settings_of(own, recipe)
    assert settings.budget == Budget(max_turns=3) == trainers.budget
    assert settings.sampling.temperature == 0.7
    assert settings.chat == trainers.chat
    assert settings.chat.template == (SMALL / "chat_template.jinja").read_text("utf-8")
    assert settings.tools == ["python_code_with_standard_io"]
    assert settings.model == "/theirs"
    assert (settings.server.count, settings.sandbox.workers) == (2, 1)
    assert (recipe.roc, recipe.reward) == (trainers.roc, trainers.reward)
    assert Recipe.from_json(recipe.to_json()) == recipe
    elsewhere = _settings_of(own.model_copy(update={"model": "/mine"}), recipe)
    assert elsewhere.model == "/mine"


def test_each_setting_of_a_runtime_is_the_machines_or_the_recipes() -> None:
    assert Settings.model_fields.keys() - {"serve"} == (
        Recipe.model_fields.keys() | RolloutsSettings.model_fields.keys()
    ) & set(Settings.model_fields)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "fleet.redis, fleet.run: missing: --redis URL and --run NAME"),
        (["--redis", "redis://127.0.0.1:1"], "fleet.redis, fleet.run"),
        (["--redis", "127.0.0.1", "--run", "a"], "not of the form redis://HOST:PORT/0"),
        (["sampling.temperature=2"], "sampling"),  # the trainer's
    ],
)
def test_settings_with_which_it_cannot_start_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert named in capsys.readouterr().err


def test_it_has_help_and_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "--redis URL" in capsys.readouterr().out
    assert main(["--list-settings"]) == 0
    assert "fleet.lease_s = 30" in capsys.readouterr().out
