"""Prepare a zygote: work that is done once, so that no child has to do it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import linecache
import os
import sys
from collections.abc import Iterator

from agentloop.sandbox.worker.child import NAME, finish_variables, fork_hooks, open_output, run_cell
from agentloop.sandbox.worker.kernel import libc

# Typical first calls: they fill the caches that would otherwise be cold in every child.
WARM_UP = {
    "numpy": """
import numpy as np
a = np.arange(12.0).reshape(3, 4)
(a @ a.T).sum(); np.linalg.solve(np.eye(3) * 2, np.ones(3)); np.linalg.eigvals(np.eye(2))
repr(np.array([1.5, 2.5])); np.random.default_rng(0).normal(size=3); np.sort(a.ravel())
""",
    "sympy": """
import sympy as sp
x, y = sp.symbols("x y")
sp.solve(x**2 - 5 * x + 6, x); sp.solve([x + y - 3, x - y - 1], [x, y])
str(sp.factor(x**2 - 1)); str(sp.expand((x + 1) ** 3)); sp.simplify(sp.sin(x) ** 2 + sp.cos(x) ** 2)
sp.integrate(x**2, (x, 0, 1)); sp.diff(sp.exp(x) * x, x); sp.limit(sp.sin(x) / x, x, 0)
sp.factorint(5040); sp.isprime(97); sp.sqrt(8); sp.Rational(3, 4) + 1; str(sp.N(sp.pi, 20))
sp.Matrix([[1, 2], [3, 4]]).det(); sp.latex(x / 2); sp.sympify("2*x + 1"); sp.solve(x**3 - 1, x)
""",
    "scipy": """
import scipy.optimize, scipy.integrate, scipy.stats, scipy.linalg
scipy.optimize.brentq(lambda t: t * t - 2, 0, 2); scipy.integrate.quad(lambda t: t * t, 0, 1)
""",
}

# What nearly every program does, in the interpreter's own terms.
REHEARSAL = (
    "import sys, math\ndef f(n):\n    return n * 2\nprint(1, f(2), sep=' ')",
    "x = {'a': [i for i in (1, 2)]}\nx['a']",
    "raise ValueError('no')",
    "1 +",
)
MADV_COLLAPSE = 25
MAX_FILLERS = 20_000  # per size
REHEARSALS = 40  # enough for the interpreter to specialise what it runs


def load(modules: list[str]) -> None:
    """Import the modules and use them once. What is missing is left out."""
    with _fork_hooks_kept():
        # Touched by nearly every child.
        import atexit  # noqa: F401
        import random  # noqa: F401
        import threading  # noqa: F401

        for module in modules:
            scope: dict[str, object] = {}
            with contextlib.suppress(ImportError):
                exec(WARM_UP.get(module, f"import {module}"), scope)


@contextlib.contextmanager
def _fork_hooks_kept() -> Iterator[None]:
    """Record the modules' fork hooks for the forks of calls. Our own forks have one thread and need
    none of them, but would pay for them in every child."""
    register = os.register_at_fork
    os.register_at_fork = lambda **hooks: fork_hooks.append(hooks)
    try:
        yield
    finally:
        os.register_at_fork = register


def rehearse() -> None:
    """Run the path of a call often enough that nothing on it is specialised in a child."""
    out, err = sys.stdout, sys.stderr
    with open(os.devnull, "wb") as null:
        sys.stdout = sys.stderr = open_output(null.fileno())
        try:
            for _ in range(REHEARSALS):
                for code in REHEARSAL:
                    variables: dict[str, object] = {}
                    run_cell(code, variables, NAME)
                    finish_variables(variables, code)
        finally:
            sys.stdout, sys.stderr = out, err
            linecache.clearcache()


def freeze() -> None:
    """Keep collections, and since CPython 3.12 reference counts, from writing to old objects."""
    gc.collect()
    never = ctypes.c_uint32.from_address(id(None)).value
    if never >= 1 << 31:  # None is immortal
        _make_immortal(never)
    gc.disable()
    _fill_holes()
    _collapse_heap()
    gc.freeze()  # last: what lies in a young generation makes a child collect at once


def _make_immortal(count: int) -> None:
    """Give all objects the reference count that None has (PEP 683): it is never changed."""
    addresses: set[int] = set()
    todo = gc.get_objects()
    spared = {id(todo), id(addresses), id(sys._getframe())}
    while todo:
        current = todo.pop()
        if id(current) not in addresses and id(current) not in spared:
            addresses.add(id(current))
            todo.extend(gc.get_referents(current))
    del current
    for address in addresses:
        field = ctypes.c_uint32.from_address(address)
        if field.value != count:  # a write would copy a page that is shared with another zygote
            field.value = count


_kept: object = None


def _fill_holes() -> None:
    """Take the free pieces of the heap, largest first, so that what a child allocates lies side by
    side on new pages instead of on many old ones, each of which would have to be copied."""
    global _kept
    highest = 0
    for size in (*(1 << n for n in range(17, 10, -1)), *range(1024, 0, -16)):
        for _ in range(MAX_FILLERS):
            _kept = (_kept, bytes(size))
            address = id(_kept[1])
            if address > highest:  # from the end of the heap: no hole was left
                highest = address
                break


_collapsed = 0  # up to this address, by the zygote that this one builds on, which shares it


def _collapse_heap() -> None:
    """Move the heap into huge pages (madvise(2), MADV_COLLAPSE, Linux 6.1): a fork copies one entry
    instead of 512, and what a child splits again is still copied and freed in batches."""
    global _collapsed
    huge = 2 << 20
    with open("/proc/self/maps") as maps:
        line = next((line for line in maps if line.endswith("[heap]\n")), None)
    if line is None:
        return
    first = int(line.partition("-")[0], 16)
    start, end = max(-(-first // huge) * huge, _collapsed), id(_kept) // huge * huge
    _collapsed = end
    if end > start:  # refused by an older kernel, or without memory: a pity, no more
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)
