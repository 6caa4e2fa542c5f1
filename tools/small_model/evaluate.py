"""Greedy accuracy per skill on problems and names held out of training.

An episode counts only if every call is right, calls come in the expected turns, and the answer is
boxed exactly. Episodes are generated in batches with transformers' KV cache; tools are emulated
(calculate.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from tools.small_model import problems
from tools.small_model.calculate import CalculationError, answer_call
from tools.small_model.episodes import NO_TOOLS, Episode, failure, opening, question
from tools.small_model.names import Names
from tools.small_model.problems import NO_TOOL, Calc, Question
from tools.small_model.toolbox import Style, Toolbox, by_meaning, toolbox
from tools.small_model.train import token_ids

Ask = Callable[[Random, Toolbox], Question]

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_ANSWER = re.compile(r"</reason>\n<answer>(.*)</answer>$", re.DOTALL)


@dataclass(slots=True)
class Case:
    """A dialogue in progress: the episode so far, the questions left, and the first mistake."""

    box: Toolbox
    episode: Episode
    questions: list[Question]
    failures: list[str] = field(default_factory=list)
    at_round: int = 0
    wrong: str = ""

    def start(self) -> None:
        self.episode.say("user", self.questions[0].text)

    @property
    def done(self) -> bool:
        return bool(self.wrong) or not self.questions

    def take(self, content: str) -> None:
        """Judge an assistant turn and append the reply to it."""
        self.episode.assistant(content)
        ask = self.questions[0]
        rounds = ask.rounds if self.box.tools else ()
        try:
            if self.at_round < len(rounds):
                self._respond(_CALL.findall(content), rounds[self.at_round])
            else:
                self._judge(content, ask)
        except CalculationError as refused:
            self.wrong = f"{refused} | {ask.text!r} | {content!r}"

    def _respond(self, calls: list[str], calcs: tuple[Calc, ...]) -> None:
        if len(calls) != len(calcs):
            raise CalculationError(f"{len(calls)} calls")
        values = [answer_call(*pair) for pair in zip(calls, [self.box] * 9, calcs, strict=False)]
        if values != [str(calc.value) for calc in calcs]:
            raise CalculationError(f"computes {values}")
        if self.failures:
            self.episode.say("tool", self.failures.pop())
            return
        for text in values:
            self.episode.say("tool", text)
        self.at_round += 1

    def _judge(self, content: str, ask: Question) -> None:
        expected = ask.answer if not ask.rounds else f"\\boxed{{{ask.answer}}}"
        if ask.rounds and not self.box.tools:
            expected = NO_TOOL
        match = _ANSWER.search(content)
        if not match or match[1] != expected:
            raise CalculationError("wrong answer")
        self.questions.pop(0)
        self.at_round = 0
        if self.questions:
            self.start()


@dataclass(frozen=True, slots=True)
class Skill:
    """A line of the table, and how its cases are drawn."""

    name: str
    box: Callable[[Random], Toolbox]
    ask: Ask
    num_questions: int = 1
    num_failures: int = 0

    def case(self, rng: Random) -> Case:
        box = self.box(rng)
        asks = [self.ask(rng, box) for _ in range(self.num_questions)]
        failures = [failure(rng) for _ in range(self.num_failures)]
        case = Case(box, opening(rng, box), asks, failures)
        case.start()
        return case


def _box(*styles: Style, names: Names = Names.UNSEEN) -> Callable[[Random], Toolbox]:
    return lambda rng: toolbox(rng, styles, names)


def _single(rng: Random, box: Toolbox) -> Question:
    return problems.single(rng, box.ops, unseen=True)


def _two_step(rng: Random, _: Toolbox) -> Question:
    return problems.two_step(rng, unseen=True)


def _several(rng: Random, _: Toolbox) -> Question:
    return problems.several(rng, unseen=True)


def _long_expression(rng: Random, _: Toolbox) -> Question:
    return problems.long_expression(rng, unseen=True)


def _any_kind(rng: Random, box: Toolbox) -> Question:
    return question(rng, box, unseen=True)


def _talk(rng: Random, _: Toolbox) -> Question:
    return problems.small_talk(rng)


_WIDE = Names.UNSEEN_WIDE
_ANY = _box(Style.PYTHON, Style.JUPYTER, Style.OPERANDS)
SKILLS = (
    Skill("python_code_with_standard_io, one step", _box(Style.PYTHON), _single),
    Skill("jupyter_code, one step", _box(Style.JUPYTER), _single),
    Skill("two-parameter tool, unseen names", _box(Style.OPERANDS), _single),
    Skill("one-parameter tool, unseen names", _box(Style.EXPRESSION), _single),
    Skill("two-parameter tool, any new name", _box(Style.OPERANDS, names=_WIDE), _single),
    Skill("one-parameter tool, any new name", _box(Style.EXPRESSION, names=_WIDE), _single),
    Skill("several tools with telling names", by_meaning, _single),
    Skill("two steps, python", _box(Style.PYTHON), _two_step),
    Skill("two steps, any tool", _ANY, _two_step),
    Skill("three problems at once, python", _box(Style.PYTHON), _several),
    Skill("three problems at once, any tool", _ANY, _several),
    Skill("longer written expression", _box(Style.PYTHON), _long_expression),
    Skill("first call fails", _ANY, _single, num_failures=1),
    Skill("first two calls fail", _box(Style.PYTHON), _single, num_failures=2),
    Skill("chat of three questions, python", _box(Style.PYTHON), _single, num_questions=3),
    Skill("chat of three questions, any tool and kind", _ANY, _any_kind, num_questions=3),
    Skill("chat of five questions, python", _box(Style.PYTHON), _any_kind, num_questions=5),
    Skill("no tool listed", lambda _: NO_TOOLS, _single),
    Skill("not arithmetic (phrases seen)", _ANY, _talk),
)


def generate(
    model: Any, tokenizer: Any, episodes: Sequence[Episode], max_new_tokens: int = 240
) -> list[str]:
    """Return the greedy next turn of each episode, including `<reason>`."""
    prompts = token_ids(tokenizer, episodes, add_generation_prompt=True)
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(
            **batch,
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    new = out[:, batch["input_ids"].shape[1] :].tolist()
    ends = [ids.index(end) if (end := tokenizer.eos_token_id) in ids else None for ids in new]
    return [f"<reason>{tokenizer.decode(ids[:end])}" for ids, end in zip(new, ends, strict=True)]


def run(model: Any, tokenizer: Any, cases: list[Case], batch_size: int = 64) -> None:
    """Run all cases to their end."""
    while active := [case for case in cases if not case.done]:
        active = active[:batch_size]
        turns = generate(model, tokenizer, [case.episode for case in active])
        for case, content in zip(active, turns, strict=True):
            case.take(content)


def evaluate(
    model: Any,
    tokenizer: Any,
    *,
    num_cases: int = 200,
    seed: int = 0,
    report: Callable[[str, list[Case]], None] = lambda *_: None,
) -> dict[str, float]:
    """Return the accuracy, 0 to 1, of each skill over `num_cases` held-out dialogues."""
    accuracies = {}
    for skill in SKILLS:
        rng = Random(f"evaluation {seed} {skill.name}")
        cases = [skill.case(rng) for _ in range(num_cases)]
        # The cost of attention grows with the square of the longest chat in the batch.
        run(model, tokenizer, cases, batch_size=64 // skill.num_questions**2 + 1)
        accuracies[skill.name] = sum(not case.wrong for case in cases) / num_cases
        report(skill.name, cases)
    return accuracies
