"""Rules about the code as a whole: which package may import which, names, docstrings, file sizes.

Every import counts, also one in a function. Imports for the type checker do not have to respect the
packages' order, but may not form a cycle either.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import agentloop
from agentloop import sandbox

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "agentloop" / "environments" / "examples"
OURS = ("agentloop", "bench", "tests", "tools")
BOTTOM = {
    "agentloop.errors",
    "agentloop.aio",
    "agentloop.child_environment",
    "agentloop.token_records",
    "agentloop.trajectory",
    "agentloop.config",
    "agentloop.events",
    "agentloop.distribution",
    "agentloop.plain_json",
    "agentloop.inference.processes.restarts",
}
HEAVY = ("torch", "deepspeed", "transformers", "aiohttp")
# These run inside of the servers, on their own path, and belong to no package of ours.
OVERLAY = "agentloop.inference.cpu.overlay"


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its name; examples are written as a user would."""
    files = [file for package in OURS for file in (ROOT / package).rglob("*.py")]
    return {name_of(file): file for file in files if EXAMPLES not in file.parents}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text("utf-8"))


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def nodes(tree: ast.AST, *, with_types: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if for_types_only(child) and not with_types:
            assert isinstance(child, ast.If)
            for statement in child.orelse:
                yield from nodes(ast.Module([statement], []), with_types=with_types)
        else:
            yield child
            yield from nodes(child, with_types=with_types)


@cache
def imports(name: str, *, with_types: bool = False) -> frozenset[str]:
    """Return what a module imports: modules of ours, others by their full names."""
    file = modules()[name]
    package = name if file.stem == "__init__" else name.rpartition(".")[0]
    imported: set[str] = set()
    for node in nodes(tree(name), with_types=with_types):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")
            base = ".".join(up[: len(up) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            inner = {f"{source}.{alias.name}" for alias in node.names}
            imported |= {
                name_imported if name_imported in modules() else source for name_imported in inner
            }
    return frozenset(imported)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def in_package(*packages: str) -> list[str]:
    return sorted(
        name for name in modules() if within(name, *packages) and not within(name, OVERLAY)
    )


def is_composer(name: str) -> bool:
    """A command, a run and its plan, the runtime or the HTTP application: they may import all."""
    return within(name, "agentloop.cli", "agentloop.launch", "agentloop.training.plan") or name in {
        "agentloop.__main__",
        "agentloop.evaluation.wiring",
        "agentloop.runtime",
        "agentloop.serve",
        "agentloop.serving.app",
        "agentloop.training.run.dashboard",
        "agentloop.training.sft.run",
        "agentloop.training.sft.stage",
        "agentloop.training.wiring",
    }


def ours(name: str) -> set[str]:
    return {module for module in imports(name) if within(module, *OURS)}


# A package's modules, and all that they may import of ours.
MAY_IMPORT = {
    "agentloop.agent": {
        "agentloop.agent",
        "agentloop.inference",
        "agentloop.sandbox",
        *BOTTOM,
    },
    "agentloop.serving": {
        "agentloop.serving",
        "agentloop.agent",
        "agentloop.inference",
        "agentloop.environments",
        "agentloop.sandbox",
        *BOTTOM,
    },
    "agentloop.inference": {"agentloop.inference", "agentloop.models", *BOTTOM},
    "agentloop.environments.tasks": {"agentloop.environments.tasks", "agentloop.agent", *BOTTOM},
    "agentloop.environments.rewards": {
        "agentloop.environments.rewards",
        "agentloop.environments.tasks",
        "agentloop.sandbox",
        *BOTTOM,
    },
    "agentloop.environments": {
        "agentloop.environments",
        "agentloop.agent",
        "agentloop.inference",
        "agentloop.sandbox",
        *BOTTOM,
    },
    "agentloop.rollouts": {
        "agentloop.rollouts",
        "agentloop.environments",
        "agentloop.agent",
        "agentloop.inference",
        "agentloop.sandbox",
        *BOTTOM,
    },
    "agentloop.training": {
        "agentloop.training",
        "agentloop.rollouts",
        "agentloop.environments",
        "agentloop.agent",
        "agentloop.inference",
        "agentloop.models",
        *BOTTOM,
    },
    "agentloop.analysis": {
        "agentloop.analysis",
        "agentloop.training",
        "agentloop.environments.tasks",
        *BOTTOM,
    },
    "agentloop.evaluation": {
        "agentloop.evaluation",
        "agentloop.environments",
        "agentloop.agent",
        "agentloop.inference",
        "agentloop.rollouts",
        "agentloop.training.run.folder",
        *BOTTOM,
    },
    "agentloop.observe": {
        "agentloop.observe",
        "agentloop.inference",
        "agentloop.agent.chat_format",
        "agentloop.agent.sessions.tree",
        "agentloop.agent.text_stream",
        "agentloop.serving.http",
        "agentloop.serving.requests",
        "agentloop.rollouts.record",
        *BOTTOM,
    },
    "agentloop.models": {"agentloop.models", "agentloop.errors", "agentloop.plain_json"},
    "agentloop.errors": set(),
    "agentloop.aio": {"agentloop.errors"},
    "agentloop.plain_json": set(),
    "agentloop.inference.processes.restarts": set(),
    "agentloop.token_records": set(),
    "agentloop.trajectory": {"agentloop.errors", "agentloop.token_records"},
    "agentloop.config": {"agentloop.errors"},
    "agentloop.events": {"agentloop.trajectory", "agentloop.token_records", "agentloop.errors"},
    "agentloop.child_environment": set(),
    "agentloop.sandbox": {"agentloop.sandbox", "agentloop.child_environment"},
    "agentloop.learner": {
        "agentloop.learner",
        "agentloop.models",
        "agentloop.training.weight_sync.checksums",
        "agentloop.training.weight_sync.layout",
        "agentloop.training.learner_client.protocol",
        "agentloop.training.learner_client.settings",
        *BOTTOM,
    },
    "agentloop.training.weight_sync.checksums": {"agentloop.training.weight_sync.layout"},
    "agentloop.training.weight_sync.layout": set(),
    "agentloop.training.learner_client.protocol": {
        "agentloop.training.weight_sync.layout",
        *BOTTOM,
    },
    "agentloop.inference.ranks": set(),
    "agentloop.inference.scheduling": {
        "agentloop.inference.scheduling",
        "agentloop.inference.ranks",
        *BOTTOM,
    },
    "agentloop": {"agentloop"},
    "bench": {"bench", "agentloop"},
    "tools": {"tools", "agentloop"},
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_it_may(package: str) -> None:
    for name in in_package(package):
        may = {"agentloop"} if is_composer(name) else MAY_IMPORT[package]
        wrong = {module for module in ours(name) if not within(module, *may)}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_runtime_never_imports_what_is_for_training() -> None:
    for name in in_package("agentloop"):
        if within(name, "agentloop.learner"):
            continue
        wrong = {
            module
            for module in imports(name)
            if within(module, "torch", "deepspeed", "agentloop.learner")
        }
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_worker_needs_nothing_but_the_standard_library() -> None:
    worker = in_package("agentloop.sandbox.worker")
    assert worker
    for name in worker:
        foreign = {
            module for module in imports(name) if not within(module, "agentloop.sandbox.worker")
        }
        tops = {module.partition(".")[0] for module in foreign}
        assert tops <= sys.stdlib_module_names, name


def test_parts_never_import_a_composer() -> None:
    for name in in_package("agentloop"):
        if not is_composer(name):
            assert not {module for module in ours(name) if is_composer(module)}, name


def test_only_composers_import_observe() -> None:
    for name in in_package("agentloop"):
        if not within(name, "agentloop.observe") and not is_composer(name):
            assert not {module for module in ours(name) if within(module, "agentloop.observe")}, (
                name
            )


@pytest.mark.timeout(60)  # the first test here parses all modules
def test_there_is_no_import_cycle() -> None:
    # The package itself names its public classes for the type checker, and imports them lazily.
    graph = {
        name: {
            imported
            for imported in imports(name, with_types=name != "agentloop")
            if imported in modules() and imported != name
        }
        for name in modules()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for imported in sorted(graph[name]):
                visit(imported, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_rules_see_imports_wherever_they_stand() -> None:
    """A rule that finds nothing holds of anything."""
    assert "agentloop.errors" in imports("agentloop.agent.rollout")
    assert "transformers" in imports("agentloop.agent.tokenizer")  # within a function
    assert "agentloop.cli.console" in imports("agentloop.serve")  # `from agentloop import console`
    assert "agentloop.runtime" not in imports("agentloop")  # for the type checker
    assert is_composer("agentloop.serve")
    assert not is_composer("agentloop.agent.rollout")


def test_importing_the_package_is_light() -> None:
    program = f"import sys, agentloop; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    assert agentloop.__all__ == sorted(agentloop.__all__)
    for name in {*agentloop.__all__} - {"Message"}:  # an alias of a type of the standard library
        assert getattr(agentloop, name).__module__.startswith("agentloop.")
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = agentloop.Nothing


def test_clone_without_symbolic_links_has_all_packages(tmp_path: Path) -> None:
    """Such as one on Windows, or from many an archive."""
    options = ["-c", "core.symlinks=false", "clone", "-q", "--no-local", "--depth=1"]
    clone = tmp_path / "clone"
    cloned = subprocess.run(
        ["git", *options, str(ROOT), str(clone)], capture_output=True, text=True, check=False
    )
    if cloned.returncode:
        pytest.skip("this is not a git repository")
    imports = (
        "import agentloop.sandbox, agentloop.learner.batch, agentloop.environments.examples; "
        "from agentloop.config import is_recipe; assert is_recipe('small'); "
        "print(agentloop.sandbox.__file__)"
    )
    imported = subprocess.run(
        [sys.executable, "-P", "-c", imports],
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.startswith(str(clone))


def test_names_at_the_root() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is not a git repository")
    assert {path.partition("/")[0] for path in listed.stdout.splitlines()} == {
        *(".ci", ".gitignore"),
        *("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"),
        *("agentloop", "bench", "constraints", "docs", "examples", "learner", "sandbox"),
        *("pyproject.toml", "tests", "tools", "tox.ini"),
    }


def test_sandboxs_public_names() -> None:
    assert sandbox.__all__ == [
        "CallError",
        "CallResult",
        "CallStatus",
        "CommandResult",
        "Computer",
        "ComputerLimits",
        "ComputerLost",
        "ComputerShell",
        "LostBy",
        "Overloaded",
        "Pool",
        "PoolSettings",
        "Program",
        "ProgramEnd",
        "ProgramUnsupported",
        "ProtocolError",
        "SandboxError",
        "SandboxUnavailable",
        "Session",
        "SessionLost",
        "Snapshot",
    ]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in in_package("agentloop")
        if not name.endswith("__main__")
        and not within(name, "agentloop.learner")
        and name != "agentloop.sandbox.inspect_provider"  # Inspect itself imports it
    ],
)
def test_names_in_all_exist(name: str) -> None:
    module = importlib.import_module(name)
    for exported in getattr(module, "__all__", []):
        assert hasattr(module, exported), f"{name}.{exported}"


# A docstring is a sentence that begins with a verb or a noun phrase.
FRAGMENT = re.compile(
    r"(it|its|of|what|whether|who|whose|where|when|which|how|that|this|these|those|they|them|"
    r"with|without|from|to|as|for|in|on|at|by|after|before|than|some|such|so|if|but|and|or|not|no|"
    r"none|nobody|nothing|here|there|is|are|was|were|has|have|had|may|might|can|could)\b",
    re.IGNORECASE,
)


def product() -> Iterator[tuple[str, ast.AST]]:
    for name in in_package("agentloop"):
        for node in ast.walk(tree(name)):
            yield name, node


def test_no_class_name_is_used_twice() -> None:
    files: dict[str, set[str]] = {}
    for name, node in product():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            files.setdefault(node.name, set()).add(name)
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    fragments = [
        f"{name}.{node.name}: {text.splitlines()[0]}"
        for name, node in product()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and (text := ast.get_docstring(node))
        and FRAGMENT.match(text)
    ]
    assert fragments == []


MAX_LINES = 600
LONG_FILES: dict[str, str] = {}  # path: the reason why it is longer


def test_no_file_is_longer_than_people_read() -> None:
    long = {
        str(file.relative_to(ROOT))
        for name, file in modules().items()
        if within(name, "agentloop") and file.read_text("utf-8").count("\n") > MAX_LINES
    }
    assert long == set(LONG_FILES)


# Lines of each package. Size is a cost: whoever needs more than is left removes something first.
BUDGET = {
    "agentloop": 60_620,
    "agentloop.sandbox": 13_700,
    "agentloop.learner": 4_560,
    "bench": 9_340,
    "tests": 78_000,
    "tools": 1_230,
}


@pytest.mark.parametrize("package", BUDGET)
def test_packages_keep_within_their_budgets(package: str) -> None:
    inner = [second for second in BUDGET if second.startswith(f"{package}.")]
    num_lines = sum(
        file.read_text("utf-8").count("\n")
        for name, file in modules().items()
        if within(name, package) and not within(name, *inner)
    )
    assert num_lines <= BUDGET[package], (
        f"{package} has {num_lines} lines and a budget of {BUDGET[package]}: remove something "
        "first, such as a second path, a setting that nobody sets, or code that a library has"
    )


MAX_WORDS = 45_000


def test_documents_can_be_read() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    num_words = sum(len((ROOT / name).read_text().split()) for name in listed.stdout.split())
    assert num_words <= MAX_WORDS, f"the documents have {num_words} words: cut some first"


def test_train_has_few_settings() -> None:
    from agentloop.config import describe_settings
    from agentloop.training.plan.settings import TrainSettings

    assert len([*describe_settings(TrainSettings)]) <= 204


def test_top_level_stays_small() -> None:
    """A newcomer reads the architecture off the top level: modules and packages."""
    top = {path.stem for path in (ROOT / "agentloop").iterdir() if path.name[0] not in "_."}
    assert len(top - {"py"}) <= 25, sorted(top)
