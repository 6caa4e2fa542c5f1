"""Visitors' questions: started, refused, limited, and continued when the visitor leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from agentloop.errors import RequestError, ServerError, ServerUnavailable
from agentloop.events import Emit, Event, RolloutStarted, TurnStarted
from agentloop.observe import ask as ask_module
from agentloop.observe.ask import Ask, asking
from agentloop.trajectory import Trajectory
from tests.patience import patient
from tests.support import eventually


class Played:
    """A fake rollout whose start and end are controlled by the test."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.events: list[Event] = []
        self.num_running = 0
        self.may_begin, self.may_end = anyio.Event(), anyio.Event()
        self.before: Exception | None = None
        self.after: Exception | None = None

    async def __call__(self, question: str, emit: Emit) -> None:
        self.questions.append(question)
        self.num_running += 1
        try:
            await self.may_begin.wait()
            if self.before is not None:
                raise self.before
            key = f"r{len(self.questions)}"
            emit(RolloutStarted(Trajectory(key, [])))
            emit(TurnStarted(key, 0))
            await self.may_end.wait()
            if self.after is not None:
                raise self.after
        finally:
            self.num_running -= 1


def play_asks(*, begins: bool = True) -> Played:
    made = Played()
    if begins:
        made.may_begin.set()
    return made


async def test_asking_returns_the_id_of_the_rollout() -> None:
    rollout = play_asks()
    with anyio.fail_after(patient(15)):
        async with asking(rollout, rollout.events.append) as ask:
            assert await ask("why?") == "r1"
            assert rollout.questions == ["why?"]
            assert rollout.num_running == 1  # it goes on
            assert [type(event) for event in rollout.events] == [RolloutStarted, TurnStarted]
    assert rollout.num_running == 0  # who leaves the house takes all with it


@pytest.mark.parametrize("error", [RequestError("too long"), ServerError("none is up")])
async def test_error_before_the_start_is_raised_to_the_visitor_only(error: Exception) -> None:
    rollout = play_asks()
    rollout.before = error
    async with asking(rollout, rollout.events.append) as ask:
        for _ in range(100):  # none of them is counted as open
            with pytest.raises(type(error), match=str(error)):
                await ask("why?")
        rollout.before = None
        assert await ask("why?") == "r101"


async def test_error_after_the_start_is_contained() -> None:
    rollout = play_asks()
    rollout.after = ServerUnavailable("gone")
    rollout.may_end.set()
    async with asking(rollout, rollout.events.append) as ask:
        assert await ask("why?") == "r1"
        await eventually(lambda: rollout.num_running == 0)
        assert await ask("why?") == "r2"


async def test_programming_error_is_raised_unchanged() -> None:
    rollout = play_asks()
    rollout.after = ZeroDivisionError()
    rollout.may_end.set()

    async def house() -> None:
        async with asking(rollout, rollout.events.append) as ask:
            await ask("why?")
            await anyio.sleep_forever()

    with pytest.raises(ZeroDivisionError):
        await house()


@pytest.mark.parametrize("at_once", [True, False])
async def test_open_questions_are_bounded(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    monkeypatch.setattr(ask_module, "_MAX_OPEN", 3)
    rollout = play_asks()
    keys: list[str] = []
    refused: list[RequestError] = []

    async def ask_once(ask: Ask) -> None:
        try:
            keys.append(await ask("why?"))
        except RequestError as error:
            refused.append(error)

    async with asking(rollout, rollout.events.append) as ask:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                if at_once:
                    tasks.start_soon(ask_once, ask)
                else:
                    await ask_once(ask)
        assert (len(keys), len(refused)) == (3, 2)
        assert "3 questions are being answered" in str(refused[0])
        rollout.may_end.set()
        await eventually(lambda: rollout.num_running == 0)
        assert await ask("why?")


async def cancel_when(asks: Callable[[], Awaitable[Any]], until: Callable[[], bool]) -> None:
    async def do() -> None:
        await asks()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(do)
        await eventually(until)
        tasks.cancel_scope.cancel()


async def test_leaving_visitor_cancels_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_module, "_MAX_OPEN", 1)
    rollout = play_asks(begins=False)
    async with asking(rollout, rollout.events.append) as ask:
        for number in range(1, 4):
            await cancel_when(lambda: ask("why?"), lambda: len(rollout.questions) == number)  # noqa: B023
            assert rollout.num_running == 0
        with anyio.CancelScope() as scope:  # before anything of it has run
            scope.cancel()
            await ask("why?")
        rollout.may_begin.set()
        assert await ask("why?")


async def test_visitor_who_leaves_after_the_start_leaves_it_running() -> None:
    rollout = play_asks()
    async with asking(rollout, rollout.events.append) as ask:

        async def visitor() -> None:
            await ask("why?")
            await anyio.sleep_forever()

        await cancel_when(visitor, lambda: bool(rollout.events))
        assert rollout.num_running == 1


async def test_late_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask_module, "_START_S", 0.02)
    monkeypatch.setattr(ask_module, "_MAX_OPEN", 1)
    rollout = play_asks(begins=False)
    async with asking(rollout, rollout.events.append) as ask:
        for _ in range(2):
            with pytest.raises(RequestError, match=r"did not start within 0\.02 s"):
                await ask("why?")
    assert rollout.num_running == 0
