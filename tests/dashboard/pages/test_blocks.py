"""Values as cells: on one line, printable, bounded."""

import math

import pytest

from atoll.dashboard.pages.blocks import GLYPHS, TEXT_MAX, duration, instant, shown, size, state_cell
from atoll.protocol.vocabulary import Fate, Phase, RunState


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ("", "-"),
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


def test_every_state_and_fate_has_a_sign() -> None:
    states = {*map(str, Fate), *map(str, RunState), *map(str, Phase)}
    assert states - GLYPHS.keys() == set()
    assert state_cell("odd").glyph == ""


def test_times_and_sizes() -> None:
    assert instant(0).text == instant(None).text == duration(None).text == size(None).text == "-"
    assert instant(1_700_000_000.9).text == "2023-11-14 22:13:20 UTC"
    assert (duration(599.94).text, duration(3_600).text) == ("599.9 s", "60 min")
    assert size(1_500).text == "1.5 kB"
