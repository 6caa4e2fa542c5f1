"""What the documents promise is there: the commands, the links, the settings."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from agentloop.config import describe_settings
from agentloop.evaluation.wiring import EvaluateSettings
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.sft.run import SftSettings
from tools import layout

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = ("agentloop",)
# Python's own words in all but their beginning, or no message.
OF_OTHERS = {
    "No module named 'pytest'",
    "agentloop env init",
    "[error] ZeroDivisionError: division by zero",
    "learner.micro_batch_tokens: ...",
    "my_reward:right_and_short: task ...: AttributeError: ... (my_reward.py:9) (2 tries)",
    "reward.function: ModuleNotFoundError: No module named 'my_reward'",
}
SETTINGS = {
    key: description
    for command in (TrainSettings, SftSettings, EvaluateSettings)
    for key, _, description in describe_settings(command)
}


def test_ci_runs_the_readmes_test_command() -> None:
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.M)
    serve, test = commands
    assert serve.endswith("tox run -e serve")
    assert test in (ROOT / ".ci/run").read_text().splitlines()


# The README's commands that tests/integration/test_quickstarts.py runs, by a part of each.
README = (
    "train laptop --dry-run", "runs list", "runs view runs/latest --export", "runs plot",
    "evaluate", "serve --list-settings",
)  # fmt: skip
# The others, by their beginnings: where they are run, or what they need that a test has not.
ELSEWHERE = {
    "python3 -m venv .venv": ".ci/run; `tox run -e serve` differs by its last command",
    ".venv/bin/tox run -e demo": "minutes; tests/integration/test_train.py trains less",
    "pip install '.[train]'": "tox.ini, integration",
    "agentloop train laptop ": "minutes; tests/integration/test_train.py trains less",
    "agentloop train --resume": "tests/integration/test_train.py",
    "agentloop chat --run": "tests/integration/test_train.py",
    "agentloop runs export": "tests/integration/test_export.py",
    "agentloop runs view --sample": "tests/integration/test_page.py; ends with Ctrl-C",
    "agentloop runs view runs/latest ": "tests/integration/test_page.py; ends with Ctrl-C",
    "agentloop runs entropy": "tests/integration/test_analyze.py",
    "agentloop serve model=": "a GPU and the hub",
    "agentloop serve 'servers=": "another machine",
    "agentloop serve my.toml": "tests/integration/test_serve.py; ends with Ctrl-C",
    "agentloop chat --url": "a terminal",
}


def test_readme_commands_are_run_or_explained() -> None:
    text = (ROOT / "README.md").read_text("utf-8") + (ROOT / "docs/README.md").read_text("utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    commands = "".join(blocks).splitlines()
    unknown = [
        command
        for command in commands
        if not any(part in command for part in README) and not command.startswith(tuple(ELSEWHERE))
    ]
    assert commands
    assert unknown == []
    stale = [part for part in (*README, *ELSEWHERE) if part not in text]
    assert stale == []
    named = re.findall(r"tests/[\w/]+\.py", " ".join(ELSEWHERE.values()))
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text_of(document))
    assert [link for link, _ in links if not (document.parent / link).exists()] == []
    to = {(document.parent / link if link else document, anchor) for link, anchor in links}
    pages = [(page, anchor) for page, anchor in to if anchor and page.suffix == ".md"]
    assert [(page.name, anchor) for page, anchor in pages if anchor not in anchors(page)] == []


def text_of(document: Path) -> str:
    """Return a document without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text("utf-8"), flags=re.M | re.S)


@cache
def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", text_of(document), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_that_are_named_exist(document: Path) -> None:
    sections = {key.rpartition(".")[0] for key in SETTINGS}
    first = "|".join({key.split(".")[0] for key in sections if key})
    # Arguments of an environment or a rule of credit assignment, `env.args.x`, are their own, as is
    # what DeepSpeed is configured with.
    args = {key for key in SETTINGS if key.endswith((".args", ".deepspeed"))}
    named = re.findall(rf"`((?:{first})(?:\.[a-z]\w*)+)(?: ?=[^`]*)?`", document.read_text())
    settings, files = SETTINGS.keys() | sections, (".py", ".md", ".toml", ".jsonl")
    unknown = [key for key in named if key not in settings and not key.endswith(files)]
    assert [key for key in unknown if key.rpartition(".")[0] not in args] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_modules_that_are_named_exist(document: Path) -> None:
    named = re.findall(
        r"python -m ((?:agentloop|sandbox|learner|bench)[\w.]*)", document.read_text()
    )
    paths = [ROOT.joinpath(*name.rstrip(".").split(".")) for name in named]
    missing = [
        str(path.relative_to(ROOT))
        for path in paths
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())
    ]
    assert missing == []


def test_every_setting_says_what_it_means() -> None:
    assert [key for key, description in SETTINGS.items() if not description] == []


def test_index_lists_every_document() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text("utf-8")
    documents = [path for path in docs.rglob("*.md") if path.parent.name != "recipes"]
    names = [str(path.relative_to(docs)) for path in documents if path.name != "README.md"]
    assert [name for name in names if f"({name})" not in index] == []


@cache
def texts_of_the_code() -> str:
    """Return the fixed parts of the texts in the code, one per line."""
    strings = {
        " ".join(piece.split())
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for piece in node.value.split("%s")
    }
    return "\n".join(strings)


def is_in_the_code(quote: str) -> bool:
    """Return whether a fixed part of a message is: what stands between names and numbers."""
    code = texts_of_the_code()
    words = quote.split()
    runs = (" ".join(words[at : at + 4]) for at in range(len(words) - 3))
    pieces = (piece for piece in code.splitlines() if len(piece) >= 10 and " " in piece)
    return any(run in code for run in runs) or any(piece in quote for piece in pieces)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_messages_that_are_quoted_are_in_the_code(document: Path) -> None:
    head = "message|you see|what is raised, or what the model reads"
    tables = re.findall(rf"^\| (?:{head}) \|.*\n((?:\|.*\n)+)", text_of(document), re.M)
    cells = re.findall(r"^\| (.*?) \|", "".join(tables), re.M)
    quotes = [quote for cell in cells for quote in re.findall(r"`([^`]*)`", cell) if " " in quote]
    assert [quote for quote in quotes if quote not in OF_OTHERS and not is_in_the_code(quote)] == []


def test_message_that_the_code_does_not_have_is_noticed() -> None:
    assert is_in_the_code("serve.port: cannot listen on 127.0.0.1:8000: ...")
    assert not is_in_the_code("serve.port: unable to listen at 127.0.0.1:8000: ...")


def test_layout_is_up_to_date() -> None:
    text = layout.PATH.read_text("utf-8")
    assert text == layout.with_layout(text), "run `python -m tools.layout`"


def test_modules_that_the_architecture_names_exist() -> None:
    text = layout.PATH.read_text("utf-8")
    named = set(re.findall(r"[\w/]+\.py\b", re.sub(r"\]\(.*?\)|cli/NAME", "", text)))
    tops = (*FOLDERS, "tests", "tools")
    paths = [str(path) for top in tops for path in (ROOT / top).rglob("*.py")]
    assert len(named) > 40
    assert [name for name in named if not any(p.endswith(f"/{name}") for p in paths)] == []
