"""`validate()` of the machines: one planted bug for each invariant, which the event after it shows.

Every test that drives a machine in its process has these checks (`tests/validation.py`); so these tests also hold the
hook.
"""

from collections.abc import Callable
from typing import Any

import pytest

from atoll.protocol.vocabulary import Version
from atoll.server.exchanges.deliveries import Deliveries
from atoll.server.exchanges.exchange import Exchange
from atoll.server.invariants import Violation
from atoll.server.journal.codec import encode_ledger
from atoll.server.rounds.buffer_round import Buffer
from atoll.server.rounds.cohort_round import Round
from atoll.server.rounds.events import Commit, RoundDue
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.run_machine import RunMachine
from tests.server.exchanges.test_machine import NORTH, SOUTH, Run, asked, message
from tests.server.rounds.test_buffer_round import Flow
from tests.server.rounds.test_cohort_round import Drive

COMMITTED = RunMachine._committed


def _late_and_fresh() -> None:
    """Let b's update of round 1 come late, and be carried into round 2, in which b also reports in time."""
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, late="next_round")
    drive.begin("ab", at=0)
    drive.update("a", at=10)
    drive.tick(at=60)
    drive.update("b", at=70)
    drive.fold(at=80)
    drive.do(RoundDue())
    drive.draw("ab")
    drive.update("a", at=90)
    drive.update("b", at=91)
    drive.fold(at=92)


def _below_quorum() -> None:
    drive = Drive(cohort_size=3, quorum=2, deadline=60.0)
    drive.begin("abc", at=0)
    drive.update("a", at=10)
    drive.tick(at=60)


def _partial() -> None:
    drive = Drive(cohort_size=2, partial_work="refuse")
    drive.begin("ab", at=0)
    drive.update("a", at=10, work=0.5)


def _asynchronous() -> None:
    flow = Flow(buffer_size=2, concurrency=2)
    flow.join("abc")
    for client in "abc":
        flow.update(client)
    flow.commit()


def _messages() -> None:
    run = Run()
    run.post(asked(message(NORTH), message(SOUTH)))
    run.reply(NORTH, 1)
    run.reply(SOUTH, 2)


def _one_version_more(self: RunMachine, commit: Commit, now: float) -> Effects:
    effects = COMMITTED(self, commit, now)
    self.ledger.version = Version(self.ledger.version + 1)
    return effects


def _all_late(round_: Round) -> None:
    round_.record.carried = [round_._as_stale(update) for update in round_.late.values()]


BUGS: dict[str, tuple[int, type, str, Any, Callable[[], None]]] = {
    "a client counts twice": (1, Round, "_take_late", _all_late, _late_and_fresh),
    "a buffer takes no update": (2, Buffer, "take", lambda self, update: None, _asynchronous),
    "a late update vanishes": (2, Ledger, "carry", lambda self, update, into=None: [], _late_and_fresh),
    "below the quorum": (4, Round, "_reachable", lambda self, more=(): 9, _below_quorum),
    "a round does not end": (4, Round, "_settle", lambda self, now: (), _late_and_fresh),
    "a commit makes two versions": (5, RunMachine, "_committed", _one_version_more, _asynchronous),
    "a message stays in its queue": (1, Deliveries, "_dequeue", lambda self, sent, now: (), _messages),
    "an exchange does not close": (4, Exchange, "settle", lambda self, now, linger: False, _messages),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_named_with_its_invariant_by_the_event_that_shows_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, where, method, bug, run = BUGS[name]
    run()  # without the bug all holds
    monkeypatch.setattr(where, method, bug)
    with pytest.raises(Violation) as caught:
        run()
    assert caught.value.invariant == number, caught.value
    assert str(caught.value).startswith(f"architecture, invariant {number}"), caught.value


def test_an_update_that_the_policy_refuses_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    _partial()
    monkeypatch.setattr("atoll.server.rounds.cohort_round.fault_of", lambda *update, **more: None)
    with pytest.raises(Violation, match=r"^architecture, invariant 3, round 1: .*work=0\.5"):
        _partial()


def test_an_update_after_the_deadline_is_not_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Round, "deadline", None)  # no timer runs
    drive = Drive(cohort_size=3, deadline=60.0)
    drive.begin("abc", at=0)
    with pytest.raises(Violation, match=r"^architecture, invariant 3, round 1: .* came at 1070\.0, after 1060\.0"):
        drive.update("a", at=70)


def test_a_reply_without_its_content_is_lost() -> None:
    run = Run()
    run.post(asked(message(NORTH), message(SOUTH)))
    run.reply(NORTH, 1)
    run.machine.ledger.open[1].sent[0].reply = None
    with pytest.raises(
        Violation, match=r"^architecture, invariant 2, exchange 1: message 1 is reported with reply None"
    ):
        run.machine.validate()


def test_a_check_changes_nothing() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0)
    drive.begin("ab", at=0)
    drive.update("a", at=10)
    before = encode_ledger(drive.machine.ledger)
    drive.machine.validate()
    assert encode_ledger(drive.machine.ledger) == before
