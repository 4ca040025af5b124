"""Rounds with secure sums: schedules of crashes and losses on both sides end with exact sums or a clean end."""

import random
from dataclasses import replace

import pytest

from atoll.aggregation.masked.no_sum import NoSum
from atoll.protocol.secure.messages import Boxes, Gone, Roster, Survivors
from atoll.protocol.vocabulary import AbandonReason, CloseReason, FailureReason, Fate, RejectReason, RoundId, RunState
from atoll.server.rounds import events as ev
from atoll.server.rounds.events import Aggregated, AggregationFailed, ClientFailed, Invite
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.session_events import TellMember
from atoll.server.views.sentences import sentences
from tests.server.rounds.secure_federation import SecureRun, fates, is_reported
from tests.server.rounds.secure_schedules import BadSchedule, judged_all
from tests.server.sessions.small_federation import SIZE


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


class Poisoned(SecureRun):
    """A run whose sums with the bad site are dropped, as longer than their members may make them."""

    bad = "site-04"

    def aggregate(self, effect):
        dropped = {summed.session: "its norm is 9" for summed in effect.sums if self.bad in summed.members}
        self.post(Aggregated(effect.round_id, f"model-{effect.base_version + 1}", dropped, (0,)))


def test_a_client_that_was_only_in_dropped_sums_is_named_and_rests_and_the_others_do_not():
    run = Poisoned(12, random.Random(2), rounds=7, quorum=3, sessions=3)
    assert run.run()
    ledger = run.machine.ledger
    assert ledger.past[RoundId(5)].only_dropped == {}
    assert ledger.past[RoundId(6)].only_dropped == {run.bad: 6}
    assert run.bad not in ledger.past[RoundId(7)].clients
    assert len(ledger.past[RoundId(7)].clients) == 11
    assert [*ledger.membership.resting()] == [run.bad]
    assert ledger.membership.members[run.bad].trouble.reason == "dropped_sums"
    assert all(member.dropped_sums < 6 for name, member in ledger.membership.members.items() if name != run.bad)
    run.crash()  # the replay of the journal gives the same ledger, or it fails


class Broken(Poisoned):
    """A run in whose rounds, from a number on, no sum counts: every session has a bad site."""

    breaks_from = 4

    def aggregate(self, effect):
        if effect.round_id < self.breaks_from:
            super().aggregate(effect)
        else:
            error = NoSum({summed.session: "its norm is 9" for summed in effect.sums})
            self.post(AggregationFailed(effect.round_id, str(error), error.dropped))


def test_sums_of_a_round_in_which_none_counts_are_dropped_and_counted_for_their_members():
    run = Broken(12, random.Random(2), rounds=4, quorum=3, sessions=3)
    run.run()
    record, members = run.machine.ledger.past[RoundId(4)], run.machine.ledger.membership.members
    assert (record.phase, record.abandon_reason) == ("abandoned", "secure_failed")
    assert all(each.is_dropped and each.detail == "its norm is 9" for each in record.sums)
    assert all(member.dropped_sums for member in members.values())
    assert members[run.bad].dropped_sums == 3 + 2  # a site signs two sums from one model, so a third fails
    assert {row.unused_because for row in record.clients.values()} == {"its session has no sum: its norm is 9"}
    run.crash()  # the replay of the journal gives the same ledger, or it fails


class Stumbling(SecureRun):
    """A run in whose first round one site fails, and rests for no time."""

    stumbler = "site-01"

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.rules = replace(self.rules, policy=self.rules.policy.model_copy(update={"failure_rest": 0.0}))
        self.machine, self.failures = RunMachine(self.rules), 0

    def send(self, effect):
        if not isinstance(effect, Invite) or effect.client_id != self.stumbler or effect.round_id > 1:
            return super().send(effect)
        failed = ClientFailed(self.stumbler, effect.round_id, FailureReason.TRAINING_FAILED, "no data")
        self.queue.append(lambda: self.post(failed))

    def open(self, round_id, summed):
        self.failures = max(self.failures, self.machine.ledger.membership.members[self.stumbler].trouble.failures)
        super().open(round_id, summed)


def test_an_update_in_a_sum_that_counts_ends_the_count_of_its_clients_failures():
    run = Stumbling(5, random.Random(3), rounds=2)
    assert run.run()
    assert run.stumbler in run.opened[-1][2]
    assert (run.failures, run.machine.ledger.membership.members[run.stumbler].trouble.failures) == (1, 0)
    run.crash()


def test_a_client_in_dropped_sums_has_a_sentence_in_the_record():
    run = Poisoned(12, random.Random(2), rounds=6, quorum=3, sessions=3)
    assert run.run()
    told = " ".join(sentences(run.machine.ledger.past[RoundId(6)]))
    assert "site-04 rests: in 6 rounds in a row the sum with its update was dropped for what was added" in told
    assert "site-00 rests" not in told


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
    assert "session 0, attempt 1: 2 members with keys; needed: 3 in any sum: a larger round.cohort_size" in last.detail
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


def test_another_attempt_opens_the_sum_of_all_also_of_those_whose_masked_updates_were_in():
    run = SecureRun(4, random.Random(1), rounds=1)
    silent, upload = [*run.sites][2:], run.upload

    def upload_late(name, number):
        if name not in silent or run.work[name, number].pending[1] > 1:
            upload(name, number)

    run.upload = upload_late
    assert run.run()
    assert run.opened == [(1, 0, tuple(run.sites))]
    record = run.machine.ledger.past[RoundId(1)]
    assert record.sums[0].attempt == 2
    assert is_reported(record)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("before", "arrivals"), [("accepted", 2), ("refused", 4), ("not there", 2)])
def test_a_masked_update_of_a_failed_attempt_is_in_no_sum(seed, before, arrivals):
    run = SecureRun(4, random.Random(seed), rounds=1)
    silent, upload, told, again = [*run.sites][2:], run.upload, run.send, []

    def upload_late(name, number):
        if name not in silent or run.work[name, number].pending[1] > 1:
            upload(name, number)

    def send(effect):
        told(effect)
        if getattr(effect, "attempt", 0) != 2 or (effect.client_id in silent) == (before == "accepted"):
            return
        if isinstance(effect.question, Boxes) or (isinstance(effect.question, Roster) and before == "refused"):
            first = next(digest for digest in run.work[effect.client_id, 1].masked)
            run.accepted.setdefault(first, run.work[effect.client_id, 1].masked[first])
            # a network has kept it, as the client has long begun another upload
            late = ev.Update(effect.client_id, RoundId(1), run.base_of(1), first, 1, 1.0, 4 * SIZE, attempt=1)
            run.post(ev.UpdateReceived(late))
            again.append(first)

    run.upload, run.send = upload_late, send
    assert run.run()
    assert len(again) == arrivals
    assert run.refused == [RejectReason.NOT_IN_SESSION] * len(again)
    assert run.opened == [(1, 0, tuple(run.sites))]


def test_the_seeds_have_every_fault_and_every_end():
    seen = judged_all(range(60))
    assert {RunState.FINISHED, RunState.FAILED, "crash", "session_lost", "attempts", "sums", "mesh"} <= seen.keys()


def test_a_wrong_sum_is_found_with_the_seed_that_repeats_it(monkeypatch):
    streams_of = SecureRun.streams_of
    monkeypatch.setattr(SecureRun, "streams_of", lambda self, summed: (streams_of(self, summed)[0][1:], []))
    with pytest.raises(BadSchedule, match=r"seed=\d+: AssertionError"):
        judged_all(range(10))


def unpinned(run, name, by):
    """Let some sites not know the key of another one."""
    for site in by:
        del run.sites[site].pinned[name]


@pytest.mark.parametrize("count", [4, 5, 7])
def test_a_member_that_the_others_do_not_trust_loses_its_place_and_the_round_opens(count):
    run = SecureRun(count, random.Random(count), rounds=1)
    *others, stranger = run.sites
    unpinned(run, stranger, others)
    assert run.run()
    assert run.opened == [(1, 0, tuple(others))]
    record = run.machine.ledger.past[RoundId(1)]
    assert {name for name, fate in fates(record).items() if fate is Fate.REPORTED} == {*others}
    row, of = record.clients[stranger], record.sums[0]
    assert (row.fate, row.reason) == (Fate.FAILED, "session_refused")
    assert f"the key of {stranger} is not pinned" in row.detail
    assert (of.attempt, of.left_out, {each.by for each in of.refusals}) == (2, [stranger], {*others})
    said = next(line for line in sentences(record) if line.startswith(f"{stranger} was left out"))
    assert f"`atoll site trust {stranger} FINGERPRINT` at {', '.join(others[:-1])} and {others[-1]}" in said
    assert run.machine.ledger.membership.failures(stranger) == 1
    assert {run.machine.ledger.membership.failures(name) for name in others} == {0}


def test_one_member_that_refuses_another_costs_itself_its_place_where_the_others_are_enough():
    run = SecureRun(5, random.Random(5), rounds=1)
    first, *others = run.sites
    unpinned(run, others[0], [first])
    assert run.run()
    assert run.opened == [(1, 0, tuple(others))]
    record = run.machine.ledger.past[RoundId(1)]
    assert (record.sums[0].attempt, record.sums[0].left_out) == (1, [])
    assert record.clients[first].fate is Fate.FAILED
    assert run.machine.ledger.membership.failures(first) == 1


def test_a_liar_that_refuses_all_others_is_the_one_that_is_left_out():
    run = SecureRun(5, random.Random(6), rounds=1)
    liar, lost, *honest = run.sites
    unpinned(run, lost, honest[:1])
    for name in (lost, *honest):
        unpinned(run, name, [liar])
    assert run.run()
    assert run.opened == [(1, 0, tuple(honest))]  # the refused one of two is left out, too
    assert run.machine.ledger.past[RoundId(1)].sums[0].left_out == [liar, lost]


def test_of_two_first_the_refused_one_is_left_out_then_the_one_that_refuses():  # dishonest move 53
    run = SecureRun(5, random.Random(7), rounds=1)
    liar, lost, *honest = run.sites
    asked = run.at_site

    def at_site(effect):
        attempt = getattr(effect, "attempt", 0)
        if isinstance(effect, TellMember) and (effect.client_id, attempt) == (lost, 1):
            run.gone(lost, 1, 0, 1, Gone("session_lost: it was restarted"))
        elif isinstance(effect, TellMember) and effect.client_id == liar:
            named = {1: honest[0], 2: honest[1]}[attempt]
            run.gone(liar, 1, 0, attempt, Gone("session_refused: a lie", (named,)))
        else:
            asked(effect)

    run.at_site = at_site
    assert run.run()
    of = run.machine.ledger.past[RoundId(1)].sums[0]
    assert [(each.by, each.of) for each in of.refusals] == [(liar, honest[:1]), (liar, honest[1:2])]
    assert (of.attempt, of.left_out) == (3, [liar])
    assert run.opened == [(1, 0, tuple(honest))]


@pytest.mark.parametrize("seed", range(60))
def test_whoever_refuses_whom_sums_are_exact_and_their_members_trust_each_other(seed):
    draw = random.Random(seed)
    count, faults = draw.randint(3, 9), draw.choice([0.0, 0.01, 0.05])
    run = SecureRun(count, draw, faults=faults, attempts=draw.randint(1, 4))
    names = [*run.sites]
    lacking = {(draw.choice(names), draw.choice(names)) for _ in range(draw.randint(1, count))}
    for by, of in lacking:
        run.sites[by].pinned.pop(of, None)
    run.run()
    for _, _, members in run.opened:
        assert not [pair for pair in lacking if {*pair} <= {*members} and pair[0] != pair[1]]


def test_keys_that_no_roster_could_have_twice_cost_their_sender_its_place():
    run = SecureRun(5, random.Random(8), rounds=1)
    *others, copier = run.sites
    run.sites[copier].key = run.sites[others[0]].key  # one site under two names
    assert run.run()
    (_, _, members), *_ = run.opened
    assert len(members) == 4
    row = run.machine.ledger.past[RoundId(1)]
    left = [each.detail for each in row.clients.values() if each.fate is Fate.FAILED]
    assert len(left) == 1
    assert "one site would count twice" in left[0]
