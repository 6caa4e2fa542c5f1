"""`agentloop completion SHELL`: print the script that completes words in bash, zsh or fish.

    a shell ──the words so far──> completions.json, folders ──> one candidate a line

What commands take is read from completions.json, which `python -m tools.completions` makes: to
import all commands and settings takes seconds, and a person waits at each press of a key.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["FILE", "candidates", "main"]

FILE = Path(__file__).with_name("completions.json")
_RUNS = "runs"  # the folder where commands put runs
_RECIPES = FILE.with_name("recipes")
_SCRIPTS = {
    "bash": r"""# In ~/.bashrc: eval "$(agentloop completion bash)"
_agentloop() {
    mapfile -t COMPREPLY < <("${COMP_WORDS[0]/#\~/$HOME}" completion bash -- \
        "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/.] ]]; then compopt -o nospace; fi
}
complete -o nosort -F _agentloop agentloop""",
    "zsh": r"""# In ~/.zshrc, after compinit: eval "$(agentloop completion zsh)"
_agentloop() {
    local value about
    local -a whole open
    while IFS=$'\t' read -r value about; do
        if [[ $value == *[=/.] ]]; then
            open+=("${value//:/\\:}:$about")
        else
            whole+=("${value//:/\\:}:$about")
        fi
    done < <("${~words[1]}" completion zsh -- "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)
    _describe agentloop whole -- open -S ''
}
compdef _agentloop agentloop""",
    "fish": r"""# agentloop completion fish > ~/.config/fish/completions/agentloop.fish
function __agentloop_candidates
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion fish -- $words[2..-1] 2>/dev/null
end
complete -c agentloop -f -k -a '(__agentloop_candidates)'""",
}
_USAGE = f"usage: agentloop completion {{{','.join(_SCRIPTS)}}}"
_HELP = f"""{_USAGE}

Print the script with which a shell completes commands, options, settings, their choices and runs.

  bash   in ~/.bashrc: eval "$(agentloop completion bash)"
  zsh    in ~/.zshrc, after compinit: eval "$(agentloop completion zsh)"
  fish   agentloop completion fish > ~/.config/fish/completions/agentloop.fish"""

Candidate = tuple[str, str]
"""A word that may stand here, and what it means."""


def main(arguments: list[str]) -> int:
    """Print a script, or after `SHELL --` the candidates for the last of the words that follow."""
    shell, *words = arguments or [""]
    if shell in ("-h", "--help"):
        print(_HELP)
        return 0
    if shell not in _SCRIPTS or words[:1] not in ([], ["--"]):
        what = f"unknown shell {shell!r}" if shell not in _SCRIPTS else "expected only a shell"
        print(f"{_USAGE}\nagentloop completion: error: {what}", file=sys.stderr)
        return 2
    if not words:
        print(_SCRIPTS[shell])
        return 0
    words = words[1:] or [""]
    if shell == "bash":
        words = _rejoined(words)
    for value, about in candidates(words):
        if (
            shell == "bash"
        ):  # it replaces the part after the last of the characters that break words
            value = _escaped(value[max(words[-1].rfind("="), words[-1].rfind(":")) + 1 :])
        print(value if shell == "bash" or not about else f"{value}\t{about}")
    return 0


def candidates(words: Sequence[str]) -> list[Candidate]:
    """Return the candidates for the last of the words that follow `agentloop`."""
    *before, word = words
    command: Mapping[str, Any] = _known()
    while "commands" in command:
        if not before:
            named = ((name, one["about"]) for name, one in command["commands"].items())
            return _beginning_with(word, named)
        if before[0] not in command["commands"]:
            return []
        command = command["commands"][before.pop(0)]
    options: Mapping[str, Mapping[str, Any]] = command["options"]
    name, equals, value = word.partition("=")
    if equals and name in options:
        found = _values(options[name]["takes"], value)
        return [(f"{name}={one}", about) for one, about in found]
    if before and (option := options.get(before[-1])) and option["takes"] is not None:
        return _values(option["takes"], word)
    if word.startswith("-"):
        return _beginning_with(word, ((one, of["about"]) for one, of in options.items()))
    return _values_of_argument(command, before, word)


def _values_of_argument(
    command: Mapping[str, Any], before: Sequence[str], word: str
) -> list[Candidate]:
    """Return the values of the command's arguments that stand without an option."""
    num_given = sum(not one.startswith("-") and "=" not in one for one in before)
    arguments: Sequence[Any] = command["arguments"]
    sections: Mapping[str, str] = command.get("settings", {})
    if not sections:  # the last one may stand several times
        num_given = min(num_given, len(arguments) - 1)
    takes = arguments[num_given] if num_given < len(arguments) and arguments else "text"
    found = _values(takes, word)
    if sections:
        found += _settings(sections, word) + ([] if takes == "run" else _paths(word, ".toml"))
        if "run" in sections and takes != "run":
            found += _beginning_with(word, ((one.stem, "") for one in _RECIPES.glob("*.toml")))
    return found


def _values(takes: Any, word: str) -> list[Candidate]:
    """Return the values of an option or argument: a list of choices, or the name of a kind."""
    match takes:
        case "run":
            return _runs(word)
        case "path":
            return _paths(word)
        case [*choices]:
            return _beginning_with(word, ((one, "") for one in choices))
        case _:
            return []


def _settings(sections: Mapping[str, str], word: str) -> list[Candidate]:
    """Return settings up to their next dot, or the values of the one that `word` sets.

    Args:
        sections: the first parts of the names of the command's settings, and under which names
            those are described.
    """
    name, equals, value = word.partition("=")
    described: Mapping[str, Any] = _known()["settings"]
    head, dot, tail = name.partition(".")
    if equals:
        at = sections.get(head)
        about = described.get(f"{at}{dot}{tail}") if at else None
        found = _beginning_with(value, ((one, "") for one in about["choices"])) if about else []
        return [(f"{name}={one}", text) for one, text in found]
    given = name.split(".")
    shown: dict[str, str] = {}
    for section, key in ((one, key) for one, at in sections.items() for key in _keys_of(at)):
        parts = [section, *key.split(".")[1:]]
        matching = (one in ("NAME", other) for one, other in zip(parts, given[:-1], strict=False))
        if len(parts) < len(given) or not all(matching):
            continue
        last = parts[len(given) - 1]
        if last == "NAME" or not last.startswith(given[-1]):
            continue
        path = ".".join([*given[:-1], last])
        if len(parts) > len(given):
            shown.setdefault(f"{path}.", "")
        else:
            shown[f"{path}="] = described[key]["about"]
    return list(shown.items())


@cache
def _keys_of(section: str) -> list[str]:
    return [key for key in _known()["settings"] if key.partition(".")[0] == section]


def _runs(word: str) -> list[Candidate]:
    """Return runs, newest first; below another folder than runs/, all folders."""
    folder, slash, _ = word.rpartition("/")
    if slash and folder != _RUNS:
        return [one for one in _paths(word) if one[0].endswith("/")]
    found = []
    for entry in _entries(_RUNS):
        try:
            found.append((os.stat(f"{entry.path}/config.toml").st_mtime, entry.path))
        except OSError:
            continue
    found.sort(key=lambda one: (-one[0], one[1]))
    return _beginning_with(word, ((path, "") for _, path in found))


def _paths(word: str, ending: str = "") -> list[Candidate]:
    """Return folders, and the files whose names have this ending."""
    folder, slash, start = word.rpartition("/")
    found = []
    for entry in _entries(os.path.expanduser(folder + slash) or "."):
        is_hidden = entry.name.startswith(".") and not start.startswith(".")
        if entry.name.startswith(start) and not is_hidden:
            if entry.is_dir():
                found.append((f"{folder}{slash}{entry.name}/", ""))
            elif entry.name.endswith(ending):
                found.append((f"{folder}{slash}{entry.name}", ""))
    return sorted(found)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _beginning_with(word: str, values: Iterator[Candidate]) -> list[Candidate]:
    return [one for one in values if one[0].startswith(word)]


def _rejoined(words: Sequence[str]) -> list[str]:
    """Return the words as a person sees them: bash breaks them at `=` and `:`."""
    found = [""]
    is_open = True
    for number, word in enumerate(words):
        is_break = bool(word) and set(word) <= set("=:")
        if number and (is_break or is_open):
            found[-1] += word
        elif number:
            found.append(word)
        else:
            found[-1] = word
        is_open = is_break
    return found


def _escaped(value: str) -> str:
    return re.sub(r"([^\w@%+=:,./~-])", r"\\\1", value)


@cache
def _known() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(FILE.read_bytes())
    return known
