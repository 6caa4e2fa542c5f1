"""`python -m tools.settings_reference`: write docs/settings.md from the settings' classes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pydantic

from agentloop.config import describe_settings
from agentloop.evaluation.wiring import EvaluateSettings
from agentloop.models import SMALL
from agentloop.runtime import Settings
from agentloop.sandbox.serve_settings import SandboxServeSettings
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.sft.run import SftSettings

__all__ = ["main", "reference"]

PATH = Path(__file__).parents[1] / "docs" / "settings.md"
_COMMANDS: dict[str, tuple[type[pydantic.BaseModel], str]] = {
    "agentloop serve": (
        Settings,
        "Also those of `agentloop.Runtime`, `agentloop chat` and `agentloop env try`. The commands "
        "take `env`, `tasks` and `reward` of `agentloop train` besides; `agentloop chat` and "
        "`agentloop env try` also the `endpoint` of `agentloop evaluate`, and the latter "
        "`num_rollouts` (default: 10).",
    ),
    "agentloop train": (
        TrainSettings,
        "Besides those of `agentloop serve`; the section `sft` takes those of `agentloop sft`: "
        "`data`, `loop`, `learner`.",
    ),
    "agentloop sft": (SftSettings, ""),
    "agentloop evaluate": (EvaluateSettings, "Besides those of `agentloop serve`."),
    "python -m agentloop.sandbox.serve": (
        SandboxServeSettings,
        "Besides those of the section `sandbox` of `agentloop serve`, which are the section `pool` "
        "here. In the environment as `SANDBOX_SECTION__KEY`.",
    ),
}
# Defaults that depend on the machine.
_SHOWN = {"sandbox.workers": "two per core"}

_KEPT = re.compile(r"^(By default|Only for)|\b(must|requires|should|never)\b")

Row = tuple[str, str, str]


def reference() -> str:
    """Return the text of docs/settings.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "Made from the code by `python -m tools.settings_reference`. A setting is given in a TOML"
    yield "file, as an override `section.key=value` on the command line, or in the environment as"
    yield "`AGENTLOOP_SECTION__KEY`. `agentloop COMMAND --list-settings` says more of each."
    yield ""
    yield "Names end in their unit: `_s` is seconds, `_mib` is 2^20 bytes. Each is shown with"
    yield "its default; for one that has none, `none` in a file restores that."
    listed: dict[Row, str] = {}  # with the command
    for command, (model, note) in _COMMANDS.items():
        yield from ("", f"## {command}")
        if note:
            yield from ("", note)
        rows = list(describe_settings(model))
        if model is TrainSettings:
            of_sft = {(f"sft.{name}", *others) for name, *others in describe_settings(SftSettings)}
            rows = [row for row in rows if row not in of_sft]
        if model is SandboxServeSettings:
            rows = [row for row in rows if not row[0].startswith("pool.")]
        known = [row for row in rows if row in listed and listed[row] not in note]
        if known:
            sections = dict.fromkeys(f"`{row[0].split('.')[0]}`" for row in known)
            yield from ("", f"The rest as for `agentloop train`: {', '.join(sections)}.")
        yield from _sections(row for row in rows if row not in listed)
        listed = dict.fromkeys(rows, command) | listed


def _sections(rows: Iterable[Row]) -> Iterator[str]:
    by_section: dict[str, list[Row]] = {"": []}  # first: those without a section
    for row in rows:
        by_section.setdefault(row[0].rpartition(".")[0], []).append(row)
    for section, section_rows in by_section.items():
        if not section_rows:
            continue
        if section:
            yield from ("", f"### {section}")
        yield ""
        for name, default, description in section_rows:
            yield f"- {_with_default(name, default)}: {_gist(description)}"


def _gist(description: str) -> str:
    """Return the first clause of a description, and sentences about its default and conditions."""
    first, *others = re.split(r"(?<=[.)]) (?=[A-Z`])", " ".join(description.split()))
    clause = first.partition("; ")[0].removesuffix(".")
    return " ".join([f"{clause}.", *filter(_KEPT.search, others)])


def _with_default(name: str, value: str) -> str:
    if name in _SHOWN:
        return f"`{name}` ({_SHOWN[name]})"
    if value == f'"{SMALL}"':
        return f"`{name}` (the small model that ships with agentloop)"
    return f"`{name}={' '.join(value.split())}`" if value else f"`{name}`"


def main() -> None:
    """Write docs/settings.md."""
    PATH.write_text(reference(), "utf-8")


if __name__ == "__main__":
    main()
