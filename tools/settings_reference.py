"""`python -m tools.settings_reference`: write docs/settings.md from the settings' classes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pydantic

from agentloop.cli.evaluate import EvaluateSettings
from agentloop.cli.sft import SftSettings
from agentloop.cli.train import TrainSettings
from agentloop.config import describe_settings
from agentloop.runtime import Settings
from agentloop.sandbox.serve_settings import SandboxServeSettings

__all__ = ["main", "reference"]

PATH = Path(__file__).parents[1] / "docs" / "settings.md"
_COMMANDS: dict[str, tuple[type[pydantic.BaseModel], str]] = {
    "agentloop serve": (Settings, "also of `agentloop chat`, and of `agentloop.Runtime`"),
    "agentloop train": (TrainSettings, "besides those of `agentloop serve`"),
    "agentloop sft": (SftSettings, ""),
    "agentloop evaluate": (EvaluateSettings, "besides those of `agentloop serve`"),
    "python -m agentloop.sandbox.serve": (SandboxServeSettings, ""),
}


def reference() -> str:
    """Return the text of docs/settings.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "Made from the code by `python -m tools.settings_reference`. A setting is given in a TOML"
    yield "file, as an override `section.key=value` on the command line, or in the environment as"
    yield "`AGENTLOOP_SECTION__KEY`; `agentloop COMMAND --list-settings` prints those of a command."
    known: set[tuple[str, str, str]] = set()
    for command, (model, more) in _COMMANDS.items():
        rows = list(describe_settings(model))
        yield from ("", f"## {command}", "")
        if more:
            yield from (f"{more[0].upper()}{more[1:]}.", "")
        new = [row for row in rows if row not in known or command.startswith("python")]
        if command in ("agentloop serve", "agentloop sft"):
            new = rows
        if command == "agentloop serve":
            known |= set(rows)
        for section, of_section in groupby(new, key=lambda row: row[0].rpartition(".")[0]):
            if section:
                yield from (f"### {section}", "")
            yield from ("| setting | default | |", "|---|---|---|")
            for name, default, description in of_section:
                shown = f"`{default}`" if default else "none"
                yield f"| `{name}` | {_cell(shown)} | {_cell(description)} |"
            yield ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main() -> None:
    """Write docs/settings.md."""
    PATH.write_text(reference(), "utf-8")


if __name__ == "__main__":
    main()
