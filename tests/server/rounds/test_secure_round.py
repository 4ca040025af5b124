"""Rounds with secure sums: schedules of crashes and losses on both sides end with exact sums or a clean end."""

import random

import pytest

from atoll.protocol.secure.messages import Gone, Survivors
from atoll.protocol.vocabulary import AbandonReason, CloseReason, Fate, RejectReason, RoundId, RunState
from atoll.server.rounds.session_events import TellMember
from tests.server.rounds.secure_federation import SecureRun, fates, is_reported
from tests.server.rounds.secure_schedules import BadSchedule, judged_all


def test_two_rounds_open_the_sums_of_all_members():
    run = SecureRun(4, random.Random(1))
    assert run.run()
    names = tuple(run.sites)
    assert run.opened == [(1, 0, names), (2, 0, names)]
    assert is_reported(run.machine.ledger.past[RoundId(2)])
    assert not run.reasons


def test_a_large_cohort_is_several_sessions_and_each_opens_its_sum():
    run = SecureRun(11, random.Random(2), session_max=4, rounds=1)
    assert run.run()
    assert sorted(len(members) for _, _, members in run.opened) == [3, 4, 4]
    assert sorted(name for _, _, members in run.opened for name in members) == [*run.sites]


def test_a_cohort_too_small_for_its_sessions_has_fewer_of_them():
    run = SecureRun(5, random.Random(3), rounds=1, sessions=2)
    assert run.run()
    assert [len(members) for _, _, members in run.opened] == [5]


def test_fewer_than_three_clients_open_nothing():
    run = SecureRun(2, random.Random(3), rounds=1)
    assert not run.run()
    assert run.machine.ledger.state is RunState.FAILED
    last = run.machine.ledger.past[max(run.machine.ledger.past)]
    assert last.abandon_reason is AbandonReason.SECURE_FAILED
    assert "session 0, attempt 1: 2 members; needed: 3" in last.detail
    assert Fate.JOINED not in fates(last).values()


SEEDS = [range(first, first + 50) for first in range(0, 1000, 50)]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_a_schedule_of_faults_opens_exact_sums_or_ends(seeds):
    """A thousand, over 3 to 12 sites; `make soak` has ten thousand."""
    seen = judged_all(seeds)
    assert seen["sums"] > seen["crash"] / 10
    assert seen[RunState.FINISHED]
    assert seen["mesh"]


def test_a_client_that_was_restarted_before_its_keys_came_is_not_waited_for():
    run = SecureRun(4, random.Random(1), rounds=1)
    (killed, *others), invited = run.sites, run.invited

    def invited_again(name, number, base, place):
        if name == killed:
            run.gone(name, number, place.session, place.attempt, Gone("session_lost: it was restarted"))
        else:
            invited(name, number, base, place)

    run.invited = invited_again
    assert run.run()
    record = run.machine.ledger.past[RoundId(1)]
    assert record.close_reason is CloseReason.ALL_ANSWERED
    assert (record.clients[killed].fate, record.clients[killed].sum.left) == (
        Fate.FAILED,
        "session_lost: it was restarted",
    )
    assert run.opened == [(1, 0, tuple(others))]


def test_a_masked_update_that_comes_after_the_survivors_were_told_is_refused():
    run = SecureRun(5, random.Random(1), rounds=1)
    (late, *others), upload = run.sites, run.upload
    run.upload = lambda name, number: None if name == late else upload(name, number)
    told = run.send

    def send(effect):
        told(effect)
        if isinstance(effect, TellMember) and isinstance(effect.question, Survivors):
            run.queue.append(lambda: upload(late, 1))

    run.send = send
    assert run.run()
    assert {*run.refused} == {RejectReason.NOT_IN_SESSION}
    assert run.opened == [(1, 0, tuple(others))]


def test_the_seeds_have_every_fault_and_every_end():
    seen = judged_all(range(60))
    assert {RunState.FINISHED, RunState.FAILED, "crash", "session_lost", "attempts", "sums", "mesh"} <= seen.keys()


def test_a_wrong_sum_is_found_with_the_seed_that_repeats_it(monkeypatch):
    streams_of = SecureRun.streams_of
    monkeypatch.setattr(SecureRun, "streams_of", lambda self, summed: (streams_of(self, summed)[0][1:], []))
    with pytest.raises(BadSchedule, match=r"seed=\d+: AssertionError"):
        judged_all(range(10))
