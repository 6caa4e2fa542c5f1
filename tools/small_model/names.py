"""Names for tools and parameters, mostly invented, so that the model has to learn to copy them.

Every name belongs to one side of a hash split, as the operands do.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from string import ascii_lowercase

from tools.small_model.problems import held_out


class Names(StrEnum):
    """Sets that names are drawn from."""

    PLAIN = "plain"
    """A few words, and syllables: enough to learn to copy names."""
    WIDE = "wide"
    """Many words and pieces of words, so that every token of the vocabulary is copied."""
    UNSEEN = "unseen"
    """Like PLAIN, from the side held out of training."""
    UNSEEN_WIDE = "unseen wide"
    """Like WIDE, from the held-out side; half of the names use words absent from training."""

    @property
    def seen(self) -> bool:
        return self in (Names.PLAIN, Names.WIDE)

    @property
    def wide(self) -> bool:
        return self in (Names.WIDE, Names.UNSEEN_WIDE)


def _split(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_WORDS = _split(
    """
    add sum my multiply times number value first second left right calc compute math do
    run tool op arith fast safe int eval get apply operand arg base exponent factor term
    num one two result simple best helper call service remote local big old new total
    product divide power gcd solve query text input expr calculator calculate evaluate
    expression formula machine worker abacus
    """
)
_MORE_WORDS = _split(
    """
    numbers values integer integers arithmetic answer question task problem python code
    print import range system user assistant tools name arguments reason response error
    timeout line last next before after again find search read write open close load save
    send fetch make build create update delete list set item items key table row column
    file path data json string count index size length width height min max mean double
    half triple unit price cost tax rate amount money year month day hour time date
    temperature weather city country person age color shape point vector matrix graph node
    edge tree root leaf parent child source target from to with of and or not is has can
    will check test verify plus minus subtract difference quotient remainder modulo mod
    """
)
_NEW_WORDS = _split(
    """
    process combine lookup alpha beta square fancy start end other custom adder lambda
    zero offset limit budget ledger oracle engine robot wizard quick magic buddy outcome
    figure bottom upper lower inner outer gamma delta hidden public shared global static
    """
)
_KINDS = ("words", "pieces", "syllables", "letters", "camel", "digit")
_SHARES = (36, 22, 14, 12, 6, 10)


def identifier(rng: Random, names: Names, common: frozenset[str]) -> str:
    """Return a name. Names in `common` count as seen, whatever their hash."""
    while True:
        name = _wide(rng, names) if names.wide else _plain(rng)
        if rng.random() < 0.04:
            name = name.upper()
        if (held_out(name) and name not in common) is not names.seen:
            return name


def _plain(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.35:
        return "_".join(rng.choice(_WORDS) for _ in range(rng.choice((1, 2, 2, 3))))
    if roll < 0.75:
        return "_".join(_syllables(rng) for _ in range(rng.choice((1, 1, 2))))
    if roll < 0.85:
        return rng.choice(_WORDS) + rng.choice(_WORDS).title()
    if roll < 0.93:
        return "".join(rng.choices(ascii_lowercase, k=rng.randint(2, 8)))
    return f"{_syllables(rng)}{rng.randrange(100)}"


def _wide(rng: Random, names: Names) -> str:
    words = _WORDS + _MORE_WORDS
    if not names.seen and rng.random() < 0.5:
        words = _NEW_WORDS
    parts = rng.choice((1, 2, 2, 3))
    match rng.choices(_KINDS, _SHARES)[0]:
        case "words":
            return "_".join(rng.choices(words, k=parts))
        case "pieces":
            pieces = [_piece(rng) + _piece(rng) for _ in range((parts + 1) // 2)]
            return "_".join(pieces)
        case "syllables":
            return "_".join(_syllables(rng) for _ in range((parts + 1) // 2))
        case "letters":
            return "".join(rng.choices(ascii_lowercase, k=rng.randint(1, 8)))
        case "camel":
            return rng.choice(words) + rng.choice(words).title()
        case _:
            return f"{rng.choice((rng.choice(words), _syllables(rng)))}{rng.randrange(12)}"


def _piece(rng: Random) -> str:
    word = rng.choice(_MORE_WORDS)
    start = rng.randrange(len(word))
    return word[start : start + rng.randint(2, 6)]


def _syllables(rng: Random) -> str:
    return "".join(
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(("", "", "n", "r", "s"))
        for _ in range(rng.choice((1, 2, 2, 3)))
    )
