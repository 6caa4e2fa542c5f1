"""The installed distribution: its name, its version, and how to install a part that is missing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec

from agentloop.errors import SettingsError

__all__ = ["NAME", "conflict", "install_hint", "is_installed", "require", "version"]

NAME = "agentloop-rl"  # `agentloop` on the package index is another project
_OTHER = "agentloop"


def version() -> str:
    """Return the installed version."""
    return metadata.version(NAME)


def conflict() -> str:
    """Return what to do if the other project is installed, whose files replace ours, else ""."""
    try:
        other_version = metadata.version(_OTHER)
    except metadata.PackageNotFoundError:
        return ""
    return (
        f"{_OTHER} {other_version}, another project, is installed too, and its files replace ours: "
        f"`pip uninstall {_OTHER}`, then install {NAME} again with --force-reinstall --no-deps"
    )


def install_hint(extra: str) -> str:
    """Return the command that installs an optional part, such as `otel`."""
    return f"pip install '{NAME}[{extra}]'"


def require(extra: str, modules: Mapping[str, str]) -> None:
    """Check that optional packages are installed, without importing them.

    Args:
        extra: the extra that installs them.
        modules: purpose of each module, by the module's name.

    Raises:
        SettingsError: some are missing; the message names each, its purpose and the command that
            installs them.
    """
    missing = [f"{name} ({use})" for name, use in modules.items() if not is_installed(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise SettingsError(f"{', '.join(missing)} {verb} not installed: {install_hint(extra)}")


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it; packages above it are."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its package is missing
        return False
    return spec is not None and spec.origin is not None  # a plain folder of that name has no origin
