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
from typing import TypedDict

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
Takes = str | list[str] | None
"""The choices of an option or argument, or the kind of its values; None: it is a flag."""


class _Option(TypedDict):
    about: str
    takes: Takes


class _Setting(TypedDict):
    about: str
    choices: list[str]


class _Command(TypedDict, total=False):
    """A command with options and arguments, or, with `commands`, a group of commands.

    Attributes:
        arguments: The values of each argument without an option.
        settings: The first parts of the names of its settings, and the names under which the
            settings of `_Completions` describe them.
    """

    about: str
    commands: dict[str, _Command]
    options: dict[str, _Option]
    arguments: list[Takes]
    settings: dict[str, str]


class _Completions(TypedDict):
    commands: dict[str, _Command]
    settings: dict[str, _Setting]


def main(arguments: list[str]) -> int:
    """Print a script, or after `SHELL --` the candidates for the last of the words that follow."""
    shell, *words = arguments or [""]
    if shell in ("-h", "--help"):
        print(_HELP)
        return 0
    if shell not in _SCRIPTS or words[:1] not in ([], ["--"]):
        problem = f"unknown shell {shell!r}" if shell not in _SCRIPTS else "expected only a shell"
        print(f"{_USAGE}\nagentloop completion: error: {problem}", file=sys.stderr)
        return 2
    if not words:
        print(_SCRIPTS[shell])
        return 0
    words = words[1:] or [""]
    if shell == "bash":
        words = _join_broken(words)
    for value, description in candidates(words):
        if shell == "bash":
            # Bash replaces the part after the last of the characters that break words.
            value = _escape(value[max(words[-1].rfind("="), words[-1].rfind(":")) + 1 :])
        print(value if shell == "bash" or not description else f"{value}\t{description}")
    return 0


def candidates(words: Sequence[str]) -> list[Candidate]:
    """Return the candidates for the last of the words that follow `agentloop`."""
    *before, word = words
    completions = _completions()
    command: _Command = {"commands": completions["commands"]}
    while "commands" in command:
        if not before:
            names = ((name, inner["about"]) for name, inner in command["commands"].items())
            return _beginning_with(word, names)
        if before[0] not in command["commands"]:
            return []
        command = command["commands"][before.pop(0)]
    options = command["options"]
    name, equals, value = word.partition("=")
    if equals and name in options:
        return [(f"{name}={choice}", "") for choice, _ in _values(options[name]["takes"], value)]
    if before and (option := options.get(before[-1])) and option["takes"] is not None:
        return _values(option["takes"], word)
    if word.startswith("-"):
        return _beginning_with(word, ((name, option["about"]) for name, option in options.items()))
    return _values_of_argument(command, before, word)


def _values_of_argument(command: _Command, before: Sequence[str], word: str) -> list[Candidate]:
    """Return the values of the command's arguments that stand without an option."""
    num_before = sum(not word.startswith("-") and "=" not in word for word in before)
    arguments = command["arguments"]
    sections = command.get("settings", {})
    if not sections:  # the last one may stand several times
        num_before = min(num_before, len(arguments) - 1)
    takes = arguments[num_before] if num_before < len(arguments) and arguments else "text"
    values = _values(takes, word)
    if sections:
        values += _settings(sections, word) + ([] if takes == "run" else _paths(word, ".toml"))
        if "run" in sections and takes != "run":
            values += _beginning_with(word, ((path.stem, "") for path in _RECIPES.glob("*.toml")))
    return values


def _values(takes: Takes, word: str) -> list[Candidate]:
    """Return the values of an option or argument: a list of choices, or the name of a kind."""
    match takes:
        case "run":
            return _runs(word)
        case "path":
            return _paths(word)
        case [*choices]:
            return _beginning_with(word, ((choice, "") for choice in choices))
        case _:
            return []


def _settings(sections: Mapping[str, str], word: str) -> list[Candidate]:
    """Return settings up to their next dot, or the values of the one that `word` sets."""
    name, equals, value = word.partition("=")
    settings = _completions()["settings"]
    head, dot, tail = name.partition(".")
    if equals:
        section = sections.get(head)
        setting = settings.get(f"{section}{dot}{tail}") if section else None
        choices = setting["choices"] if setting else []
        return [(f"{name}={choice}", "") for choice in choices if choice.startswith(value)]
    typed = name.split(".")
    shown: dict[str, str] = {}
    for head, key in (
        (head, key) for head, section in sections.items() for key in _keys_of(section)
    ):
        parts = [head, *key.split(".")[1:]]
        matching = (
            part in ("NAME", typed_part)
            for part, typed_part in zip(parts, typed[:-1], strict=False)
        )
        if len(parts) < len(typed) or not all(matching):
            continue
        last = parts[len(typed) - 1]
        if last == "NAME" or not last.startswith(typed[-1]):
            continue
        path = ".".join([*typed[:-1], last])
        if len(parts) > len(typed):
            shown.setdefault(f"{path}.", "")
        else:
            shown[f"{path}="] = settings[key]["about"]
    return list(shown.items())


@cache
def _keys_of(section: str) -> list[str]:
    return [key for key in _completions()["settings"] if key.partition(".")[0] == section]


def _runs(word: str) -> list[Candidate]:
    """Return runs, newest first; below another folder than runs/, all folders."""
    folder, slash, _ = word.rpartition("/")
    if slash and folder != _RUNS:
        return [(path, "") for path, _ in _paths(word) if path.endswith("/")]
    runs = []
    for entry in _entries(_RUNS):
        try:
            runs.append((-os.stat(f"{entry.path}/config.toml").st_mtime, entry.path))
        except OSError:
            continue
    return _beginning_with(word, ((path, "") for _, path in sorted(runs)))


def _paths(word: str, ending: str = "") -> list[Candidate]:
    """Return folders, and the files whose names have this ending."""
    folder, slash, start = word.rpartition("/")
    paths = []
    for entry in _entries(os.path.expanduser(folder + slash) or "."):
        is_hidden = entry.name.startswith(".") and not start.startswith(".")
        if entry.name.startswith(start) and not is_hidden:
            if entry.is_dir():
                paths.append((f"{folder}{slash}{entry.name}/", ""))
            elif entry.name.endswith(ending):
                paths.append((f"{folder}{slash}{entry.name}", ""))
    return sorted(paths)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:
        return


def _beginning_with(word: str, values: Iterator[Candidate]) -> list[Candidate]:
    return [candidate for candidate in values if candidate[0].startswith(word)]


def _join_broken(words: Sequence[str]) -> list[str]:
    """Return the words as a person sees them: bash breaks them at `=` and `:`."""
    joined = [""]
    is_open = True
    for number, word in enumerate(words):
        is_break = bool(word) and set(word) <= set("=:")
        if number and (is_break or is_open):
            joined[-1] += word
        elif number:
            joined.append(word)
        else:
            joined[-1] = word
        is_open = is_break
    return joined


def _escape(value: str) -> str:
    return re.sub(r"([^\w@%+=:,./~-])", r"\\\1", value)


@cache
def _completions() -> _Completions:
    completions: _Completions = json.loads(FILE.read_bytes())
    return completions
