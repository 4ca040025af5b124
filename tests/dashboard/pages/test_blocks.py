"""Values as cells: on one line, printable, bounded."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.dashboard.pages.blocks import (
    GLYPHS,
    TEXT_MAX,
    Cell,
    Facts,
    Page,
    Sentences,
    TableBlock,
    Text,
    distinct,
    duration,
    instant,
    shown,
    size,
    state_cell,
)
from atoll.protocol.vocabulary import Fate, Phase, RunState


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ("", "-"),
        (" \n", "-"),
        (0, "0"),
        (0.123456, "0.1235"),
        (True, "yes"),
        (math.nan, "nan"),
        ("two\nlines", "two lines"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("a\0b", "a\\u0000b"),
        ("שלום", "שלום"),
        ("😀", "😀"),
        ("x" * 1_000, "x" * (TEXT_MAX - 1) + "…"),
    ],
)
def test_a_value_is_a_line_of_printable_characters(value: object, text: str) -> None:
    assert shown(value) == text


ALIKE = ("loss", "loss\n", "loss ", " loss", "loss (2)", " ", "\u202e", "\\u202e", "", "-", "x" * 500, "x" * 501)
"""Names that `shown` takes for others."""


@given(st.lists(st.one_of(st.sampled_from(ALIKE), st.text(max_size=3)), unique=True))
def test_names_that_look_alike_are_told_apart(names: list[str]) -> None:
    found = distinct(names)
    assert [*found] == names
    assert len({*found.values()}) == len(names)
    assert all(text.isprintable() and text.startswith(shown(name)) for name, text in found.items())
    assert all(found[name] == name for name in names if shown(name) == name)


def test_every_state_and_fate_has_a_sign() -> None:
    states = {*map(str, Fate), *map(str, RunState), *map(str, Phase)}
    assert states - GLYPHS.keys() == set()
    assert state_cell("odd").glyph == ""


def test_times_and_sizes() -> None:
    assert instant(0).text == instant(None).text == duration(None).text == size(None).text == "-"
    assert instant(1_700_000_000.9).text == "2023-11-14 22:13:20 UTC"
    assert (duration(599.94).text, duration(3_600).text) == ("599.9 s", "60 min")
    assert size(1_500).text == "1.5 kB"


def test_blocks_and_rows_keep_their_elements_as_others_come() -> None:
    """Else a live change moves the focus, a selection and what is open to another block, or to another round."""
    state, settings = Facts("State", []), Text("Settings", "rounds = 3")
    before, after = Page("r", [state, settings]), Page("r", [state, Sentences("Now", ["a round opens"]), settings])
    assert before.keys[-1] == after.keys[-1] == "Settings"
    assert Page("r", [settings, settings, Sentences("A b", [])]).keys == ["Settings", "Settings-2", "A-b"]
    rows = [[Cell("2"), Cell("open")], [Cell("1"), Cell("committed")]]
    assert TableBlock("Rounds", ["round", "phase"], rows).names == ["2", "1"]
    assert TableBlock("Rounds", ["round", "phase"], [*rows, rows[0]]).names == ()
