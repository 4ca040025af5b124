"""Rows as a table, and settings as overrides."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.interface.overrides import overrides_of
from atoll.interface.tables import Table
from atoll.protocol.json_values import flat


def test_a_table_has_all_columns_and_gaps():
    table = Table([{"round": 1, "loss": 0.5}, {"round": 2, "auc": None}])
    assert table.columns == ("round", "loss", "auc")
    assert table.column("loss") == [0.5, None]
    assert (table[1]["round"], len(table[:1]), [row["round"] for row in table]) == (2, 1, [1, 2])


def test_a_notebook_gets_escaped_cells_of_the_first_rows():
    shown = Table([{"name": "<b>"}] * 60)._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown
    assert "... and 10 rows more" in shown


def test_a_notebook_is_told_that_a_table_is_empty():
    assert Table([])._repr_html_() == "<p>no rows</p>"


def test_tables_of_settings_are_settings_by_dotted_keys():
    settings = {"round": {"quorum": 1}, "schedule.local": {"lr": {"kind": "cosine"}}, "sites": {"a b": {"unit": 1.0}}}
    assert overrides_of(settings) == [
        "round.quorum=1",
        'schedule.local={"lr" = {"kind" = "cosine"}}',
        'sites={"a b" = {"unit" = 1.0}}',
    ]


def test_nested_values_have_dotted_names():
    assert flat({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}


PLAIN = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text())
VALUES = st.recursive(
    PLAIN, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3))
)


@given(VALUES)
def test_any_plain_value_is_read_back_from_its_override(value):
    overrides = overrides_of({"key": value})
    assert tomllib.loads("\n".join(overrides))["key"] == value


def test_other_values_are_refused_by_name():
    with pytest.raises(ValueError, match="set: a: got None; allowed") as refused:
        overrides_of({"a": None, "b": 1, "c": [object()]})
    assert len(refused.value.faults) == 2
