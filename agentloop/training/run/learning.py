"""Say in words what a run has learned so far, from the rows of its metrics. Pure.

It is shown before anything about speed: without a learning signal, a run learns nothing however
fast it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

PATIENCE = 3  # steps without a signal, after which it is said what to do
_MOST = 0.5  # the share of wrong rollouts from which on they have something in common

# What wrong rollouts may have in common: the metric, in words, and what to do.
_IN_COMMON = (
    (
        "truncated",
        "{} of the rollouts are cut off",
        "raise budget.max_response_tokens or budget.max_turns",
    ),
    ("no_answer", "{} give no answer", "say in the prompt which form of an answer is scored"),
    (
        "tool_errors",
        "{} of their calls fail",
        "correct the tools, or what says how to use them",
    ),
)
_HARDER = (
    "take harder problems (tasks.levels, tasks.paths), or drop those that are always solved "
    "(agentloop data filter)"
)
_EASIER = (
    "take easier problems (tasks.levels, tasks.paths), another model or a teacher "
    "(sft.data.teacher)"
)
_OTHERWISE = "raise loop.group_size or sampling.temperature, or check the reward"

Rows = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Headline:
    """The words for what a run learns, and whether its last steps had nothing to learn from."""

    text: str
    is_stuck: bool


def headline(rows: Rows) -> Headline | None:
    """Return what is to be said of a run with these metrics; None: nothing yet."""
    with_groups = (row for row in reversed(rows) if _number(row, "groups_with_signal") is not None)
    last = list(islice(with_groups, PATIENCE))
    parts = [text] if (text := held_out_rewards(rows)) else []
    is_stuck = False
    if last:
        num_groups = _number(last[0], "num_groups") or 0.0
        share = _number(last[0], "groups_with_signal") or 0.0
        parts.append(f"{share * num_groups:.0f} of {num_groups:.0f} groups have a signal")
        is_stuck = len(last) == PATIENCE and not any(row["groups_with_signal"] for row in last)
        if is_stuck:
            parts[-1] += f": {_why(last)}"
    return Headline("; ".join(parts), is_stuck) if parts else None


def held_out_rewards(rows: Rows) -> str:
    """Return the first and the last held-out reward; empty before there are two."""
    first = next((row for row in rows if "held_out/reward" in row), None)
    last = next((row for row in reversed(rows) if "held_out/reward" in row), None)
    if first is None or last is None or first is last:
        return ""
    before, after = (_number(row, "held_out/reward") for row in (first, last))
    if before is None or after is None:
        return ""
    return f"held out {before:.2f} -> {after:.2f}"


def _why(rows: Rows) -> str:
    """Return why steps had no signal, and what to do."""
    rewards = {_number(row, "reward") for row in rows}
    if rewards == {1.0}:
        return f"all rewards are 1; {_HARDER}"
    if rewards == {None}:
        return "no rollout has a reward; the log says why"
    if rewards != {0.0}:
        return f"the rewards within each group are equal; {_OTHERWISE}"
    for name, words, advice in _IN_COMMON:
        share = sum(_number(row, name) or 0.0 for row in rows) / len(rows)
        if share >= _MOST:
            return f"all rewards are 0, and {words.format(f'{100 * share:.0f}%')}; {advice}"
    return f"all rewards are 0; {_EASIER}"


def _number(row: Mapping[str, object], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else None
