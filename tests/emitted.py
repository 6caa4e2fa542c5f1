"""What a model can emit, for property tests: tool calls, right and wrong, with any values."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import strategies as st

from agentloop.agent.formats.values import decode_call
from agentloop.trajectory import ToolCall, ToolCallStatus, ToolResult, Trajectory, Turn

any_text = st.text(st.characters())  # also half of a surrogate pair
huge_integers = st.integers(1, 4300).flatmap(lambda num: st.integers(-(10**num) + 1, 10**num - 1))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), huge_integers, st.floats(allow_nan=False), any_text
)
plain_data = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(any_text, inner, max_size=4)
    ),
    max_leaves=10,
)
"""As far as JSON can say it; some integers and infinities it cannot."""

_numbers = st.one_of(
    st.from_regex(r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,4})?", fullmatch=True),
    st.integers(4200, 4400).map(lambda num: "9" * num),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "-0.0"]),
)
_nested = st.tuples(st.integers(1, 300), st.sampled_from(["[]", '{"a":}'])).map(
    lambda pair: pair[1][:-1] * pair[0] + "1" + pair[1][-1] * pair[0]
)
_values = st.one_of(
    plain_data.map(json.dumps),
    plain_data.map(lambda value: json.dumps(value, ensure_ascii=False)),
    _numbers,
    _nested,
    st.lists(st.one_of(_numbers, _nested), min_size=1).map(lambda them: f"[{','.join(them)}]"),
)
_arguments = st.one_of(_values, _values.map(lambda value: f'{{"a": {value}}}'))
calls = st.one_of(
    any_text,
    _arguments.map(lambda text: f'{{"name": "f", "arguments": {text}}}'),
    _arguments.map(lambda text: f'{{"name": "f", "arguments": {json.dumps(text)}}}'),
    any_text.map(lambda name: json.dumps({"name": name, "arguments": {}})),
)
"""What stands between the markers of a tool call."""


def rollout(raw: str) -> dict[str, Any]:
    """A trajectory whose only call is this one, as it is written down."""
    name, arguments, error = decode_call(raw)
    call = ToolCall("c", name, arguments, raw, 0, 1, error)
    result = ToolResult("c", name, ToolCallStatus.OK, error or raw, 0, 0, 1)
    return Trajectory("t", [1], [Turn([1], [-0.5], calls=[call], results=[result])]).to_dict()


def as_json(value: Any) -> Any:
    """What JSON makes of it: two halves of a surrogate pair side by side are one character, and
    what is not finite is null."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [as_json(element) for element in value]
    if isinstance(value, dict):
        return {as_json(key): as_json(element) for key, element in value.items()}
    return value
