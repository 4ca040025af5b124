"""The downtime of a start: by the last sign of life, or by the journal where that sign is of another copy."""

from dataclasses import dataclass

import pytest

from atoll.server.hosting.recovering import BUSY_S, Replayed


@dataclass
class _Ledger:
    now: float


@dataclass
class _Machine:
    """A machine as far as a start asks it."""

    deadline: float | None
    ledger: _Ledger


@pytest.mark.parametrize(
    ("alive", "deadline", "down_since"),
    [
        (130.0, 200.0, 130.0),  # it lived on without an event
        (130.0, None, 130.0),
        (90.0, 200.0, 100.0),  # the note is older than the last entry: another copy
        (0.0, 200.0, 100.0),  # there is none
        (200.0 + BUSY_S, 200.0, 200.0 + BUSY_S),  # busy, or just killed
        (200.0 + BUSY_S + 1, 200.0, 100.0),  # it would have applied the deadline: the journal is an older copy
    ],
)
def test_a_run_stood_still_since_what_its_journal_knows(
    alive: float, deadline: float | None, down_since: float
) -> None:
    machine = _Machine(deadline, _Ledger(100.0))
    replayed = Replayed(None, machine, 1, ())  # type: ignore[arg-type]
    assert replayed.down_since(alive) == down_since
