"""The state that the page shows, built from events. Pure: no tasks, no clients, an injected clock.

    events ──seen──> rows, groups, counters ──take──> changes since the last call

Single events are not kept, so a late reader gets fewer but newer updates, and pending changes are
bounded by the number of rollouts. Rows are sent whole; changes of lane are sent before new token
counts.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentloop.events import (
    CallFinished,
    CallStarted,
    ClientAwaited,
    Event,
    GroupFinished,
    GroupStarted,
    Measured,
    RolloutAbandoned,
    RolloutFinished,
    RolloutScored,
    RolloutStarted,
    TokensSampled,
    ToolRaised,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
    WeightsLoaded,
)
from agentloop.observe.bottleneck import CallTimes, Part, RecentTime, Spent
from agentloop.observe.frames import (
    BoardFrame,
    GroupDetails,
    GroupSummary,
    Lane,
    MemberSummary,
    RolloutState,
    RolloutSummary,
    ToolsSummary,
    WrongAnswer,
    first_words,
)
from agentloop.observe.in_flight import InFlight
from agentloop.observe.latency import Duration, LatencyShown, RecentDurations, nearest_rank, of_turn
from agentloop.plain_json import number_of
from agentloop.trajectory import Message, Trajectory, Turn, TurnEnd, rollout_of

_PARTS: Mapping[Lane, Part] = {
    "wait": Part.KV,
    "prefill": Part.PREFILL,
    "decode": Part.DECODE,
    "tool": Part.TOOL,
}
_MAX_LANES = 64  # per row, the newest
_MAX_STEPS = 5_000  # rows of metrics
_RATE_S = 5.0  # window for rates
_NUM_LATENCIES = 1_000  # most recent calls, for percentiles
_NUM_PROMPTS = 200  # most recent turns per server, for the share of cached tokens


@dataclass(slots=True)
class Row:
    """A rollout. Times are milliseconds since the board was created."""

    record: Trajectory | None  # None: dropped to save memory
    id: str
    group: str
    start: int
    state: RolloutState = "live"
    turn: int = 0
    tokens: int | None = 0  # None: an endpoint has not counted them
    calls: int = 0
    failed_calls: int = 0
    server: str = ""
    stop: str | None = None
    reward: float | None = None
    answer: str | None = None
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    dropped: str | None = None
    end: int | None = None
    lanes: list[tuple[Lane, int]] = field(default_factory=list)
    more: bool = False
    question: str = ""  # if it is in no group, which would have it
    open_calls: set[str] = field(default_factory=set)

    def to_row(self) -> RolloutSummary:
        row = RolloutSummary(
            id=self.id,
            group=self.group,
            state=self.state,
            stop=self.stop,
            turn=self.turn,
            tokens=self.tokens,
            calls=self.calls,
            failed_calls=self.failed_calls,
            server=self.server,
            reward=self.reward,
            answer=first_words(self.answer),
            start=self.start,
            end=self.end,
            lanes=self.lanes,
        )
        if self.more:
            row["more"] = True
        if self.question:
            row["question"] = self.question
        return row

    def to_member(self, *, is_chosen: bool) -> MemberSummary:
        """Return the row of its group; `is_chosen`: rollouts of the group were selected."""
        return {
            "id": self.id,
            "state": self.state,
            "stop": self.stop,
            "tokens": self.tokens,
            "calls": self.calls,
            "failed_calls": self.failed_calls,
            "turns": self.turn,
            "reward": self.reward,
            "answer": self.answer,
            "reason": self.reason,
            "parts": self.parts,
            "advantage": self.advantage,
            "dropped": self.dropped,
            "kept": self.advantage is not None if is_chosen else None,
        }

    def verdict(self) -> dict[str, object]:
        """Return what the page shows of an opened rollout beside its record."""
        names = ("group", "state", "reward", "parts", "answer", "reason", "advantage", "dropped")
        return {**{name: getattr(self, name) for name in names}, "stop_reason": self.stop}


@dataclass(slots=True)
class GroupRow:
    """The rollouts of a task. Times are as in `Row`."""

    id: str
    task: str
    prompt: str | Sequence[Message]
    answer: str | None
    size: int
    start: int
    is_chosen: bool = True
    members: dict[str, None] = field(default_factory=dict)  # ordered
    ended: set[str] = field(default_factory=set)  # rollouts with a conversation that has ended
    mean_reward: float | None = None
    kept: int | None = None
    has_signal: bool | None = None
    wrong: WrongAnswer | None = None
    end: int | None = None

    @property
    def question(self) -> str:
        prompt = self.prompt
        return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])

    def to_row(self) -> GroupSummary:
        return {
            "id": self.id,
            "task": self.task,
            "question": first_words(self.question),
            "answer": self.answer,
            "wrong": self.wrong,
            "size": self.size,
            "mean_reward": self.mean_reward,
            "kept": self.kept,
            "has_signal": self.has_signal,
            "start": self.start,
            "end": self.end,
            "state": "live" if self.end is None else "done",
            "num_done": len(self.ended),
        }


class Board:
    """Collects events with `on_event` and returns what has changed with `take`.

    Attributes:
        question_of: returns the question of a rollout that is in no group.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        max_ended: int = 2_000,
        max_groups: int = 500,
        max_kept_tokens: int = 1_000_000,
    ) -> None:
        """
        Args:
            max_ended: Number of finished rollouts to keep.
            max_groups: Number of training groups to keep, and of other groups. The limits are
                separate because held-out tasks come by the hundred and would displace the training
                groups.
            max_kept_tokens: Total tokens to keep of finished rollouts, at some 70 bytes each.
        """
        self._clock = clock
        self.t0 = clock()
        self.question_of: Callable[[Trajectory], str] = lambda record: ""
        self.rows: dict[str, Row] = {}
        self.groups: dict[str, GroupRow] = {}
        self.steps: deque[Mapping[str, object]] = deque(maxlen=_MAX_STEPS)
        self.policy_version: str | None = None
        self._in_flight = InFlight()
        self.num_done = self.num_moved = 0
        self.calls = Counter[str]()
        self.raised: dict[str, str] = {}  # what tools raise in most of their calls, by tool
        self.server_tokens = Counter[str]()  # sampled, by the server's URL
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._with_record: deque[tuple[str, int]] = deque()
        self._num_kept_tokens = 0
        self._max_ended, self._max_groups = max_ended, max_groups
        self._max_kept_tokens = max_kept_tokens
        self._num_tokens = self._num_calls = 0
        self._rates: deque[tuple[float, int, int]] = deque([(self.t0, 0, 0)])
        self._recent = RecentTime(self.t0)
        self._durations = RecentDurations()
        self._latencies: deque[tuple[float, float]] = deque(maxlen=_NUM_LATENCIES)
        self._cached: dict[str, deque[tuple[int, int]]] = {}
        # Changes since the last `take`, in order.
        self._lane_changes: dict[str, None] = {}
        self._token_changes: dict[str, None] = {}
        self._changed_groups: dict[str, None] = {}
        self._removed: dict[str, None] = {}
        self._removed_groups: dict[str, None] = {}
        self._num_new_steps = 0

    @property
    def num_in_flight(self) -> int:
        """The number of rollouts in flight, without those that wait for a session's client."""
        return len(self._in_flight)

    def ms(self) -> int:
        return round(1000 * (self._clock() - self.t0))

    # --- events -----------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        self._in_flight.on_event(event)
        match event:
            case TokensSampled():
                row = self.rows.get(event.rollout_id)
                if row is not None and row.state == "live":
                    row.tokens = (row.tokens or 0) + len(event.ids)
                    self._num_tokens += len(event.ids)
                    self.server_tokens[row.server] += len(event.ids)
                    if event.ids and row.lanes[-1][0] != "decode":
                        self._enter(row, "decode")
                    else:
                        self._token_changes[row.id] = None
            case RolloutStarted(record=record, group=group):
                self._start(record, group)
            case GroupStarted() | GroupFinished():
                self._update_group(event)
            case ToolRaised():
                self.raised[event.tool] = event.text
            case Measured(row=metrics):
                self.steps.append({**metrics, "unix_s": round(self._clock(), 3)})
                self._num_new_steps = min(self._num_new_steps + 1, _MAX_STEPS)
                self._record_step(metrics)
            case WeightsLoaded(version=version):
                self.policy_version = version
            case _:
                row = self.rows.get(event.rollout_id)
                if row is not None and (row.state == "live" or isinstance(event, RolloutScored)):
                    self._update_row(row, event)

    def _start(self, record: Trajectory, group: str) -> None:
        now_ms = self.ms()
        row = Row(record, record.id, group, now_ms, lanes=[(_first_lane(record), now_ms)])
        if group not in self.groups:
            row.question = first_words(self.question_of(record))
        self._recent.enter(row.id, _PARTS[_first_lane(record)], self._clock(), ())
        self.rows[record.id] = row
        self._ended.pop(record.id, None)
        self._removed.pop(record.id, None)  # it was started again, so readers must keep it
        self._lane_changes[record.id] = None
        if (group_row := self.groups.get(group)) is not None:
            group_row.members[record.id] = None

    def _update_row(self, row: Row, event: Event) -> None:
        match event:
            case TurnStarted(turn=turn):
                row.turn = turn + 1
                self._enter(row, "wait" if row.record is None else _first_lane(row.record))
            case TurnPlaced(server=server):
                row.server = server
                self._enter(row, "prefill")
            case TurnMoved():
                self.num_moved += 1
                self._enter(row, "wait")
            case CallStarted(call=call):
                row.calls += 1
                if call.error is None:  # otherwise no tool runs
                    row.open_calls.add(call.id)
                self._token_changes[row.id] = None
            case CallFinished(result=result):
                row.open_calls.discard(result.call_id)
                row.failed_calls += result.status.failed
                self._token_changes[row.id] = None
                self._num_calls += 1
                self._recent.count(self._clock(), calls=1)
                self.calls[str(result.status)] += 1
                queued_s = result.started_s - result.dispatched_s
                took_s = result.ended_s - result.dispatched_s
                self._latencies.append((took_s, queued_s))
                if result.status.ran:
                    self._durations.add(Duration.CALL, self._clock(), took_s)
            case TurnSampled() if row.open_calls:
                self._enter(row, "tool")
            case TurnFinished(record=turn):
                self._record_cache_hits(row, turn)
                truncated = int(turn.end is TurnEnd.LENGTH)
                self._recent.count(self._clock(), turns=1, truncated=truncated)
                times = turn.started_s, turn.first_token_s, turn.generated_s
                for kind, seconds in of_turn(*times, len(turn.output_ids)):
                    self._durations.add(kind, self._clock(), seconds)
            case ClientAwaited():
                self._enter(row, "client")
            case RolloutFinished(trajectory=trajectory):
                row.stop, row.answer = str(trajectory.stop_reason), trajectory.answer or None
                row.turn = max(row.turn, len(trajectory.turns))
                if event.num_tokens is not None or not trajectory.has_ids:
                    row.tokens = event.num_tokens
                self._end(row, "done")
            case RolloutAbandoned():
                self._end(row, "abandoned")
            case RolloutScored():
                row.reward, row.answer, row.reason = event.reward, event.answer, event.reason
                row.parts = event.parts
                self._lane_changes[row.id] = None
                group = self.groups.get(row.group)
                if group is not None and event.reward is not None and event.reward <= 0:
                    group.wrong = group.wrong or {"id": row.id, "answer": first_words(row.answer)}
                    self._changed_groups[group.id] = None
                if row.end is None:
                    return
                now_ms = self.ms()
                if row.end < now_ms:
                    row.lanes.append(("siblings", row.end))
                end = self._clock()
                self._recent.add(Part.REWARD, end - event.seconds, end)
                scoring_ms = max(now_ms - round(1000 * event.seconds), row.end)
                if scoring_ms < now_ms:
                    row.lanes.append(("reward", scoring_ms))
                row.end = now_ms
                self._trim(row)

    def _record_cache_hits(self, row: Row, turn: Turn) -> None:
        if row.record is None or not turn.output_ids:
            return
        earlier_tokens = (
            len(earlier.output_ids) + len(earlier.observation_ids)
            for earlier in row.record.turns[:-1]
        )
        last = self._cached.setdefault(row.server, deque(maxlen=_NUM_PROMPTS))
        last.append((turn.cached_tokens, len(row.record.prompt_ids) + sum(earlier_tokens)))

    def _record_step(self, metrics: Mapping[str, object]) -> None:
        """Record the times of a step that has ended now: first the learner's, then the sync's."""
        end = self._clock()
        for name, part in (("sync_s", Part.SYNC), ("learn_s", Part.LEARNER)):
            start = end - (number_of(metrics.get(name)) or 0.0)
            self._recent.add(part, start, end)
            end = start

    def _update_group(self, event: GroupStarted | GroupFinished) -> None:
        name = event.group
        match event:
            case GroupStarted():
                self.groups.pop(name, None)
                self._removed_groups.pop(name, None)
                self.groups[name] = GroupRow(
                    name,
                    event.task_id,
                    event.prompt,
                    event.answer,
                    event.size,
                    self.ms(),
                    event.is_chosen,
                )
                groups = self.groups.values()
                alike = [
                    candidate.id for candidate in groups if candidate.is_chosen == event.is_chosen
                ]
                for oldest in alike[: max(0, len(alike) - self._max_groups)]:
                    del self.groups[oldest]
                    self._changed_groups.pop(oldest, None)
                    self._removed_groups[oldest] = None
            case GroupFinished() if name in self.groups:
                group = self.groups[name]
                group.mean_reward, group.end = event.mean_reward, self.ms()
                if event.is_chosen:
                    group.kept = len({rollout_of(id) for id in event.kept})
                    group.has_signal = event.has_signal
                for key in group.members:
                    if (row := self.rows.get(key)) is not None:
                        row.advantage = event.kept.get(key)
                        row.dropped = event.dropped.get(key)
                        self._lane_changes[key] = None
        if name in self.groups:
            self._changed_groups[name] = None

    def _enter(self, row: Row, lane: Lane) -> None:
        if row.lanes[-1][0] != lane:
            self._recent.enter(row.id, _PARTS.get(lane), self._clock(), _calls_of(row))
            row.lanes.append((lane, self.ms()))
            self._trim(row)
        self._lane_changes[row.id] = None

    def _trim(self, row: Row) -> None:
        if len(row.lanes) > _MAX_LANES:
            del row.lanes[:-_MAX_LANES]
            row.more = True
        self._lane_changes[row.id] = None

    def _end(self, row: Row, state: Literal["done", "abandoned"]) -> None:
        row.state, row.end = state, self.ms()
        self._recent.enter(row.id, None, self._clock(), _calls_of(row))
        row.open_calls.clear()
        self._lane_changes[row.id] = None
        self.num_done += 1
        if (group := self.groups.get(row.group)) is not None:
            group.ended.add(rollout_of(row.id))
            self._changed_groups[group.id] = None
        self._ended[row.id] = None
        if row.record is not None:
            num_tokens = len(row.record.prompt_ids) + row.record.num_response_tokens
            self._with_record.append((row.id, num_tokens))
            self._num_kept_tokens += num_tokens
        self._evict()

    def _evict(self) -> None:
        while len(self._ended) > self._max_ended:
            oldest, _ = self._ended.popitem(last=False)
            del self.rows[oldest]
            self._lane_changes.pop(oldest, None)
            self._token_changes.pop(oldest, None)
            self._removed[oldest] = None
        while self._with_record and (
            self._num_kept_tokens > self._max_kept_tokens
            or len(self._with_record) > self._max_ended
        ):
            key, num_tokens = self._with_record.popleft()
            self._num_kept_tokens -= num_tokens
            if (row := self.rows.get(key)) is not None and row.state != "live":
                row.record = None

    # --- readers ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Record a sample for the rates; call it a few times a second."""
        now_s = self._clock()
        self._rates.append((now_s, self._num_tokens, self._num_calls))
        while len(self._rates) > 2 and now_s - self._rates[0][0] > _RATE_S:
            self._rates.popleft()

    def now(self) -> dict[str, float | str | None]:
        """Return the current rates and counters."""
        (before_s, tokens, calls), (now_s, tokens_now, calls_now) = self._rates[0], self._rates[-1]
        per_s = 1 / (now_s - before_s) if now_s > before_s else 0.0  # the clock may go backwards
        return {
            "tokens_per_s": round((tokens_now - tokens) * per_s, 1),
            "calls_per_s": round((calls_now - calls) * per_s, 2),
            "in_flight": self.num_in_flight,
            "rollouts_done": self.num_done,
            "turns_moved": self.num_moved,
            "groups_open": sum(group.end is None for group in self.groups.values()),
            "policy_version": self.policy_version,
        }

    def spent(self, *, queued_share: float = 0.0) -> Spent:
        """Return what the last minute was spent on.

        Args:
            queued_share: share of the calls in flight that wait for a slot.
        """
        return self._recent.spent(self._clock(), queued_share=queued_share)

    def latency(self) -> LatencyShown:
        """Return percentiles of the turns and calls that ended in the last minute."""
        return self._durations.to_dict(self._clock())

    def tools(self) -> ToolsSummary:
        """Return the number of calls by status, and percentiles of recent latencies."""
        summary = ToolsSummary(calls=dict(self.calls))
        if self._latencies:
            summary["latency_ms"] = _percentiles([latency for latency, _ in self._latencies])
            summary["queued_ms"] = _percentiles([queued for _, queued in self._latencies])
            summary["ran_ms"] = _percentiles([took - queued for took, queued in self._latencies])
        return summary

    def group_details(self, name: str) -> GroupDetails | None:
        """Return a group with the rollouts that are still known; None: it is not known itself."""
        group = self.groups.get(name)
        if group is None:
            return None
        members = [row for key in group.members if (row := self.rows.get(key)) is not None]
        return {
            **group.to_row(),
            "prompt": group.question,
            "rollouts": [row.to_member(is_chosen=group.kept is not None) for row in members],
        }

    def cached_fraction(self, server: str) -> float | None:
        """Return the share of recent prompt tokens that were in a server's cache."""
        last = self._cached.get(server)
        total = sum(of for _, of in last or ())
        return sum(cached for cached, _ in last or ()) / total if total else None

    def take(self, max_rows: int) -> BoardFrame:
        """Return the changes since the last call; rows beyond `max_rows` follow later."""
        keys = _pop_first(self._lane_changes, max_rows)
        for key in keys:
            self._token_changes.pop(key, None)
        keys += _pop_first(self._token_changes, max_rows - len(keys))
        taken = BoardFrame()
        if keys:
            taken["rollouts"] = [self.rows[key].to_row() for key in keys]
        if self._changed_groups:
            taken["groups"] = [self.groups[name].to_row() for name in self._changed_groups]
        if self._removed or self._removed_groups:
            taken["gone"] = {"rollouts": [*self._removed], "groups": [*self._removed_groups]}
        if self._num_new_steps:
            taken["steps"] = [*self.steps][-self._num_new_steps :]
        self._removed, self._removed_groups, self._num_new_steps = {}, {}, 0
        self._changed_groups.clear()
        return taken

    def skip(self) -> None:
        """Discard the pending changes, because nobody is reading."""
        self._lane_changes.clear()
        self._token_changes.clear()
        self._changed_groups.clear()
        self._removed, self._removed_groups, self._num_new_steps = {}, {}, 0

    def all(self, max_rows: int, *, taken: bool = False) -> Iterator[BoardFrame]:
        """Yield the whole state, in slices of at most `max_rows` rows.

        The state may change between slices. Rows and groups may be repeated by the next `take`;
        steps may not, so with `taken` the steps that it will return are left out.
        """
        steps = [*self.steps][: len(self.steps) - self._num_new_steps * taken]
        yield {
            "groups": [group.to_row() for group in self.groups.values()],
            "steps": steps[:max_rows],
            "rollouts": [],
        }
        for start in range(max_rows, len(steps), max_rows):
            yield {"steps": steps[start : start + max_rows]}
        keys = [*self.rows]
        for start in range(0, len(keys), max_rows):
            rows = (self.rows.get(key) for key in keys[start : start + max_rows])
            yield {"rollouts": [row.to_row() for row in rows if row is not None]}


def _first_lane(record: Trajectory) -> Lane:
    """Return what a turn does first: only our own servers, which know its ids, let it wait."""
    return "wait" if record.prompt_ids else "decode"


def _calls_of(row: Row) -> list[CallTimes]:
    """Return the times of the ended calls of a rollout's last turn, as Unix times."""
    if row.record is None or not row.record.turns:
        return []
    t0 = row.record.created_unix_s
    return [
        (t0 + result.dispatched_s, t0 + result.started_s, t0 + result.ended_s)
        for result in row.record.turns[-1].results
    ]


def _pop_first(keys: dict[str, None], number: int) -> list[str]:
    """Remove and return the first `number` keys."""
    first = [key for key, _ in zip(keys, range(number), strict=False)]
    for key in first:
        del keys[key]
    return first


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return nearest-rank percentiles in milliseconds."""
    ordered = sorted(seconds)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(1000 * nearest_rank(ordered, share), 1) for name, share in ranks.items()}
