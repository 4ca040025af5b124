"""The texts of other machines, which must not control a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ground.printable import conclusion, count_of, lines_of, printable


@given(st.text())
def test_nothing_is_left_that_does_not_print(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)


def test_what_prints_stays_and_the_rest_can_be_read() -> None:
    assert printable("Müller: \x1b[2J\n12:00:00 forged") == "Müller: \\u001b[2J\\u000a12:00:00 forged"


TRACEBACK = 'Traceback (most recent call last):\n  File "own.py", line 3, in loss\n    raise RuntimeError\n'


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (printable(f"{TRACEBACK}RuntimeError: no loss"), "RuntimeError: no loss"),
        (printable(f"{TRACEBACK}RuntimeError: no loss\ntoday"), "RuntimeError: no loss today"),
        (f"{TRACEBACK}KeyError: 3\n", "KeyError: 3"),
        ("one\ntwo", "two"),
        ("  \n", ""),
    ],
)
def test_the_conclusion_of_a_traceback_is_the_exception_also_of_one_that_came_on_one_line(text: str, end: str) -> None:
    assert conclusion(text) == end


def test_the_lines_of_a_printable_text_are_those_that_it_had() -> None:
    assert lines_of(printable(TRACEBACK)) == TRACEBACK.splitlines()


def test_one_thing_is_in_the_singular() -> None:
    assert [count_of(number, "fault") for number in (0, 1, 2)] == ["0 faults", "1 fault", "2 faults"]
    assert [count_of(number, "box is", "boxes are") for number in (1, 2)] == ["1 box is", "2 boxes are"]
