"""The texts of other machines, which must not control a terminal."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.printable import printable


@given(st.text())
def test_nothing_is_left_that_does_not_print(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)


def test_what_prints_stays_and_the_rest_can_be_read() -> None:
    assert printable("Müller: \x1b[2J\n12:00:00 forged") == "Müller: \\u001b[2J\\u000a12:00:00 forged"
