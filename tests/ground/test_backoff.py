"""The delay before the next attempt: its bounds, its growth, its spread."""

import random

from hypothesis import given
from hypothesis import strategies as st

from atoll.ground.backoff import delay


class Fixed(random.Random):
    """A generator whose every number in an interval lies at one share of it."""

    def __init__(self, share: float) -> None:
        super().__init__(0)
        self._share = share

    def random(self) -> float:
        return self._share


@given(st.integers(0, 10_000), st.floats(0.001, 10), st.floats(0.001, 1000), st.integers(0, 2**32))
def test_a_delay_is_between_half_and_the_whole_of_the_step(attempt: int, low: float, high: float, seed: int) -> None:
    step = min(high, low * 2 ** min(attempt, 30))
    assert step / 2 <= delay(attempt, low, high, random.Random(seed)) <= step


def test_delays_double_up_to_the_high_bound() -> None:
    assert [delay(attempt, 0.25, 3.0, Fixed(0.0)) for attempt in range(6)] == [0.125, 0.25, 0.5, 1.0, 1.5, 1.5]


def test_a_herd_spreads_out() -> None:
    delays = [delay(3, 1.0, 60.0, random.Random(seed)) for seed in range(2000)]
    in_quarters = [sum(4 + i <= each < 5 + i for each in delays) for i in range(4)]
    assert all(400 < number < 600 for number in in_quarters)
