"""The reward of a rollout: its answer, compared with the task's.

    trajectory ──last turn──> answer ──the same number? ──> 1 or 0
                                 ├──a puzzle: its own scorer, in the sandbox──────> 1 or 0
                                 └──else: math-verify, in a process that can be killed──> 1 or 0

A rollout that infrastructure broke has no reward: its value is None. It is never 0, which would
teach the model that it was wrong. An answer that makes its own check hang or crash is wrong, or a
model could learn to take back bad rollouts that way: see `_ask_math_verify`, and puzzles.py for
puzzles. For the same reason a rollout that ran out of time is scored if its own tool calls took the
time.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Self, SupportsFloat, TypeVar

import anyio
import anyio.to_thread
import pydantic

from agentloop.environments.rewards.answers import final_answer
from agentloop.environments.rewards.math_check import TOLERANCE, same_number
from agentloop.environments.rewards.process_pool import CallFailed, CallTimedOut, ProcessPool
from agentloop.environments.rewards.puzzles import is_solved
from agentloop.environments.rewards.user_function import ask
from agentloop.environments.tasks.sources import Task
from agentloop.environments.tasks.task import describe
from agentloop.errors import AgentLoopError, RewardError, SettingsError, summary_of
from agentloop.sandbox import Pool
from agentloop.trajectory import StopReason, Trajectory

__all__ = [
    "Grader",
    "Reward",
    "RewardFunction",
    "RewardSettings",
    "finite_number",
    "plain_reward",
    "said_in",
]

_IS_EQUAL = "agentloop.environments.rewards.math_check:is_equal"
_USER_FUNCTION = "agentloop.environments.rewards.user_function"
_MAX_ANSWER_CHARS = 4000
_LARGEST = 1e30
_ROUNDING = 1e-12


def finite_number(value: object, name: str) -> float:
    """Return a number that comes from outside, such as a reward, as a float.

    One of less than 1e-12 is 0: what rounding leaves of a sum must not make a rollout a right one.

    Args:
        value: a number of any type, such as numpy's; True is 1.
        name: the name of the value, for the error.

    Raises:
        ValueError: it is no number, is not finite, or its magnitude is above 1e30. Up to there, it
            is finite in float32 as well, and so are sums of squares in float64.
    """
    try:
        number = math.nan
        if isinstance(value, SupportsFloat) and not isinstance(value, str | complex):
            number = float(value)
    except (TypeError, ValueError, OverflowError):  # an array, sNaN, a huge integer
        number = math.nan
    if not abs(number) <= _LARGEST:
        expected = f"expected a finite number, at most {_LARGEST:g} in magnitude"
        raise ValueError(f"{name}: {expected}, got {describe(value)}")
    return number if abs(number) >= _ROUNDING else 0.0


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a rollout.

    Attributes:
        value: 1 for a right answer, 0 for a wrong one or none; a user's function may return any
            number. None: unknown; the rollout must not be trained on.
        answer: the answer that was found in it; what the model said last if no check has looked
            for one.
        reason: an explanation for people.
        parts: named parts of the value, where an environment gives them.
    """

    value: float | None
    answer: str | None
    reason: str
    parts: Mapping[str, float] = field(default_factory=dict)


def said_in(trajectory: Trajectory) -> str | None:
    """Return the answer in what the model said last, or all of that if nothing in it is marked."""
    return final_answer(trajectory.answer) or trajectory.answer or None


def plain_reward(reward: Reward) -> Reward:
    """Return the same reward as plain data, which the journal keeps as it is.

    Raises:
        ValueError: as `finite_number`, of the value or a part.
    """
    value = None if reward.value is None else finite_number(reward.value, "reward")
    answer = None if reward.answer is None else str(reward.answer)
    parts = {
        str(name): finite_number(part, f"part {name!r}") for name, part in reward.parts.items()
    }
    return Reward(value, answer, str(reward.reason), parts)


T = TypeVar("T")

Verdict = Reward | float | None
RewardFunction = Callable[..., Verdict | Awaitable[Verdict]]
"""A reward function of the user's, sync or async, of (trajectory, task) or in the form of verl or
TRL (user_function.py). None says that there is no reward."""


class RewardSettings(pydantic.BaseModel):
    """Settings of how answers are checked."""

    model_config = pydantic.ConfigDict(extra="forbid")

    function: str = pydantic.Field(
        "math",
        description="How rollouts are scored. math: compare numbers exactly and other answers with "
        "math-verify; exact: compare numbers exactly and other answers as text; module:function: "
        "call your own function of (trajectory, task), or one written for verl or TRL.",
    )
    num_workers: int = pydantic.Field(
        2, ge=1, description="Maximum number of processes that check answers."
    )
    timeout_s: float = pydantic.Field(10.0, gt=0, description="Time limit of one check.")
    retries: int = pydantic.Field(
        1,
        ge=0,
        description="Number of times that a check which hung, crashed or raised is repeated. With "
        "math-verify it is repeated at least once; an answer that breaks it again is wrong.",
    )
    memory_mib: int = pydantic.Field(
        2048, ge=0, description="Memory that a check may allocate. 0: no limit."
    )

    @pydantic.field_validator("function")
    @classmethod
    def _is_a_function(cls, function: str) -> str:
        module, _, name = function.partition(":")
        if function not in ("math", "exact") and not (module and name):
            raise ValueError(f'{function!r} is not "math", "exact" or "module:function"')
        return function


class Grader:
    """Scores rollouts. Use as `async with Grader(...) as grader`."""

    def __init__(
        self,
        settings: RewardSettings | None = None,
        function: RewardFunction | None = None,
        *,
        pool: Pool | None = None,
    ) -> None:
        """
        Args:
            function: replaces the one in the settings. If it is not async it runs in a thread,
                which cannot be killed: where it may hang, name it in the settings instead, and it
                runs in a process.
            pool: scores reasoning-gym's puzzles.
        """
        self._settings = settings or RewardSettings()
        self._pool = pool
        name = self._settings.function
        self._check = self._check_answer if name in ("math", "exact") else self._ask_process
        if function is not None:
            self._check = partial(self._ask_function, function)
        self._processes = ProcessPool(
            self._settings.num_workers,
            preload=["math_verify:verify" if name == "math" else name],
            memory_mib=self._settings.memory_mib,
        )
        self._threads = anyio.CapacityLimiter(self._settings.num_workers)

    async def __aenter__(self) -> Self:
        await self._processes.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._processes.__aexit__()

    async def ready(self) -> None:
        """Start what a function of the user's runs in, once.

        Raises:
            SettingsError: it cannot be started, such as for want of the function, or the function
                has parameters that are not known.
        """
        if ":" not in self._settings.function:
            return
        try:
            await self._processes.warm_up()
            await self._processes.call(
                f"{_USER_FUNCTION}:check",
                self._settings.function,
                timeout_s=self._settings.timeout_s,
            )
        except CallFailed as error:
            raise SettingsError(f"reward.function: {error}") from error

    async def score(self, trajectory: Trajectory, task: Task) -> Reward:
        """Return the reward of `trajectory` as an answer to `task`.

        Raises:
            SettingsError: the task is a puzzle, and there is no pool to score it in.
            RewardError: a user's function raised, took too long or returned nonsense at each
                attempt.
        """
        if trajectory.stop_reason is StopReason.CANCELLED:
            return Reward(None, None, "it was cancelled")
        if trajectory.stop_reason.is_unscorable:
            return Reward(None, None, f"infrastructure: {trajectory.error or 'no error was given'}")
        if trajectory.stop_reason is StopReason.TIME_BUDGET and not trajectory.used_its_time:
            # How fast it went was up to the servers and the sandbox, not to the model.
            return Reward(None, None, "it ran out of time, mostly waiting for servers and sandbox")
        reward = await self._check(trajectory, task)
        if self._check == self._check_answer or reward.value is None or reward.answer is not None:
            return reward
        return replace(reward, answer=said_in(trajectory))  # by a function of the user's

    async def _check_answer(self, trajectory: Trajectory, task: Task) -> Reward:
        answer = final_answer(trajectory)
        if answer is None:
            return Reward(0.0, None, "it gives no answer")
        # Only math-verify takes a rounded decimal for the number.
        is_exact = self._settings.function == "exact" or "reasoning_gym" in task.extra
        tolerance = Fraction(0) if is_exact else TOLERANCE
        same = same_number(task.answer, answer, tolerance=tolerance)
        if "reasoning_gym" in task.extra and not same:
            return await self._check_puzzle(answer, task)
        if same is not None:
            verdict = "matches" if same else "is a different number than"
            return Reward(float(same), answer, f"{verdict} the reference answer")
        if self._settings.function == "exact":
            return Reward(0.0, answer, "differs from the reference answer")
        if len(answer) > _MAX_ANSWER_CHARS:
            return Reward(0.0, answer, f"longer than {_MAX_ANSWER_CHARS} characters")
        return await self._ask_math_verify(answer, task)

    async def _ask_math_verify(self, answer: str, task: Task) -> Reward:
        """Ask math-verify. Where it fails on the answer in two processes, the second a fresh one,
        and not on the task's own answer, the answer is to blame and wrong."""
        timeout_s = self._settings.timeout_s
        call = partial(self._processes.call, _IS_EQUAL, task.answer, timeout_s=timeout_s)
        failures: list[CallFailed] = []
        for _ in range(1 + max(1, self._settings.retries)):
            try:
                same = await call(answer, fresh=bool(failures))
            except CallFailed as error:
                failures.append(error)
            else:
                verdict = "equal to" if same else "different from"
                return Reward(
                    float(bool(same)), answer, f"math-verify: {verdict} the reference answer"
                )
        reason = f"math-verify: {failures[-1]} ({len(failures)} tries)"
        if sum(not failure.from_outside for failure in failures) < 2:
            return Reward(None, answer, reason)
        try:
            await call(task.answer, fresh=True)
        except CallFailed:
            return Reward(None, answer, f"{reason}; on the reference answer it fails, too")
        return Reward(0.0, answer, f"{reason}: the answer breaks the check, so it is wrong")

    async def _check_puzzle(self, answer: str, task: Task) -> Reward:
        if self._pool is None:
            raise SettingsError(f"task {task.id}: puzzles are scored in a sandbox; there is none")
        ask = partial(is_solved, self._pool, task.extra["reasoning_gym"], answer)
        try:
            solved, reason = await self._retry(partial(ask, timeout_s=self._settings.timeout_s))
        except CallFailed as error:
            return Reward(None, answer, f"reasoning-gym: {error}")
        return Reward(float(solved), answer, f"reasoning-gym: {reason}")

    async def _ask_process(self, trajectory: Trajectory, task: Task) -> Reward:
        name, timeout_s = self._settings.function, self._settings.timeout_s
        arguments = f"{_USER_FUNCTION}:call", name, trajectory, task
        try:
            call = partial(self._processes.call, *arguments, timeout_s=timeout_s)
            verdict = await self._retry(call)
        except CallFailed as error:
            raise RewardError(f"{name}: task {task.id}: {error}") from error
        return _reward(verdict, name, task)

    async def _ask_function(
        self, function: RewardFunction, trajectory: Trajectory, task: Task
    ) -> Reward:
        name = getattr(function, "__qualname__", repr(function))
        timeout_s = self._settings.timeout_s

        async def attempt() -> object:
            try:
                with anyio.fail_after(timeout_s) as deadline:
                    return await self._call_function(function, trajectory, task)
            except Exception as error:
                if isinstance(error, TimeoutError) and deadline.cancelled_caught:
                    raise CallTimedOut(f"no result after {timeout_s:g} s") from None
                is_ours = isinstance(error, AgentLoopError)
                raise CallFailed(str(error) if is_ours else summary_of(error)) from error

        try:
            verdict = await self._retry(attempt)
        except CallFailed as error:
            raise RewardError(f"{name}: task {task.id}: {error}") from error
        return _reward(verdict, name, task)

    async def _call_function(
        self, function: RewardFunction, trajectory: Trajectory, task: Task
    ) -> object:
        ask_it = partial(ask, function, trajectory, task)
        if inspect.iscoroutinefunction(function):
            result = ask_it()
        else:
            result = await anyio.to_thread.run_sync(
                ask_it, abandon_on_cancel=True, limiter=self._threads
            )
        return await result if inspect.isawaitable(result) else result

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first attempt that succeeds."""
        for num_left in range(self._settings.retries, -1, -1):
            try:
                return await attempt()
            except CallFailed as error:
                if not num_left:
                    tries = self._settings.retries + 1
                    times = "" if tries == 1 else f" ({tries} tries)"
                    raise CallFailed(f"{error}{times}") from error
        raise AssertionError("unreachable")


def _reward(verdict: object, name: str, task: Task) -> Reward:
    if isinstance(verdict, Mapping) and verdict.keys() == Reward.__dataclass_fields__.keys():
        verdict = Reward(**verdict)
    if verdict is None:
        return Reward(None, None, f"{name}: no reward")
    try:
        if isinstance(verdict, Reward):
            return plain_reward(verdict)
        if isinstance(verdict, SupportsFloat):
            return Reward(finite_number(verdict, "reward"), None, name)
    except ValueError as error:  # the model's text may decide a number
        return Reward(None, None, f"{name}: {error}")
    raise RewardError(f"{name}: task {task.id}: a number or a Reward, not {verdict!r:.100}")
