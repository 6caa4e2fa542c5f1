"""Show what a command is doing: in lines, or in a panel on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Self

from agentloop.training.run.status import RunStatus, clock

if TYPE_CHECKING:
    from rich.console import RenderableType


class ProgressLine:
    """Progress lines on stderr; on a terminal with a spinner, a clock and a status panel.

    Use it as a context manager and call it with the current activity; `stop()` ends it early.

    Attributes:
        line: the current activity.
        status: the status last shown, if any.
    """

    def __init__(self, title: str, *, after_s: float = 0.0) -> None:
        """
        Args:
            title: the initial activity.
            after_s: print nothing for this many seconds, for work that may be over soon; without
                a terminal the pauses between lines then double. `say` always prints at once.
        """
        from rich.console import Console
        from rich.live import Live

        self.line = title
        self.status: RunStatus | None = None
        self._begun = time.monotonic()
        self._after_s, self._over = after_s, threading.Event()
        self._console = Console(stderr=True)
        self._plain = not self._console.is_terminal
        self._live = Live(
            get_renderable=self._picture, console=self._console, transient=True, auto_refresh=True
        )

    def __enter__(self) -> Self:
        if not self._plain:
            self._live.start()
        elif self._after_s:
            threading.Thread(target=self._print_occasionally, daemon=True).start()
        else:
            print(self.line, file=sys.stderr, flush=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __call__(self, line: str) -> None:
        if self._plain and not self._after_s and line != self.line:
            print(line, file=sys.stderr, flush=True)
        self.line = line

    def say(self, line: str) -> None:
        """Print a line that stays on the screen."""
        if self._plain:
            print(line, file=sys.stderr, flush=True)
        else:
            self._console.print(line, highlight=False, markup=False)

    def show(self, status: RunStatus) -> None:
        """Show this status in the panel until the next call. Has no effect without a terminal."""
        self.status = status

    def refresh(self) -> None:
        """Redraw now instead of at the next tick."""
        self._live.refresh()

    def stop(self) -> None:
        self._over.set()
        if not self._plain:
            self._live.stop()

    def _print_occasionally(self) -> None:
        printed, wait_s = "", self._after_s
        while not self._over.wait(wait_s):
            if self.line != printed:
                printed = self.line
                print(printed, file=sys.stderr, flush=True)
            wait_s *= 2

    def _picture(self) -> RenderableType:
        from rich.console import Group
        from rich.spinner import Spinner
        from rich.text import Text

        elapsed_s = time.monotonic() - self._begun
        if elapsed_s < self._after_s:
            return Text()
        elapsed = clock(elapsed_s)
        if self.status is None:
            return Spinner("dots", Text(f"{self.line}  {elapsed}"))
        spinner = Spinner("dots", Text(f"{self.status.waits}  {elapsed}"))
        return Group(_panel(self.status), spinner)


def _panel(status: RunStatus) -> RenderableType:
    from rich.columns import Columns
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = Table.grid(padding=(0, 1))
    remaining = "" if status.left_s is None else f"about {clock(status.left_s)} left"
    if status.num_steps:  # not before the first stage
        bar.add_row(
            f"{status.unit} {status.step} of {status.num_steps}",
            ProgressBar(total=status.num_steps, completed=status.step, width=30),
            remaining,
        )
    values = [
        Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in status.values.items()
    ]
    content = Group(bar, Columns(values, padding=(0, 3))) if values else bar
    return Panel(content, title=status.stage, title_align="left", expand=False)
