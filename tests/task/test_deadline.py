import math

from atoll import Deadline


def test_deadline_passes_with_the_clock_and_can_be_moved() -> None:
    now = [10.0]
    deadline = Deadline(lambda: now[0], at=12.0)
    assert (deadline.remaining(), deadline.passed()) == (2.0, False)
    now[0] = 12.0
    assert (deadline.remaining(), deadline.passed()) == (0.0, True)
    deadline.move(15.0)
    assert (deadline.remaining(), deadline.passed()) == (3.0, False)


def test_a_stop_is_a_deadline_that_has_passed_for_good() -> None:
    deadline = Deadline.never()
    assert deadline.remaining() == math.inf
    deadline.stop()
    deadline.move(math.inf)
    assert deadline.passed()
    assert deadline.is_stopped
    assert deadline.remaining() == 0.0
