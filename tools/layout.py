"""`python -m tools.layout`: write the layout in docs/architecture.md, from the docstrings.

python -m tools.layout                       write a line for each folder
python -m tools.layout agentloop/training    print a line for each of its files
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["PATH", "files", "folders", "main", "with_layout"]

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "architecture.md"
_TOP = ("agentloop", "bench", "tools")
_BEGIN, _END = "## Layout\n\n```\n", "```\n"
_COLUMN = 26


def _summary(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0]


def _line(depth: int, name: str, file: Path) -> str:
    return f"{'  ' * depth + name:{_COLUMN}}{_summary(file)}".rstrip()


def files(folder: Path) -> Iterator[str]:
    """Yield a line for each file of a folder."""
    for file in sorted(folder.glob("*.py")):
        if file.stem != "__init__":
            yield _line(0, file.name, file)


def folders(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yield a line for a package and for each one in it, links included."""
    yield _line(depth, f"{folder.name}/", folder / "__init__.py")
    if folder == ROOT / "agentloop":
        yield from (f"  {line}" for line in files(folder))
    for inner in sorted(folder.iterdir()):
        if (inner / "__init__.py").is_file():
            yield from folders(inner, depth + 1)


def with_layout(text: str) -> str:
    """Return the document with today's layout."""
    lines = [line for top in _TOP for line in folders(ROOT / top)]
    before, _, after = text.partition(_BEGIN)
    return "\n".join([before + _BEGIN + lines[0], *lines[1:], _END + after.partition(_END)[2]])


def main(arguments: Sequence[str]) -> None:
    """Write the layout, or print the files of the folders that are named."""
    for folder in arguments:
        print("\n".join(files(Path(folder))))
    if not arguments:
        PATH.write_text(with_layout(PATH.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
