"""`agentloop data check`: what a run would make of a file or data set, and what is wrong with it.

rows ──read_tasks──> tasks ──> counts, duplicates, conflicts; prompts; answers, scored ──> report
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.named_tools import imported_tools, resolved_tools
from agentloop.agent.threads import in_command_thread
from agentloop.agent.tools import Tools
from agentloop.cli import console
from agentloop.config import is_recipe, load_settings
from agentloop.environments.rewards.references import bad_references
from agentloop.environments.tasks.rows import find_conflicts, read_tasks
from agentloop.environments.tasks.task import Task, problem_of
from agentloop.errors import RequestError, SettingsError
from agentloop.evaluation.wiring import EvaluateSettings
from agentloop.launch.settings import AskSettings
from agentloop.models import SMALL
from agentloop.sandbox import Pool
from agentloop.training.sft.run import model_folder
from agentloop.trajectory import Message

_NUM_PROMPTS = 3
_NUM_NAMED = 10  # problems of a kind that the text shows


@dataclass(slots=True)
class DataReport:
    """The findings.

    Attributes:
        num_rows: rows that were read.
        num_tasks: tasks that a run has: rows without exact copies.
        num_problems: different problems among them.
        sources: tasks by source.
        prompt_tokens: smallest, median and largest number of tokens of a prompt.
        answer_chars: the same of characters of an answer.
        prompts: rendered prompts of the first tasks.
        answers: the answers to these.
        problems: descriptions of wrong rows, with file and line.
    """

    num_rows: int
    num_tasks: int
    num_problems: int
    sources: dict[str, int]
    prompt_tokens: list[int] = field(default_factory=list)
    answer_chars: list[int] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Return the findings as data for JSON."""
        return asdict(self)

    def text(self) -> str:
        """Return the findings for people."""
        lines = [
            f"rows       {self.num_rows:,}",
            f"tasks      {self.num_tasks:,} ({self.num_rows - self.num_tasks:,} equal others in "
            "all fields)",
            f"problems   {self.num_problems:,}",
            "sources    " + ", ".join(f"{name} {count:,}" for name, count in self.sources.items()),
            f"prompts    {_spread(self.prompt_tokens, 'tokens')}",
            f"answers    {_spread(self.answer_chars, 'characters')}",
        ]
        for number, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True), 1):
            lines += ["", f"--- prompt {number}", prompt, f"--- its answer: {answer}"]
        lines.append("")
        lines += [f"wrong: {problem}" for problem in self.problems[:_NUM_NAMED]]
        if len(self.problems) > _NUM_NAMED:
            lines.append(f"wrong: {len(self.problems) - _NUM_NAMED:,} more (--json shows all)")
        if not self.problems:
            lines.append("Nothing is wrong: the reward function accepts each row's own answer.")
        return "\n".join(lines)


def _spread(values: Sequence[int], unit: str) -> str:
    smallest, median, largest = values
    return f"{smallest:,} to {largest:,} {unit}, median {median:,}"


async def check_data(data: str, overrides: Sequence[str]) -> DataReport:
    """Read all rows, render prompts, and score each row's own answer.

    Args:
        data: a file, the name or folder of a Hugging Face data set, or a recipe that names one.
        overrides: settings of the run, as key=value.

    Raises:
        DataError: the rows cannot be read as tasks; the message names the line and field.
        SettingsError: a setting is invalid, or the reward function cannot be called or failed.
    """
    files, overrides = console.split_settings(overrides)
    if files:
        raise SettingsError(f"{files[0]}: expected a setting as key=value")
    if is_recipe(data):
        settings: AskSettings = load_settings(EvaluateSettings, [data], overrides)
    else:
        settings = load_settings(AskSettings, [], [*_source_of(data), *overrides])
    rows = await in_command_thread(lambda: [*read_tasks(settings.tasks)])
    tasks = [*{task.id: task for task in rows}.values()]
    sources: dict[str, int] = {}
    for task in tasks:
        sources[task.source] = sources.get(task.source, 0) + 1
    report = DataReport(len(rows), len(tasks), len({*map(problem_of, tasks)}), sources)
    report.problems += [
        f"{second.source_line}: the answer is {second.answer!r}, but {first.answer!r} in "
        f"{first.source_line}, and the problem is the same"
        for first, second in find_conflicts(tasks, env=settings.env.name)
    ]
    await in_command_thread(_render, report, tasks, settings)
    report.problems += map(str, await bad_references(settings.reward, tasks))
    return report


def _source_of(data: str) -> list[str]:
    path = Path(data)
    looks_like_a_file = path.suffix in (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt")
    if path.is_file() or looks_like_a_file:
        kind = "parquet" if path.suffix == ".parquet" else "jsonl"
        return [f"tasks.kind={kind}", f"tasks.paths={json.dumps([data], ensure_ascii=False)}"]
    return ["tasks.kind=huggingface", f"tasks.name={json.dumps(data, ensure_ascii=False)}"]


def _render(report: DataReport, tasks: Sequence[Task], settings: AskSettings) -> None:
    chat = ChatFormat.load(model_folder(settings.model or SMALL), settings.chat)
    try:
        tools = resolved_tools(
            [name for name in settings.tools if not name.startswith("mcp:")],
            pool=Pool(settings.sandbox),  # which is not opened: no tool is called
            servers={},
            functions=imported_tools(settings.tools),
            timeout_s=settings.tool_timeout_s,
            tool_format=settings.tool_format,
        )
    except RequestError as error:
        raise SettingsError(str(error)) from error
    schemas = Tools(tools).schemas
    lengths = []
    for number, task in enumerate(tasks):
        try:
            ids = chat.prompt(_messages(task), schemas)
        except RequestError as error:
            report.problems.append(f"{task.source_line}: {error}")
            continue
        lengths.append(len(ids))
        if number < _NUM_PROMPTS:
            report.prompts.append(chat.decode(ids))
            report.answers.append(task.answer)
    report.prompt_tokens = _summary(lengths or [0])
    report.answer_chars = _summary([len(task.answer) for task in tasks])


def _messages(task: Task) -> Sequence[Message]:
    prompt = task.prompt
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _summary(values: Sequence[int]) -> list[int]:
    return [min(values), statistics.median_low(values), max(values)]
