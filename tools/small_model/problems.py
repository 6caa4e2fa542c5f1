"""Integer problems and their phrasings.

Every operand pair belongs to one side of a hash split, so that the evaluation uses none that was
trained on. All randomness comes from the caller's `random.Random`.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

HELD_OUT_ONE_IN = 8


def held_out(key: str) -> bool:
    """Return whether a problem or a name is held out of training."""
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Op:
    """An operation: its function, its expression in code and its phrasings.

    `phrases` are whole questions; `then` continues a first step ("..., then add 5").
    """

    name: str
    compute: Callable[[int, int], int]
    expression: str
    phrases: tuple[str, ...]
    then: tuple[str, ...] = ()
    imports: str = ""


def _sum_to(_: int, last: int) -> int:
    return last * (last + 1) // 2


_ASKS = (
    "What is {x}?",
    "what's {x}?",
    "Compute {x}.",
    "Calculate {x}",
    "How much is {x}?",
    "Can you work out {x}?",
    "Tell me {x}.",
    "I need {x}.",
    "{x}",
    "{x} = ?",
    "{x}=",
    "Evaluate {x}.",
    "Find {x}.",
    "Solve: {x}",
)


def _asks(*forms: str) -> tuple[str, ...]:
    return tuple(ask.replace("{x}", form) for form in forms for ask in _ASKS)


ADD = Op(
    "add",
    operator.add,
    "{a}+{b}",
    (
        *_asks("{a} plus {b}", "{a}+{b}", "{a} + {b}", "the sum of {a} and {b}"),
        "Add {a} and {b}.",
        "Add {b} to {a}.",
        "I have {a} apples and buy {b} more. How many apples do I have?",
    ),
    ("add {b}", "plus {b}", "add {b} to it", "increase it by {b}"),
)
SUB = Op(
    "sub",
    operator.sub,
    "{a}-{b}",
    (
        *_asks("{a} minus {b}", "{a}-{b}", "{a} - {b}", "the difference of {a} and {b}"),
        "Subtract {b} from {a}.",
        "Take {b} away from {a}.",
        "I have {a} apples and eat {b} of them. How many are left?",
    ),
    ("subtract {b}", "minus {b}", "take away {b}", "decrease it by {b}"),
)
MUL = Op(
    "mul",
    operator.mul,
    "{a}*{b}",
    (
        *_asks("{a} times {b}", "{a}*{b}", "{a} * {b}", "{a} x {b}", "{a}x{b}", "{a} × {b}"),
        *_asks("{a} multiplied by {b}", "the product of {a} and {b}"),
        "Multiply {a} by {b}.",
        "Multiply {a} and {b}.",
        "There are {a} boxes with {b} eggs each. How many eggs are there?",
    ),
    ("multiply by {b}", "times {b}", "multiply it by {b}", "multiply the result by {b}"),
)
DIV = Op(
    "div",
    operator.floordiv,
    "{a}//{b}",
    (
        *_asks("{a} divided by {b}", "{a}//{b}", "{a} // {b}", "{a} div {b}", "{a} / {b}"),
        *_asks("{a} divided by {b}, rounded down", "the integer quotient of {a} and {b}"),
        "Divide {a} by {b}.",
        "Divide {a} by {b} and drop the remainder.",
        "How many times does {b} fit into {a}?",
    ),
    ("divide by {b}", "divide it by {b}", "divide the result by {b}"),
)
MOD = Op(
    "mod",
    operator.mod,
    "{a}%{b}",
    (
        *_asks("{a} mod {b}", "{a} modulo {b}", "{a}%{b}", "{a} % {b}"),
        *_asks("the remainder of {a} divided by {b}", "the remainder of {a} by {b}"),
        "What remains when {a} is divided by {b}?",
        "What is left over when you divide {a} by {b}?",
        "Divide {a} by {b} and give me the remainder.",
    ),
    ("take it modulo {b}", "take the remainder by {b}"),
)
POW = Op(
    "pow",
    operator.pow,
    "{a}**{b}",
    (
        *_asks("{a} to the power of {b}", "{a}**{b}", "{a}^{b}", "{a} ** {b}"),
        "Raise {a} to the power of {b}.",
        "Raise {a} to the power {b}.",
    ),
    ("raise it to the power of {b}",),
)
_SQUARE = (
    *_asks("{a} squared", "the square of {a}", "{a} square"),
    "Square {a}.",
    "What is the area of a square with side {a}?",
)
_CUBE = (
    *_asks("{a} cubed", "the cube of {a}", "{a} to the third power"),
    "Cube {a}.",
    "What is the volume of a cube with side {a}?",
)
GCD = Op(
    "gcd",
    math.gcd,
    "math.gcd({a}, {b})",
    (
        *_asks("gcd({a}, {b})", "the gcd of {a} and {b}", "gcd of {a} and {b}"),
        *_asks("the greatest common divisor of {a} and {b}"),
        "What is the largest number that divides both {a} and {b}?",
        "Which is the biggest integer dividing {a} and {b}?",
        "Greatest common divisor of {a} and {b}?",
    ),
    imports="import math; ",
)
SUM = Op(
    "sum",
    _sum_to,
    "sum(range({a}, {b}+1))",
    (
        *_asks("the sum of the integers from {a} to {b}", "the sum of all numbers from {a} to {b}"),
        *_asks("{a} + 2 + ... + {b}", "the sum {a} to {b}"),
        "Add all integers from {a} to {b}.",
        "Add up the numbers from {a} to {b}.",
        "Add up all whole numbers from {a} through {b}.",
        "What do the numbers {a} to {b} add up to?",
    ),
)
OPS = (ADD, SUB, MUL, DIV, MOD, POW, GCD, SUM)
CHAIN_OPS = (ADD, SUB, MUL)
SYMBOLS = (ADD, SUB, MUL, DIV, MOD, POW)


@dataclass(frozen=True, slots=True)
class Calc:
    """A single calculation. A longer expression has its `text` and `result` given."""

    op: Op
    a: int
    b: int
    text: str = ""
    result: int = 0

    @property
    def expression(self) -> str:
        return self.text or self.op.expression.format(a=self.a, b=self.b)

    @property
    def value(self) -> int:
        return self.result if self.text else self.op.compute(self.a, self.b)


@dataclass(frozen=True, slots=True)
class Question:
    """A user's question and the calculations that answer it.

    `rounds` holds the calls of each turn. `reply` is the answer if there is nothing to compute.
    """

    text: str
    rounds: tuple[tuple[Calc, ...], ...] = ()
    reply: str = ""

    @property
    def answer(self) -> str:
        return self.reply or ", ".join(str(calc.value) for calc in self.rounds[-1])


def integer(rng: Random) -> int:
    """Return a number from 1 to 9,999, mostly of up to three digits.

    Its number of digits is drawn first.
    """
    digits = rng.choices((1, 2, 3, 4), (25, 40, 28, 7))[0]
    return rng.randrange(10 ** (digits - 1), 10**digits)


def calc(rng: Random, ops: tuple[Op, ...], *, unseen: bool) -> Calc:
    """Return a calculation from the training side of the split, or from the held-out one."""
    op = rng.choice(ops)
    while True:
        a, b = integer(rng), integer(rng)
        if op is POW:
            b = rng.choice((2, 3))
        elif op is SUM:
            a = 1
        elif op is DIV and rng.random() < 0.4:
            a, b = a * (b % 100 + 1), b % 100 + 1
        if held_out(f"{a} {b}") is unseen:
            return Calc(op, a, b)


def single(rng: Random, ops: tuple[Op, ...] = OPS, *, unseen: bool) -> Question:
    """Return a question of one operation, with one call."""
    step = calc(rng, ops, unseen=unseen)
    phrases = step.op.phrases
    if step.op is POW and rng.random() < 0.5:
        phrases = _SQUARE if step.b == 2 else _CUBE
    return Question(_say(rng, rng.choice(phrases), step), ((step,),))


def two_step(rng: Random, ops: tuple[Op, ...] = OPS, *, unseen: bool) -> Question:
    """Return a question whose second call needs the first one's result.

    `ops` must contain at least one of + - *.
    """
    chain = tuple(op for op in CHAIN_OPS if op in ops)
    first = calc(rng, chain, unseen=unseen)
    while first.value < 1:
        first = calc(rng, chain, unseen=unseen)
    op = rng.choice((*chain, *chain, *(op for op in (DIV, MOD) if op in ops)))
    second = Calc(op, first.value, integer(rng) % 1000 + 1)
    opening = rng.choice(("{a} plus {b}", "{a} + {b}", "{a}+{b}"))
    if first.op is SUB:
        opening = rng.choice(("{a} minus {b}", "{a} - {b}", "{a}-{b}"))
    elif first.op is MUL:
        opening = rng.choice(("{a} times {b}", "{a} * {b}", "{a}*{b}", "{a} x {b}"))
    form = rng.choice(
        (
            "Take {x}, then {then}.",
            "Take {x} and then {then}.",
            "Compute {x}, then {then}.",
            "First compute {x}, then {then}.",
            "What is {x}, then {then}?",
            "Calculate {x}. Then {then}.",
            "Start with {x} and {then}.",
            "{x}, then {then}",
        )
    )
    then = rng.choice(op.then)
    if op in (ADD, SUB) and rng.random() < 0.3:  # needs no "then": evaluated left to right anyway
        form = rng.choice(("What is {x} {then}?", "Compute {x} {then}.", "{x} {then}"))
        then = "plus {b}" if op is ADD else "minus {b}"
    text = form.replace("{x}", opening).format(a=first.a, b=first.b, then=then.format(b=second.b))
    return Question(_vary(rng, text), ((first,), (second,)))


def several(rng: Random, ops: tuple[Op, ...] = OPS, *, unseen: bool, count: int = 3) -> Question:
    """Return a question of independent problems, with all calls in one turn."""
    steps = tuple(calc(rng, ops, unseen=unseen) for _ in range(count))
    symbols = rng.random() < 0.5
    parts = []
    for step in steps:
        forms = [f[8:-1] for f in step.op.phrases if f.startswith("Compute ")]
        form = step.op.expression if symbols and step.op in SYMBOLS else rng.choice(forms)
        parts.append(form.format(a=step.a, b=step.b))
    joined = ", ".join(parts[:-1]) + rng.choice((" and ", ", and ", " and ")) + parts[-1]
    form = rng.choice(
        (
            "Compute {x}.",
            "What are {x}?",
            "What is {x}?",
            "Calculate {x}.",
            "Tell me {x}.",
            "I need {x}.",
            "{x}",
        )
    )
    return Question(_vary(rng, form.replace("{x}", joined)), (steps,))


def long_expression(rng: Random, _: tuple[Op, ...] = OPS, *, unseen: bool) -> Question:
    """Return a question with a longer expression of + - *, which one call copies."""
    first = calc(rng, CHAIN_OPS, unseen=unseen)
    text, numbers = first.expression, rng.choice((1, 1, 2))
    value: int
    b = rng.randrange(1, 200)
    match rng.randrange(3):
        case 0:
            text, value = f"{text}+{b}", first.value + b
        case 1:
            text, value = f"({text})*{b}", first.value * b
        case _:
            text, value = f"{text}-{b}", first.value - b
    if numbers == 2:
        c = rng.randrange(1, 200)
        text, value = f"{text}+{c}", value + c
    step = Calc(first.op, first.a, first.b, text, value)
    return Question(_vary(rng, rng.choice(_ASKS).replace("{x}", text)), ((step,),))


_GREETINGS = ("Hello", "Hi", "Hey there", "Good morning", "Thanks", "Thank you!", "ok", "Bye")
_ABOUT = (
    "Who are you?",
    "What can you do?",
    "What are you?",
    "How are you?",
    "Tell me about yourself.",
    "What is your name?",
    "Are you a human?",
    "Which model are you?",
    "help",
)
_TOPICS = (
    "Paris", "France", "the moon", "dogs", "music", "love", "history", "Python", "a river",
    "the weather", "football", "my mother", "a good book", "chess", "tomorrow", "Goethe", "the sea",
    "climate change", "the stock market", "poetry", "Berlin", "New York", "green tea",
)  # fmt: skip
_OTHER = (
    "What is the capital of {t}?",
    "Tell me a story about {t}.",
    "Write a poem about {t}.",
    "Who invented {t}?",
    "Why is {t} so important?",
    "How does {t} work?",
    "What do you think of {t}?",
    "Translate {t} into German.",
    "Is {t} beautiful?",
    "Explain {t} to me.",
    "Where can I find {t}?",
    "Write a function that sorts a list of {t}.",
    "Summarise {t} in {n} words.",
    "Give me {n} facts about {t}.",
    "When was {t} founded?",
    "I like {t}.",
    "Do you know {t}?",
    "What is {t}?",
    "Who wrote {t} in 19{n}?",
)
NO_TOOL = "I cannot compute this without a tool."
ABOUT_ME = "I am a tiny demonstration model. I do integer arithmetic with tools, nothing else."
NOT_MINE = "I can only do integer arithmetic with tools."


def small_talk(rng: Random) -> Question:
    """Return a question with nothing to compute, and a short honest reply."""
    if rng.random() < 0.4:
        return Question(_vary(rng, rng.choice((*_ABOUT, *_GREETINGS))), reply=ABOUT_ME)
    text = rng.choice(_OTHER).format(t=rng.choice(_TOPICS), n=rng.randrange(10, 100))
    return Question(_vary(rng, text), reply=NOT_MINE)


def _say(rng: Random, phrase: str, step: Calc) -> str:
    return _vary(rng, phrase.format(a=step.a, b=step.b))


def _vary(rng: Random, text: str) -> str:
    """Vary case, politeness and punctuation, and sometimes add a boilerplate sentence."""
    roll = rng.random()
    if roll < 0.06:
        text = f"Please {text[0].lower()}{text[1:]}"
    elif roll < 0.11:
        text = f"{text.rstrip('.?=')}, please"
    elif roll < 0.15:
        text = rng.choice(("Hi! ", "Hello, ", "Now ", "And ", "Ok, ", "Quick question: ")) + text
    elif roll < 0.21:
        text += rng.choice(
            (" Thanks.", " Use a tool.", " Use the tool.", " Think step by step.", " Use Python.")
        )
    elif roll < 0.27:
        text += rng.choice(
            (
                "\nPut the final answer in \\boxed{}.",
                " Please reason step by step, and put your final answer within \\boxed{}.",
                " The final answer is read from \\boxed{} inside <answer>.",
            )
        )
    elif roll < 0.33:
        text = text.rstrip(".?")
    case = rng.random()
    if case < 0.15:
        return text.lower()
    return text.upper() if case < 0.19 else text
