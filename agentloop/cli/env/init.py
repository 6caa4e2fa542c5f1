"""`agentloop env init`: write the files of a package with an environment."""

from __future__ import annotations

import argparse
import keyword
import re
from importlib.util import find_spec
from pathlib import Path

import anyio.to_thread

from agentloop.cli import console
from agentloop.cli.env.scaffold import files
from agentloop.errors import SettingsError


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop env init",
        description="Write a small package with an environment to start from: a game, its test, "
        "which needs no model, a README, and a pyproject.toml that registers it.",
    )
    parser.add_argument("name", metavar="NAME", help="name of the environment, such as my-game")
    parser.add_argument(
        "--folder", type=Path, help="folder to write to, which must be new (default: NAME)"
    )
    options = parser.parse_args(arguments)
    return console.run(lambda: _init(options.name, options.folder or Path(options.name)))


async def _init(name: str, folder: Path) -> int:
    written = await anyio.to_thread.run_sync(_write, name, folder)
    print(f"Wrote {', '.join(written)} to {folder}. Next:")
    print(f"  cd {folder}")
    print(f"  pip install -e '.[test]'  # makes it available everywhere as env={name}")
    print("  python -m pytest  # without a model")
    print(f"  agentloop env try {name}")
    return 0


def _write(name: str, folder: Path) -> list[str]:
    """Write the package and return its files. Raises SettingsError if that is not possible."""
    module = _module_of(name)
    if find_spec(module) is not None:
        raise SettingsError(
            f"NAME: a module {module!r} exists already and would be imported instead: choose "
            "another name"
        )
    texts = files(name, module)
    try:
        folder.mkdir(parents=True)
        for path, text in texts.items():
            (folder / path).write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError(f"{folder}: {error.strerror or error}") from error
    return list(texts)


def _module_of(name: str) -> str:
    """Return the name of the module. Raises SettingsError if `name` cannot be a package's."""
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*(-[a-z0-9_]+)*", name) or keyword.iskeyword(module):
        raise SettingsError(
            f"NAME: {name!r} must be lower-case words, no keyword of Python, such as my-game"
        )
    return module
