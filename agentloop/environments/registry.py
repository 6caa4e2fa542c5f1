"""Environments that installed packages register, by name.

A package registers one in its pyproject.toml:

    [project.entry-points."agentloop.environments"]
    guess = "my_package:guess"
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from operator import attrgetter

from agentloop.errors import SettingsError

__all__ = ["GROUP", "Registered", "find", "registered"]

GROUP = "agentloop.environments"


@dataclass(frozen=True, slots=True)
class Registered:
    """An environment that an installed package registers.

    Attributes:
        target: the environment, as module:name.
        package: name and version of the package.
    """

    name: str
    target: str
    package: str


def registered() -> list[Registered]:
    """Return the environments of all installed packages, by name, without importing them."""
    environments = {
        Registered(
            point.name,
            f"{point.module}:{point.attr}",
            f"{point.dist.name} {point.dist.version}" if point.dist else "",
        )
        for point in metadata.entry_points(group=GROUP)
    }
    return sorted(environments, key=attrgetter("name", "target", "package"))


def find(name: str) -> str:
    """Return the environment that is registered as `name`, as module:name.

    Raises:
        SettingsError: no package registers it, or several do.
    """
    entries = registered()
    matches = {entry.target: entry for entry in entries if entry.name == name}
    if len(matches) > 1:
        packages = " and ".join(
            sorted(f"{entry.package} ({entry.target})" for entry in matches.values())
        )
        raise SettingsError(
            f"env.name: {packages} both register an environment {name!r}: name it as "
            "module:function"
        )
    if not matches:
        names = sorted({entry.name for entry in entries})
        near = get_close_matches(name, names, n=3)
        if near:
            hint = f"did you mean {' or '.join(map(repr, near))}?"
        else:
            hint = f"installed are: {', '.join(names) or 'none'}"
        raise SettingsError(
            f"env.name: no installed package registers an environment {name!r} ({hint}); a "
            "function of your own is named module:function"
        )
    return next(iter(matches))
