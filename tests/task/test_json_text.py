"""JSON without NaN: every text is read by a strict parser, and the numbers that JSON lacks are named."""

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.task.json_text import to_json, without_nan

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def refuse(literal: str) -> Any:
    raise ValueError(f"{literal} stands bare")


def is_finite_everywhere(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(is_finite_everywhere, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


@given(values)
def test_each_text_is_strict_json_and_finite_values_are_unchanged(value: Any) -> None:
    read = json.loads(to_json(value), parse_constant=refuse)
    if is_finite_everywhere(value):
        assert read == value
    elif isinstance(value, dict):
        assert "not_finite" in read


def test_a_number_that_is_not_finite_is_null_and_the_outermost_object_says_why() -> None:
    given_ = {"loss": math.nan, "rows": [{"a": 1.5}, {"a": math.inf}], "sums": (1, -math.inf)}
    assert without_nan(given_) == {
        "loss": None,
        "rows": [{"a": 1.5}, {"a": None}],
        "sums": [1, None],
        "not_finite": {"loss": "NaN", "rows.1.a": "Infinity", "sums.1": "-Infinity"},
    }
    assert without_nan({"a": math.nan, "not_finite": {"b": "known"}})["not_finite"] == {"b": "known", "a": "NaN"}
    assert without_nan({"a": 1.0}) == {"a": 1.0}
