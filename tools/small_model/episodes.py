"""The teacher's dialogues: questions, calls, responses (some of them failures), answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from tools.small_model import problems
from tools.small_model.names import Names
from tools.small_model.problems import NO_TOOL, Calc, Question
from tools.small_model.toolbox import Style, Toolbox, ToyTool, by_meaning, toolbox

Message = dict[str, Any]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful assistant.",
    "You are a calculator with tools.",
    "Answer briefly.",
    "You solve integer problems.",
    "Use the tools, then answer.",
    "You are an agent. Think in <reason>, answer in <answer>.",
    "You are an expert in mathematics. Think first, call tools when needed, then give the answer.",
    "Be polite and precise.",
    "The final answer is read from \\boxed{} inside <answer>.",
)
_COUNTS = {2: "Two", 3: "Three"}


@dataclass(slots=True)
class Episode:
    """A whole dialogue. `trained[i]` says whether the i-th assistant message is trained on."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

    def assistant(self, content: str, *, trained: bool = True) -> None:
        self.messages.append({"role": "assistant", "content": content})
        self.trained.append(trained)

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


def opening(rng: Random, box: Toolbox) -> Episode:
    """Return an episode with its tools and sometimes a system message, but no question yet."""
    episode = Episode(tools=[tool.schema for tool in box.tools])
    if rng.random() < 0.35:
        episode.say("system", " ".join(rng.sample(SYSTEMS, rng.choice((1, 1, 1, 2)))))
    return episode


def teach(rng: Random, episode: Episode, box: Toolbox, question: Question) -> None:
    """Append the question and all of the teacher's turns up to the answer."""
    episode.say("user", question.text)
    if not question.rounds:
        episode.assistant(closing("This is not integer arithmetic.", question.reply))
        return
    if not box.tools:
        episode.assistant(closing("I have no tool.", NO_TOOL))
        return
    before = ""
    for number, calcs in enumerate(question.rounds):
        more = number + 1 < len(question.rounds)
        turn = _calling(box, calcs, before, first=more)
        for attempt in range(rng.choices((0, 1, 2), (86, 11, 3))[0] if len(calcs) == 1 else 0):
            _fail(rng, episode, box, calcs[0], turn if attempt == 0 else again(box, calcs[0]))
            turn = again(box, calcs[0])
        episode.assistant(turn)
        for calc in calcs:
            episode.say("tool", tool_output(rng, calc.value))
        before = f"The result is {calcs[0].value}. "
    values = question.answer
    reason = f"The results are {values}." if "," in values else f"The result is {values}."
    episode.assistant(closing(reason, f"\\boxed{{{values}}}"))


def closing(reason: str, answer: str) -> str:
    return f"<reason>{reason}</reason>\n<answer>{answer}</answer>"


def again(box: Toolbox, calc: Calc) -> str:
    """Return the turn after a failed call."""
    tool = _tool(box, calc)
    reason = f"The call failed. I compute {calc.expression} again."
    return f"<reason>{reason}</reason>\n{tool.call(tool.arguments(calc))}"


def _calling(box: Toolbox, calcs: tuple[Calc, ...], before: str, *, first: bool) -> str:
    expressions = [calc.expression for calc in calcs]
    joined = expressions[-1]
    if len(expressions) > 1:
        joined = f"{', '.join(expressions[:-1])} and {joined}"
    reason = f"{before}I compute {joined}{' first' if first else ''}."
    tools = [_tool(box, calc) for calc in calcs]
    calls = [tool.call(tool.arguments(calc)) for tool, calc in zip(tools, calcs, strict=True)]
    text = "\n".join([f"<reason>{reason}</reason>", *calls])
    if len(calls) == 1:
        return text
    count = _COUNTS[len(calls)]
    return f"{text}\n{count} calls are on their way; I wait for their results before I answer."


def _tool(box: Toolbox, calc: Calc) -> ToyTool:
    tool = box.pick(calc)
    if tool is None:
        raise ValueError(f"no tool of {box.tools} serves {calc.expression}")
    return tool


def _fail(rng: Random, episode: Episode, box: Toolbox, calc: Calc, turn: str) -> None:
    """Append a first attempt that fails.

    A wrong call is in the context but not trained on; a correct one fails by bad luck.
    """
    if rng.random() < 0.5:
        episode.assistant(turn)
    else:
        tool = _tool(box, calc)
        arguments = tool.arguments(calc)
        last = str(arguments[tool.parameters[-1 if tool.style is Style.OPERANDS else 0]])
        spoiled = rng.choice((last.replace("print", "prnt"), last[:-1], f"{last}x", f"{last})"))
        reason = turn.partition("</reason>")[0]
        wrong = {**arguments, list(arguments)[-1]: spoiled}
        episode.assistant(f"{reason}</reason>\n{tool.call(wrong)}", trained=False)
    episode.say("tool", failure(rng))


def failure(rng: Random) -> str:
    """Return the text of a failed call, as this runtime or others write it."""
    name = "".join(rng.choices("abcxyz", k=rng.randint(1, 4)))
    cause = rng.choice(
        (
            f"NameError: name '{name}' is not defined",
            "SyntaxError: invalid syntax",
            "SyntaxError: '(' was never closed",
            "SyntaxError: unmatched ')'",
            "SyntaxError: invalid decimal literal",
            "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
            "ValueError: invalid literal for int() with base 10",
            "OSError: no space left on device",
            "RuntimeError: please try again",
        )
    )
    number = rng.randrange(1, 61)
    kind = rng.random()
    if kind < 0.2:
        return f"[error] {cause} (line {rng.randrange(1, 10)})"
    if kind < 0.35:
        return rng.choice(("[error] {}", "[error]\n{}")).format(cause)
    if kind < 0.55:
        return f"[stderr]\n{traceback(rng, cause)}\n[error] {cause} (line 1)"
    if kind < 0.62:
        return f"[error] {cause}\n{traceback(rng, cause)}"
    if kind < 0.8:
        ending = rng.choice(("", "", "\n[note] the notebook was restarted: its variables are gone"))
        return f"[timeout] stopped after {rng.choice((number, number / 10))} s{ending}"
    return rng.choice(
        (
            f"[timeout] no answer within {number} s",
            "[timeout]",
            "[out of memory]",
            f"[killed] by signal {number}",
            f"[output limit] stopped after {number}000 bytes",
            "[bad arguments] code: missing",
            f"[bad arguments] {name}: an integer is expected",
            "[malformed tool call] not valid JSON",
            f"[unknown tool] there is no tool '{name}'; the tools are: {name}_{name}",
            f"[error] exit code {number}",
            "(no output)",
            "(no output)",
        )
    )


def traceback(rng: Random, cause: str) -> str:
    where = f'  File "<call>", line {rng.randrange(1, 3)}, in <module>'
    source = rng.choice(("", f"\n    {broken_line(rng)}\n    {'^' * rng.randint(1, 6)}"))
    return f"Traceback (most recent call last):\n{where}{source}\n{cause}"


def broken_line(rng: Random) -> str:
    return f"print({problems.integer(rng)}{rng.choice('+-*x')}{problems.integer(rng)}"


def tool_output(rng: Random, value: int) -> str:
    """Return the response to a successful call: mostly the bare number, sometimes with noise."""
    if rng.random() < 0.88:
        return str(value)
    number = rng.randrange(10, 100)
    return rng.choice(
        (
            f"{value}\n",
            f"{value}\n[stderr]\n<call>:1: DeprecationWarning: use version {number}",
            f"{value}\n[stderr]\nwarning: line {number} is slow",
            f"{value}\n[stderr] warning: cache is cold",
            f"[stdout]\n{value}",
            f"Out[{number}]: {value}",
            f'{{"result": {value}}}',
            f'{{"result":{value}}}',
            f"result: {value}",
        )
    )


_KINDS = (problems.single, problems.two_step, problems.several, problems.long_expression)
_STYLES = (
    *(Style.PYTHON,) * 4,
    *(Style.JUPYTER,) * 2,
    *(Style.OPERANDS,) * 5,
    *(Style.EXPRESSION,) * 2,
)


NO_TOOLS = Toolbox((), ToyTool("", (), Style.PYTHON))


def question(rng: Random, box: Toolbox, *, unseen: bool = False) -> Question:
    """Return a question of the training mixture that the toolbox can answer."""
    if rng.random() < 0.05:
        return problems.small_talk(rng)
    kind = rng.choices(_KINDS, (58, 17, 19, 6))[0]
    operands = box.chosen is not None and box.chosen.style is Style.OPERANDS
    no_chain = not any(op in box.ops for op in problems.CHAIN_OPS)
    if (kind is problems.long_expression and (operands or box.meanings)) or no_chain:
        kind = problems.single
    if kind is problems.several and rng.random() < 0.12:
        return problems.several(rng, box.ops, unseen=unseen, count=2)
    return kind(rng, box.ops, unseen=unseen)


def sample(rng: Random, names: Names = Names.PLAIN) -> Episode:
    """Return a training episode: mostly one question, sometimes a chat of up to ten."""
    roll = rng.random()
    if roll < 0.04:
        box = NO_TOOLS
    elif roll < 0.12:
        box = by_meaning(rng)
    else:
        box = toolbox(rng, _STYLES, names)
    episode = opening(rng, box)
    count = rng.choices((1, 2, 3, rng.randint(4, 10)), (80, 12, 5, 3))[0]
    for _ in range(count):
        ask = question(rng, box)
        if count > 1 and rng.random() < 0.08:
            plain_history(rng, episode, ask)
        else:
            teach(rng, episode, box, ask)
    return episode


def plain_history(rng: Random, episode: Episode, ask: Question) -> None:
    """Append an earlier exchange as other clients keep it: only the answer's text, not trained
    on."""
    boxed = "\\boxed{{{}}}"
    form = rng.choice(("{}", boxed, "The result is {}.", f"<answer>{boxed}</answer>"))
    episode.say("user", ask.text)
    episode.assistant(form.format(ask.answer), trained=False)
