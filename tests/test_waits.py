"""Every wait has a deadline, or says why it has none. `python -m tests.test_waits` lists them.

What counts as a wait: where a task may stand still until somebody else does something, as far as
that can be told from the source:

    await X.wait()  .acquire()  .receive()  .send()  .get()  .read()  .write()  ...  (WAITS)
    await anext(X)  async for ... in X  sleep_forever()
    async with LOCK  (what the module makes by Lock, Semaphore, CapacityLimiter, Condition)
    with CancelScope(shield=True)  (whatever is in it: no deadline from outside gets there)

It has a deadline if it stands, within its function, in `fail_after` or `move_on_after`, or is told
a `timeout`. Else a comment, in its lines or right above, says `# no deadline: REASON`.

Not covered: functions of ours, for what they wait for is looked at there; task groups, which wait
for tasks of ours; threads, which read files; requests by aiohttp, httpx and aiodocker, whose
clients or calls are told a timeout.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("agentloop",)
WAITS = {
    *("wait", "acquire", "acquire_on_behalf_of", "accept", "anext", "sleep_forever"),
    *("receive", "receive_until", "receive_exactly", "send", "send_bytes"),
    *("read", "readany", "readline", "write", "write_in", "read_out", "drain"),
}
LOCKS = {"Lock", "Semaphore", "CapacityLimiter", "Condition"}
DEADLINES = {"fail_after", "move_on_after"}
REASON = re.compile(r"#.*\bno deadline( here)?: *(?P<reason>\S.*)")


@dataclass(frozen=True)
class Wait:
    place: str
    line: int
    source: str
    bound: str | None
    """What ends it at last: a deadline, or the reason why it needs none. None: nothing is said."""

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.source}  <- {self.bound or 'NOTHING'}"


def name_of(call: ast.AST) -> str:
    """`fail_after` of `anyio.fail_after(1)`."""
    function = call.func if isinstance(call, ast.Call) else call
    return str(getattr(function, "attr", None) or getattr(function, "id", ""))


def is_wait(call: ast.Call) -> bool:
    is_of_queue = name_of(call) == "get" and not call.args and not call.keywords
    return name_of(call) in WAITS or is_of_queue


def is_shield(call: ast.AST) -> bool:
    """Of a bare scope: `move_on_after(1, shield=True)` has a deadline of its own."""
    return (
        isinstance(call, ast.Call)
        and name_of(call) == "CancelScope"
        and any(keyword.arg == "shield" for keyword in call.keywords)
    )


def made_locks(tree: ast.AST) -> set[str]:
    """Names that are bound to a lock, anywhere in the module."""
    locks = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and name_of(node.value or node) in LOCKS:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            locks |= {name_of(target) for target in targets}
    return locks


class Finder:
    """The waits of one file."""

    def __init__(self, source: str, place: str) -> None:
        self._place = place
        self._tree = ast.parse(source)
        self._locks = made_locks(self._tree)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        self._reasons = {
            token.start[0]: match["reason"]
            for token in tokens
            if token.type == tokenize.COMMENT and (match := REASON.search(token.string))
        }

    def waits(self) -> list[Wait]:
        return sorted(self._in(self._tree, None), key=lambda wait: wait.line)

    def _in(self, node: ast.AST, deadline: str | None) -> Iterator[Wait]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                deadline = None  # who calls it, and when, is not said here
            case ast.With(items=items, body=body):
                yield from self._in_with(items, body, deadline)
                return
            case ast.Await(value=ast.Call() as call) if is_wait(call):
                timeouts = [ast.unparse(k) for k in call.keywords if "timeout" in (k.arg or "")]
                yield self._wait(node, f"await {ast.unparse(call)}", *timeouts, deadline)
            case (
                ast.AsyncFor(target=target, iter=source)
                | ast.comprehension(is_async=1, target=target, iter=source)
            ):
                loop = f"async for {ast.unparse(target)} in {ast.unparse(source)}"
                yield self._wait(source, loop, deadline)
            case ast.AsyncWith(items=items):
                for context in (item.context_expr for item in items):
                    if name_of(context) in self._locks or any(map(self._makes, ast.walk(context))):
                        yield self._wait(context, f"async with {ast.unparse(context)}", deadline)
        for child in ast.iter_child_nodes(node):
            yield from self._in(child, deadline)

    def _in_with(
        self, items: list[ast.withitem], body: list[ast.stmt], deadline: str | None
    ) -> Iterator[Wait]:
        shield = None
        for item in items:
            yield from self._in(item, deadline)
            if is_shield(item.context_expr):
                shield, deadline = item.context_expr, None
            elif name_of(item.context_expr) in DEADLINES:
                deadline = ast.unparse(item.context_expr)
        if shield is not None:
            yield self._wait(shield, f"with {ast.unparse(shield)}", deadline)
        for child in body:
            yield from self._in(child, deadline)

    @staticmethod
    def _makes(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and name_of(node) in LOCKS

    def _wait(self, node: ast.expr, source: str, *bounds: str | None) -> Wait:
        lines = range(node.lineno - 1, (node.end_lineno or node.lineno) + 1)
        reasons = (self._reasons.get(line) for line in lines)
        bound = next((candidate for candidate in (*bounds, *reasons) if candidate), None)
        return Wait(self._place, node.lineno, source, bound)


@functools.cache
def all_waits() -> list[Wait]:
    files = (
        file
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if "examples" not in file.parts
    )
    return [
        wait
        for file in files
        for wait in Finder(file.read_text("utf-8"), str(file.relative_to(ROOT))).waits()
    ]


def test_every_wait_has_a_deadline_or_a_reason_why_not() -> None:
    without = [str(wait) for wait in all_waits() if wait.bound is None]
    assert not without, "\n".join(["write `# no deadline: REASON` beside:", *without])


SOURCE = """
class A:
    def __init__(self):
        self._lock = anyio.Lock()

    async def f(self):
        with anyio.fail_after(1), other:
            await self.event.wait()
            async def g():
                await self.event.wait()  # 10: its caller's deadline is not seen to be
        await self.event.wait()  # 11
        await self.event.wait()  # no deadline: it is made up
        # no deadline here: as above
        await self.event.wait()
        await process.wait(timeout_s=3)
        async with self._lock, anyio.create_task_group():  # 16
            async for one in stream:  # 17
                pass
        async with self._locks.setdefault(1, anyio.Lock()):  # 19
            await anext(stream)  # 20
        with anyio.move_on_after(await other.receive()):  # 21
            pass
        await self.ours()
        await anyio.sleep(1)
        await self.event.wait()  # no deadline
        with anyio.move_on_after(9):
            with anyio.CancelScope(shield=True):  # 27: the nine seconds do not reach in
                await process.wait()  # 28
            with anyio.CancelScope(shield=True), anyio.move_on_after(5):
                await process.wait()
        with anyio.CancelScope(shield=True):  # no deadline: it is short
            await self.ours(await http.get(url))
        return [await queue.get() async for one in stream]  # 33: both
"""


def test_rule_finds_what_it_should() -> None:
    """A rule that finds nothing holds of anything."""
    waits = Finder(SOURCE, "x.py").waits()
    without = [wait.line for wait in waits if not wait.bound]
    assert without == [10, 11, 16, 17, 19, 20, 21, 25, 27, 28, 33, 33]
    assert [(wait.line, wait.bound) for wait in waits if wait.bound] == [
        (8, "anyio.fail_after(1)"),
        (12, "it is made up"),
        (14, "as above"),
        (15, "timeout_s=3"),
        (29, "anyio.move_on_after(5)"),
        (30, "anyio.move_on_after(5)"),
        (31, "it is short"),
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_there_are_waits_of_all_kinds(package: str) -> None:
    sources = [wait.source for wait in all_waits() if wait.place.startswith(package)]
    for kind in (r"await .*\.wait\(", "async for", "async with"):
        assert any(re.match(kind, source) for source in sources), kind


if __name__ == "__main__":
    sys.stdout.writelines(f"{wait}\n" for wait in all_waits())
