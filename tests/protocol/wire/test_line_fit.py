"""The bytes in flight that fit a line, on lines of any rate and any length."""

import pytest

from atoll.protocol.wire.line_fit import FIRST_BYTES, LEAST_BYTES, LONG_S, LineFit

MOST = 4 * 2**20


def after(seconds, rate, way):
    """Send for `seconds` over an empty line of `rate` bytes/s that answers after `way` [s]; return the fit."""
    fit, now = LineFit(MOST), 0.0
    fit.answered(way)
    while now < seconds:
        sent_at, now = now, now + way + fit.num_bytes / rate
        fit.confirmed(sent_at, now)
    return fit


@pytest.mark.parametrize("way", [0.001, 0.2, 4.0])
@pytest.mark.parametrize("rate", [20e3, 40e3, 200e3, 1e6])
def test_what_waits_on_a_line_of_any_length_is_sent_within_seconds(rate, way):
    fit = after(120, rate, way)
    assert LEAST_BYTES <= fit.num_bytes <= max(LEAST_BYTES, LONG_S * rate)
    assert fit.num_bytes >= min(MOST, rate / 4), "the line is kept busy"


@pytest.mark.parametrize("way", [0.0001, 0.2, 4.0])
def test_a_fast_line_gets_everything_after_four_answers(way):
    assert FIRST_BYTES * 2**4 == MOST
    assert after(4 * (way + 0.01), 10e9, way).num_bytes == MOST


def test_a_line_that_is_slow_for_a_while_is_fast_again():
    fit = after(10, 10e9, 0.01)
    fit.confirmed(100.0, 150.0)
    assert fit.num_bytes == MOST // 2
    fit.confirmed(120.0, 151.0)  # left before the change
    assert fit.num_bytes == MOST // 2
    fit.confirmed(152.0, 152.1)
    assert fit.num_bytes == MOST
