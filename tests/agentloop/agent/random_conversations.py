"""Random conversations by the thousand, from seeds: what models, users and tools may write.

A conversation is made again from its number, so a failure that names it can be repeated alone.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tests.agentloop.agent.call_forms import Call, Form

__all__ = ["EXAMPLES", "chunks_of", "conversations", "damage", "some_calls", "some_text"]

EXAMPLES = int(os.environ.get("AGENTLOOP_FORMAT_EXAMPLES", "1000"))
"""Conversations per family."""

_PIECES: tuple[str, ...] = (
    *"{}[]()<>|:,;=\"'\\/`_-\n\t\r \u0000",
    *("37", "-0.5", "1e999", "null", "true", "None", "a", "the answer", "name", "arguments"),
    *("```json", "\\n", "\\u00e9", "\\ud83d", '"}', '": {', "}}", "'''", "\\\\", "<", "</", "<|"),
    *("é", "漢字", "🙂", "👩‍👩‍👧", "e\u0301", "\u202eabc", "\u2028", "\ufeff", "\u00a0", "｜", "▁"),
    '{"name": "search", "arguments": {}}',
    "[search(text='x')]",
    "</parameter>",
    "</arg_value>",
)
_KEYS = ("text", "number", "flag", "maybe", "tree", "list")


def conversations(name: str, count: int) -> Iterator[tuple[str, random.Random]]:
    """Yield a name for each conversation and the dice that make it."""
    for number in range(count):
        yield f"{name} {number}", random.Random(f"{name} {number}")


def some_text(dice: random.Random, spelled: Sequence[str] = ()) -> str:
    """Text with parts of JSON, Python, markup and Unicode; `spelled` are tokens that it may spell.

    It may be empty, and is very long once in some hundred times.
    """
    kind = dice.random()
    if kind < 0.08:
        return ""
    if kind < 0.083:
        return _piece(dice, spelled) * dice.randint(200, 2000)
    return "".join(_piece(dice, spelled) for _ in range(dice.randint(1, 5)))


def _piece(dice: random.Random, spelled: Sequence[str]) -> str:
    kind = dice.random()
    if spelled and kind < 0.25:
        token = dice.choice(spelled)
        return token if kind < 0.2 else token[: dice.randint(1, len(token))]
    if kind < 0.35:
        code = dice.choice((0x7F, 0x7FF, 0xFFFF, 0x10FFFF))
        point = dice.randint(1, code)
        return chr(point) if not 0xD800 <= point < 0xE000 else "?"
    return dice.choice(_PIECES)


def _number(dice: random.Random) -> int:
    return dice.choice((0, 1, -1, dice.randint(-999, 999), dice.randint(-(2**70), 2**70)))


def _tree(dice: random.Random, depth: int) -> Any:
    kind = dice.randrange(8 if depth else 5)
    if kind >= 5:
        inner = range(dice.randint(0, 3))
        if kind == 5:
            return [_tree(dice, depth - 1) for _ in inner]
        return {some_text(dice): _tree(dice, depth - 1) for _ in inner}
    return (some_text(dice), _number(dice), dice.random() < 0.5, None, dice.random() * 10)[kind]


def _argument(dice: random.Random, key: str) -> Any:
    match key:
        case "text":
            return some_text(dice)
        case "number":
            return _number(dice)
        case "flag":
            return dice.random() < 0.5
        case "maybe":
            text = some_text(dice)
            # Between tags, both of these stand for the null that the schema allows.
            is_null = text.strip().lower() in ("null", "none")
            return None if is_null or dice.random() < 0.3 else text
        case "tree":
            return {some_text(dice): _tree(dice, 2) for _ in range(dice.randint(0, 3))}
        case _:
            return [_tree(dice, 2) for _ in range(dice.randint(0, 3))]


def some_calls(
    dice: random.Random, form: Form, names: Sequence[str], spelled: Sequence[str]
) -> list[Call]:
    """Return one to three calls without control tokens or their form's end in their arguments.

    A model does not sample those inside an argument: the text would end there.
    """

    def one() -> Call:
        kept = dice.sample(_KEYS, dice.choice((0, 1, 1, 2, 3)))
        return dice.choice(names), {key: _argument(dice, key) for key in kept}

    while True:
        made = [one() for _ in range(1 if form.one_call else dice.randint(1, 3))]
        text = json.dumps(made, ensure_ascii=False)
        if not any(token in text for token in spelled):
            return made


def damage(dice: random.Random, text: str, spelled: Sequence[str]) -> str:
    """Text as a model writes that fails: with pieces lost, repeated, moved or added, or cut."""
    for _ in range(dice.randint(1, 3)):
        a, b = sorted(dice.randint(0, len(text)) for _ in range(2))
        match dice.randrange(5):
            case 0:
                text = text[:a]
            case 1:
                text = text[:a] + text[min(b, a + 12) :]
            case 2:
                text = text[:b] + text[a : min(b, a + 60)] + text[b:]
            case 3:
                text = text[:a] + some_text(dice, spelled) + text[a:]
            case _:
                text = text[b:] + text[:b]
    return text


def chunks_of(dice: random.Random, length: int) -> list[int]:
    """Return the edges of a stream's chunks, from 0 to `length`."""
    longest = dice.choice((1, 3, 20, 200))
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, edges[-1] + 1 + int(dice.random() * longest)))
    return edges
