"""One round, rule by rule: each field of `StragglerPolicy` has its tests here, with numbers by hand."""

from dataclasses import replace
from typing import Any

import pytest

from atoll.protocol.vocabulary import (
    AbandonReason,
    ClientId,
    CloseReason,
    Digest,
    FailureReason,
    Fate,
    LossReason,
    Phase,
    RejectReason,
    RoundId,
    RunState,
    Version,
)
from atoll.server.journal.codec import decode_record, encode_record
from atoll.server.members.member import Candidate, Profile
from atoll.server.rounds.events import (
    Abandon,
    Accept,
    Aggregate,
    Aggregated,
    AggregationFailed,
    AmendRecord,
    ClientDisconnected,
    ClientFailed,
    ClientJoined,
    ClientLost,
    CohortDrawn,
    Commit,
    CoordinatorStarted,
    DrawCohort,
    Effect,
    Event,
    Invite,
    Reject,
    Release,
    RoundDue,
    RunStarted,
    SamplerFailed,
    TimePassed,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)
from atoll.server.rounds.policy import FIRST_WAIT_S, StragglerPolicy
from atoll.server.rounds.record import ClientRecord, RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from atoll.server.views.sentences import sentences


class Drive:
    """A run under a policy, driven by events whose times are in seconds since its start."""

    def __init__(self, rounds: int = 3, rules: dict[str, Any] | None = None, **policy: Any) -> None:
        at_once = {"retry_wait": 0.0, "failure_rest": 0.0}  # waits have their own tests: test_retries.py
        self.rules = RunRules(policy=StragglerPolicy(**(at_once | policy)), rounds=rounds, **(rules or {}))
        self.machine = RunMachine(self.rules)
        self.now = 1000.0
        self.effects: list[Effect] = []
        self.do(RunStarted(Digest("v0")))

    def do(self, event: Event, at: float | None = None) -> list[Effect]:
        """Deliver an event, `at` seconds after the start, and return its effects."""
        self.now = self.now if at is None else 1000.0 + at
        decided = list(self.machine.receive(event, self.now))
        self.effects += decided
        return decided

    def join(self, clients: str, at: float | None = None, working_on: tuple[int, ...] = ()) -> list[Effect]:
        rounds = tuple(map(RoundId, working_on))
        self.now = self.now if at is None else 1000.0 + at
        joined = [self.do(ClientJoined(ClientId(c), f"{c}@{self.now}", Profile(), rounds)) for c in clients]
        return [effect for effects in joined for effect in effects]

    def begin(self, clients: str, cohort: str | None = None, at: float | None = None) -> list[Effect]:
        """Let clients join, open a round, draw and invite its cohort."""
        self.join(clients, at)
        drawn = [e for e in self.do(RoundDue()) if isinstance(e, DrawCohort)]
        assert drawn, "no cohort was asked for"
        return self.draw(cohort or clients)

    def draw(self, cohort: str) -> list[Effect]:
        return self.do(CohortDrawn(self.record.round_id, tuple(map(ClientId, cohort))))

    def update(self, client: str, at: float | None = None, round_id: int | None = None, **claims: Any) -> list[Effect]:
        number = RoundId(round_id or self.newest)
        record = self.machine.record_of(number)
        base = record.base_version if record else Version(0)
        digest = Digest(f"{client}{number}")
        return self.do(UpdateReceived(replace(Update(ClientId(client), number, base, digest, 10, 1.0), **claims)), at)

    def upload_begins(self, client: str, at: float | None = None) -> list[Effect]:
        return self.do(UploadBegun(ClientId(client), RoundId(self.newest)), at)

    def lose(self, client: str, at: float | None = None, why: LossReason = LossReason.LEASE_EXPIRED) -> list[Effect]:
        return self.do(ClientLost(ClientId(client), why), at)

    def tick(self, at: float) -> list[Effect]:
        return self.do(TimePassed(), at)

    def fold(self, at: float | None = None) -> list[Effect]:
        return self.do(Aggregated(RoundId(self.newest), Digest("next")), at)

    @property
    def newest(self) -> int:
        return self.machine.ledger.next_round - 1

    @property
    def record(self) -> RoundRecord:
        record = self.machine.record_of(RoundId(self.newest))
        assert record is not None
        return record

    def row(self, client: str, round_id: int | None = None) -> ClientRecord:
        record = self.machine.record_of(RoundId(round_id or self.newest))
        assert record is not None
        return record.clients[ClientId(client)]

    @property
    def deadline(self) -> float | None:
        """Seconds after the start."""
        return None if self.machine.deadline is None else round(self.machine.deadline - 1000.0, 6)


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def verdict(effects: list[Effect]) -> RejectReason | str:
    answers = [e for e in effects if isinstance(e, Accept | Reject)]
    assert len(answers) == 1
    answer = answers[0]
    if isinstance(answer, Reject):
        return answer.reason
    return "carried" if answer.carried else "accepted"


def released(effects: list[Effect]) -> dict[str, bool]:
    """Return the released clients, each with whether it may still send the work that it has done."""
    return {e.client_id: e.submit for e in effects if isinstance(e, Release)}


def scales(effects: list[Effect]) -> dict[str, float]:
    [aggregate] = [e for e in effects if isinstance(e, Aggregate)]
    return {c.client_id: round(c.scale, 6) for c in aggregate.contributions}


# ---------------------------------------------------------------- cohort_size, over_selection


def test_cohort_size_closes_the_round_as_soon_as_the_wanted_updates_are_in() -> None:
    drive = Drive(cohort_size=2, over_selection=1.5, quorum=1, deadline=60.0)
    invited = drive.begin("abc")
    assert [e.client_id for e in invited if isinstance(e, Invite)] == ["a", "b", "c"]
    assert kinds(drive.update("a", at=5)) == ["Accept"]
    effects = drive.update("c", at=6)
    assert kinds(effects) == ["Accept", "Release", "Aggregate"]
    assert released(effects) == {"b": False}
    assert drive.record.close_reason is CloseReason.ENOUGH
    assert drive.row("b").fate is Fate.RELEASED
    assert kinds(drive.fold(at=7))[0] == "Commit"
    assert drive.row("a", 1).used_in == 1


@pytest.mark.parametrize(("cohort", "factor", "invited"), [(10, 1.3, 13), (10, 1.1, 11), (3, 1.5, 5), (4, 1.0, 4)])
def test_over_selection_invites_the_next_whole_number_of_clients(cohort: int, factor: float, invited: int) -> None:
    drive = Drive(cohort_size=cohort, over_selection=factor)
    drive.do(RoundDue())
    asked = drive.join("abcdefghijklmnop"[:invited])
    [draw] = [e for e in asked if isinstance(e, DrawCohort)]
    assert draw.count == invited
    assert [c.client_id for c in draw.candidates] == list("abcdefghijklmnop"[:invited])


def test_a_cohort_is_drawn_from_all_who_are_there_and_in_order_of_name() -> None:
    drive = Drive(cohort_size=1)
    drive.join("cab")
    [draw] = drive.do(RoundDue())
    assert isinstance(draw, DrawCohort)
    assert (draw.count, [c.client_id for c in draw.candidates]) == (1, ["a", "b", "c"])


# ---------------------------------------------------------------- quorum


def test_quorum_commits_at_the_deadline_with_fewer_than_wanted() -> None:
    drive = Drive(cohort_size=3, quorum=2, deadline=60.0)
    drive.begin("abc")
    drive.update("a", at=5)
    drive.update("b", at=6)
    effects = drive.tick(at=60)
    assert kinds(effects) == ["Release", "Aggregate"]
    assert drive.record.close_reason is CloseReason.DEADLINE
    assert drive.row("c").fate is Fate.STRAGGLER


def test_quorum_missed_at_the_deadline_abandons() -> None:
    drive = Drive(cohort_size=3, quorum=2, deadline=60.0)
    drive.begin("abc")
    drive.update("a", at=5)
    effects = drive.tick(at=60)
    assert kinds(effects) == ["Release", "Release", "Abandon", "OpenNextRound"]
    assert drive.record.abandon_reason is AbandonReason.BELOW_QUORUM
    assert drive.row("a", 1).unused_because == "the round was abandoned: below_quorum"
    assert drive.machine.ledger.version == 0


def test_quorum_out_of_reach_abandons_at_once() -> None:
    drive = Drive(cohort_size=3, quorum=2, deadline=60.0)
    drive.begin("abc")
    assert drive.lose("a", at=3) == []
    effects = drive.do(ClientFailed(ClientId("b"), RoundId(1), FailureReason.TRAINING_FAILED, "nan"), at=4)
    assert kinds(effects) == ["Release", "Abandon", "OpenNextRound"]
    assert drive.record.abandon_reason is AbandonReason.QUORUM_OUT_OF_REACH
    assert (drive.row("a").fate, drive.row("b").fate) == (Fate.LOST, Fate.FAILED)
    assert (drive.row("b").reason, drive.row("b").detail) == ("training_failed", "nan")


def test_a_quorum_that_a_silent_client_can_still_make_waits_for_the_deadline() -> None:
    """Its line was cut for longer than the lease, and its finished update comes afterwards."""
    drive = Drive(cohort_size=2, quorum=2, deadline=600.0)
    drive.begin("ab")
    drive.update("b", at=5)
    assert drive.lose("a", at=40) == []
    assert drive.record.phase is Phase.COLLECTING
    assert kinds(drive.join("a", at=390)) == ["Invite"]
    assert kinds(drive.update("a", at=400)) == ["Accept", "Aggregate"]
    assert drive.record.close_reason is CloseReason.ENOUGH


def test_a_silent_client_is_awaited_by_the_deadline_alone() -> None:
    drive = Drive(cohort_size=2, quorum=2, deadline=600.0)
    drive.begin("ab")
    drive.update("b", at=5)
    drive.lose("a", at=40)
    assert "Abandon" in kinds(drive.tick(at=600))
    assert drive.record.abandon_reason is AbandonReason.BELOW_QUORUM


def test_a_round_that_waits_for_a_silent_client_ends_when_another_cohort_can_make_the_quorum() -> None:
    drive = Drive(cohort_size=2, quorum=2, deadline=600.0)
    drive.begin("ab")
    assert drive.lose("a", at=40) == []
    assert kinds(drive.join("c", at=50)) == ["Release", "Abandon", "OpenNextRound"]
    assert drive.record.abandon_reason is AbandonReason.QUORUM_OUT_OF_REACH


@pytest.mark.parametrize("why", [LossReason.LEFT, LossReason.REVOKED])
def test_a_client_that_has_left_is_not_awaited_even_if_it_was_silent_before(why: LossReason) -> None:
    drive = Drive(cohort_size=2, quorum=2, deadline=600.0)
    drive.begin("ab")
    assert drive.lose("a", at=40) == []
    assert "Abandon" in kinds(drive.lose("a", at=41, why=why))


def test_a_quorum_without_the_silent_client_waits_for_nobody() -> None:
    drive = Drive(cohort_size=3, quorum=2, deadline=600.0)
    drive.begin("abc")
    drive.update("b", at=5)
    drive.update("c", at=6)
    assert kinds(drive.lose("a", at=40)) == ["Aggregate"]


def test_the_round_closes_when_everyone_has_answered() -> None:
    drive = Drive(cohort_size=3, quorum=1, deadline=60.0)
    drive.begin("abc")
    drive.update("a", at=1)
    drive.lose("b", at=2)
    assert kinds(drive.do(UpdateRefused(ClientId("c"), RoundId(1), RejectReason.NOT_FINITE), at=3)) == ["Aggregate"]
    assert drive.record.close_reason is CloseReason.ALL_ANSWERED
    assert drive.row("c").fate is Fate.REFUSED


def test_quorum_as_a_fraction_is_rounded_up() -> None:
    drive = Drive(cohort_size=3, quorum=0.5, deadline=60.0)
    drive.begin("abc")
    assert drive.record.quorum == 2


# ---------------------------------------------------------------- deadline


def test_deadline_counts_from_the_invitation() -> None:
    drive = Drive(cohort_size=1, deadline=60.0)
    drive.join("a", at=7)
    drive.do(RoundDue(), at=8)
    [invitation] = drive.do(CohortDrawn(RoundId(1), (ClientId("a"),)), at=10)
    assert isinstance(invitation, Invite)
    assert invitation.deadline == 1070.0
    assert drive.deadline == 70


def test_deadline_takes_effect_before_what_arrives_when_the_driver_wakes_late() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0)
    drive.begin("ab")
    drive.update("a", at=5)
    effects = drive.update("b", at=60.5)
    assert kinds(effects)[:2] == ["Release", "Aggregate"]
    assert verdict(effects) is RejectReason.TOO_LATE
    assert drive.row("b").fate is Fate.LATE


def measured(drive: Drive, client: str, download: float, train: float, upload: float, at: float) -> None:
    drive.upload_begins(client, at=at - upload)
    drive.update(client, at=at, download_seconds=download, train_seconds=train)


def test_adaptive_deadline_is_the_margin_times_the_slowest_that_is_needed() -> None:
    """Measured: a 1+10+2 = 13 s, b 2+20+3 = 25 s, c 1+40+4 = 45 s. Two of three are needed: 1.5 * 25 = 37.5 s."""
    policy = {"deadline": "adaptive", "deadline_max": 300.0, "deadline_min": 5.0, "adaptive_margin": 1.5}
    drive = Drive(cohort_size=3, quorum=1, **policy)
    drive.begin("abc")
    assert drive.deadline == 300  # nothing has been measured
    measured(drive, "a", 1, 10, 2, at=20)
    measured(drive, "b", 2, 20, 3, at=30)
    measured(drive, "c", 1, 40, 4, at=50)
    drive.fold(at=50)
    two = Drive(cohort_size=2, over_selection=1.5, quorum=1, **policy)
    two.machine.ledger.membership = drive.machine.ledger.membership
    two.now = drive.now
    two.begin("abc", at=100)
    assert two.deadline == 137.5


def test_adaptive_deadline_averages_what_it_measures_by_halves() -> None:
    """First 10 s, then 20 s of training: 0.5 * 10 + 0.5 * 20 = 15 s, and no upload or download: 2 * 15 = 30 s."""
    drive = Drive(cohort_size=1, deadline="adaptive", adaptive_margin=2.0, deadline_max=300.0)
    for train, at in ((10, 20.0), (20, 60.0)):
        drive.begin("a", at=at - 15)
        drive.update("a", at=at, train_seconds=train)
        drive.fold()
    drive.begin("a", at=100)
    assert drive.deadline == 130


def test_adaptive_deadline_extrapolates_partial_work() -> None:
    """Half of the work took 10 s, so the whole takes 20 s: 1.5 * 20 = 30 s."""
    drive = Drive(cohort_size=1, deadline="adaptive", deadline_max=300.0)
    drive.begin("a")
    drive.update("a", at=15, train_seconds=10.0, work=0.5)
    drive.fold()
    drive.begin("a", at=100)
    assert drive.deadline == 130


def test_adaptive_deadline_of_a_fast_client_is_short() -> None:
    drive = Drive(cohort_size=1, deadline="adaptive", adaptive_margin=2.0, deadline_min=0.1)
    drive.begin("a")
    drive.update("a", at=15, train_seconds=0.25)
    drive.fold()
    drive.begin("a", at=100)
    assert drive.deadline == 100.5


@pytest.mark.parametrize(("train", "expected"), [(1.0, 5.0), (1000.0, 90.0), (20.0, 30.0)])
def test_adaptive_deadline_stays_between_deadline_min_and_deadline_max(train: float, expected: float) -> None:
    drive = Drive(cohort_size=1, deadline="adaptive", deadline_min=5.0, deadline_max=90.0)
    drive.begin("a")
    drive.update("a", at=15, train_seconds=train)
    drive.fold()
    drive.begin("a", at=100)
    assert drive.deadline == 100 + expected


def test_adaptive_deadline_is_deadline_max_while_a_needed_client_was_never_measured() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline="adaptive", deadline_max=80.0)
    drive.begin("ab")
    drive.update("a", at=15, train_seconds=10.0)
    drive.tick(at=80)
    drive.fold()
    drive.do(RoundDue(), at=100)
    drive.draw("ab")
    assert drive.deadline == 180


# ---------------------------------------------------------------- linger


def test_linger_waits_for_more_once_the_quorum_is_in() -> None:
    drive = Drive(cohort_size=3, quorum=1, deadline=60.0, linger=10.0)
    drive.begin("abc")
    drive.update("a", at=20)
    assert drive.deadline == 30
    drive.update("b", at=25)
    assert drive.deadline == 30  # from the quorum, not from the last update
    effects = drive.tick(at=30)
    assert kinds(effects) == ["Release", "Aggregate"]
    assert drive.record.close_reason is CloseReason.LINGER_OVER
    assert drive.row("c").fate is Fate.RELEASED


def test_linger_of_nothing_closes_with_the_quorum() -> None:
    drive = Drive(cohort_size=3, quorum=2, deadline=60.0, linger=0.0)
    drive.begin("abc")
    drive.update("a", at=20)
    assert kinds(drive.update("b", at=21)) == ["Accept", "Release", "Aggregate"]
    assert drive.record.close_reason is CloseReason.LINGER_OVER


def test_linger_never_outlasts_the_deadline() -> None:
    drive = Drive(cohort_size=3, quorum=1, deadline=60.0, linger=30.0)
    drive.begin("abc")
    drive.update("a", at=50)
    assert drive.deadline == 60
    drive.tick(at=60)
    assert drive.record.close_reason is CloseReason.DEADLINE


def test_linger_also_ends_the_grace_period() -> None:
    drive = Drive(cohort_size=3, quorum=1, deadline=60.0, linger=10.0, grace=100.0)
    drive.begin("abc")
    drive.upload_begins("a", at=58)
    drive.upload_begins("b", at=59)
    assert drive.tick(at=60) == []
    drive.update("a", at=65)
    assert drive.deadline == 75
    drive.tick(at=75)
    assert drive.record.close_reason is CloseReason.LINGER_OVER


def test_linger_is_not_begun_by_late_updates_alone() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, linger=10.0, late="next_round")
    drive.begin("ab")
    drive.update("a", at=1)
    drive.tick(at=11)
    drive.fold(at=12)
    assert verdict(drive.update("b", at=13, round_id=1)) == "carried"
    drive.do(RoundDue(), at=14)
    drive.draw("ab")
    assert drive.deadline == 74


# ---------------------------------------------------------------- grace


def test_grace_waits_for_uploads_that_were_begun_by_the_deadline() -> None:
    drive = Drive(cohort_size=3, quorum=1, deadline=60.0, grace=20.0)
    drive.begin("abc")
    drive.upload_begins("a", at=59)
    drive.upload_begins("b", at=60.0 - 1e-6)
    assert drive.tick(at=60) == []
    assert drive.deadline == 80
    drive.upload_begins("c", at=61)
    assert verdict(drive.update("c", at=62)) is RejectReason.TOO_LATE  # begun after the deadline
    assert verdict(drive.update("a", at=70)) == "accepted"
    effects = drive.tick(at=80)
    assert kinds(effects) == ["Release", "Aggregate"]
    assert drive.record.close_reason is CloseReason.GRACE_OVER
    assert [drive.row(c).fate for c in "abc"] == [Fate.REPORTED, Fate.STRAGGLER, Fate.LATE]


def test_grace_ends_with_the_last_upload() -> None:
    drive = Drive(cohort_size=3, quorum=1, deadline=60.0, grace=20.0)
    drive.begin("abc")
    drive.upload_begins("a", at=59)
    drive.tick(at=60)
    assert kinds(drive.update("a", at=63)) == ["Accept", "Release", "Release", "Aggregate"]
    assert drive.record.close_reason is CloseReason.DEADLINE


def test_grace_is_not_waited_out_when_the_uploads_cannot_make_the_quorum() -> None:
    drive = Drive(cohort_size=3, quorum=2, deadline=60.0, grace=20.0)
    drive.begin("abc")
    drive.upload_begins("a", at=59)
    assert kinds(drive.tick(at=60)) == ["Release", "Release", "Release", "Abandon", "OpenNextRound"]
    assert drive.record.abandon_reason is AbandonReason.QUORUM_OUT_OF_REACH


def test_grace_below_the_quorum_abandons_when_it_is_over() -> None:
    drive = Drive(cohort_size=2, quorum=2, deadline=60.0, grace=20.0)
    drive.begin("ab")
    drive.upload_begins("a", at=59)
    drive.upload_begins("b", at=59)
    drive.tick(at=60)
    drive.update("a", at=61)
    drive.tick(at=80)
    assert drive.record.abandon_reason is AbandonReason.BELOW_QUORUM


def test_grace_that_is_over_when_the_driver_wakes_takes_nothing() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, grace=20.0)
    drive.begin("ab")
    drive.update("a", at=1)
    drive.upload_begins("b", at=59)
    assert verdict(drive.update("b", at=80)) is RejectReason.TOO_LATE
    assert drive.record.close_reason is CloseReason.GRACE_OVER


# ---------------------------------------------------------------- late, max_staleness, staleness_exponent


def test_late_discard_refuses_an_update_of_a_closed_round() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0)
    drive.begin("ab")
    drive.update("a", at=1)
    drive.tick(at=60)
    effects = drive.update("b", at=62)
    [reject] = effects
    assert isinstance(reject, Reject)
    assert (reject.reason, reject.detail) == (RejectReason.TOO_LATE, "2.0 s after round 1 had closed")
    assert drive.row("b").fate is Fate.LATE


def test_late_is_counted_from_the_end_of_an_abandoned_round() -> None:
    drive = Drive(cohort_size=2, quorum=2, deadline=60.0)
    drive.begin("ab")
    drive.lose("a", at=4, why=LossReason.LEFT)
    [reject] = drive.update("b", at=6, round_id=1)[:1]
    assert isinstance(reject, Reject)
    assert reject.detail == "2.0 s after round 1 had closed"


def test_max_share_bounds_the_weight_of_each_update_and_the_record_says_whose() -> None:
    """a claims 1000 of 1060: with half of the total at most it counts as b and c together."""
    drive = Drive(cohort_size=3, quorum=2, max_share=0.5)
    drive.begin("abc")
    drive.update("a", at=1, num_examples=1000)
    drive.update("b", at=2, num_examples=40)
    (fold,) = [e for e in drive.update("c", at=3, num_examples=20) if isinstance(e, Aggregate)]
    assert [(c.client_id, c.num_examples, c.scale) for c in fold.contributions] == [
        ("a", 60, 1),
        ("b", 40, 1),
        ("c", 20, 1),
    ]
    record = drive.machine.record_of(RoundId(1))
    assert (record.weight_cap, record.capped, record.clients["a"].num_examples) == (60, {"a": 1000}, 1000)
    assert "Capped by max_share: the weight of a (1000) counted as 60." in sentences(record)
    assert decode_record(encode_record(record), where="the journal") == record
    assert repeated(drive) == fold, "after a restart, too"


def repeated(drive: Drive) -> Effect:
    """Return the fold that a restarted coordinator begins again."""
    return next(e for e in drive.do(CoordinatorStarted(drive.now), at=9) if isinstance(e, Aggregate))


def test_max_share_of_less_than_the_quorum_s_part_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"max_share 0\.3 needs at least 4 updates.*quorum is 3: set a quorum of 4, or"
    ):
        StragglerPolicy(cohort_size=5, quorum=3, max_share=0.3)
    StragglerPolicy(cohort_size=3, quorum=3, max_share=1 / 3)
    with pytest.raises(ValueError, match="max_share belongs to mode sync"):
        StragglerPolicy(mode="fedbuff", max_share=0.5, buffer_size=4)


def late_in_next_round(base: int = 0, **policy: Any) -> Drive:
    """Round 1 is committed without b, whose update comes while round 2 collects from a and b."""
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, late="next_round", **policy)
    drive.begin("ab")
    drive.update("a", at=1)
    assert released(drive.tick(at=60)) == {"b": True}
    drive.fold(at=61)
    drive.do(RoundDue(), at=62)
    drive.draw("ab")
    return drive


def test_late_next_round_counts_with_the_discount_in_numerator_and_denominator() -> None:
    """Staleness 1, exponent 1/2: the weight in both sums is 10 * 2 ** -0.5 = 7.07."""
    drive = late_in_next_round()
    assert verdict(drive.update("b", at=63, round_id=1)) == "carried"
    drive.update("a", at=64)
    effects = drive.tick(at=122)
    assert scales(effects) == {"a": 1.0, "b": round(2**-0.5, 6)}
    assert drive.record.carried[0].staleness == 1
    drive.fold(at=123)
    row = drive.row("b", 1)
    assert (row.fate, row.used_in, row.unused_because) == (Fate.CARRIED, 2, "")


@pytest.mark.parametrize(("exponent", "scale"), [(0.0, 1.0), (1.0, 0.5), (2.0, 0.25)])
def test_staleness_exponent_shapes_the_discount(exponent: float, scale: float) -> None:
    drive = late_in_next_round(staleness_exponent=exponent)
    drive.update("b", at=63, round_id=1)
    drive.update("a", at=64)
    assert scales(drive.tick(at=122))["b"] == scale


def test_late_next_round_is_superseded_by_a_fresh_update_of_the_same_client() -> None:
    drive = late_in_next_round()
    drive.update("b", at=63, round_id=1)
    drive.update("b", at=64)
    effects = drive.update("a", at=65)
    assert scales(effects) == {"a": 1.0, "b": 1.0}
    assert drive.record.superseded == ["b1"]
    drive.fold(at=66)
    row = drive.row("b", 1)
    assert (row.used_in, row.unused_because) == (None, "superseded by the update of round 2")


def test_late_update_counts_towards_the_quorum_and_its_client_once() -> None:
    drive = late_in_next_round()
    drive.update("b", at=63, round_id=1)
    assert drive.lose("a", at=64) == []
    effects = drive.lose("b", at=65)
    assert kinds(effects) == ["Aggregate"]  # the late update alone makes the quorum of 1
    assert list(scales(effects)) == ["b"]


def test_max_staleness_refuses_what_is_too_old_when_it_would_count() -> None:
    drive = late_in_next_round(max_staleness=1)
    drive.update("a", at=63)
    drive.tick(at=122)
    effects = drive.update("b", at=123, round_id=1)  # round 2 aggregates: it would count in round 3, two versions on
    assert verdict(effects) is RejectReason.TOO_STALE


def test_max_staleness_of_two_takes_the_same_update() -> None:
    drive = late_in_next_round(max_staleness=2)
    drive.update("a", at=63)
    drive.tick(at=122)
    assert verdict(drive.update("b", at=123, round_id=1)) == "carried"


def test_max_staleness_of_nothing_refuses_an_update_that_misses_its_own_round() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, grace=20.0, late="next_round", max_staleness=0)
    drive.begin("abc"[:2])
    drive.upload_begins("a", at=59)
    drive.tick(at=60)
    assert verdict(drive.update("b", at=61)) is RejectReason.TOO_STALE  # one version old when it would count


def test_late_update_is_refused_when_no_round_follows() -> None:
    drive = Drive(rounds=1, cohort_size=2, quorum=1, deadline=60.0, late="next_round")
    drive.begin("ab")
    drive.update("a", at=1)
    drive.tick(at=60)
    assert verdict(drive.update("b", at=61)) is RejectReason.TOO_LATE


def test_a_late_update_that_misses_a_commit_displaces_none_in_it() -> None:
    """b is late twice: its update of round 1 is in the fold of round 2 when that of round 2 arrives."""
    drive = late_in_next_round(max_staleness=2)
    drive.update("b", at=63, round_id=1)
    drive.update("a", at=64)
    drive.tick(at=122)
    assert verdict(drive.update("b", at=123)) == "carried"
    drive.fold(at=124)
    assert (drive.row("b", 1).used_in, drive.row("b", 1).unused_because) == (2, "")
    drive.do(RoundDue(), at=125)
    drive.draw("ab")
    drive.update("a", at=126)
    assert scales(drive.tick(at=185)) == {"a": 1.0, "b": round(2**-0.5, 6)}


def test_a_late_update_does_not_displace_the_one_that_counts_in_the_open_round() -> None:
    drive = late_in_next_round(grace=20.0, max_staleness=2)
    drive.update("b", at=63, round_id=1)
    drive.upload_begins("a", at=121)
    drive.tick(at=122)
    assert verdict(drive.update("b", at=123)) == "carried"
    effects = drive.update("a", at=124)
    assert scales(effects) == {"a": 1.0, "b": round(2**-0.5, 6)}
    drive.fold(at=125)
    assert (drive.row("b", 1).used_in, drive.row("b", 2).used_in) == (2, None)


def test_next_round_carries_the_accepted_updates_of_an_abandoned_round() -> None:
    drive = Drive(cohort_size=2, quorum=2, deadline=60.0, late="next_round")
    drive.begin("ab")
    drive.update("a", at=1)
    drive.tick(at=60)
    assert drive.row("a").unused_because == ""
    drive.do(RoundDue(), at=61)
    drive.draw("ab")
    effects = drive.update("b", at=62)
    assert kinds(effects) == ["Accept"]  # the quorum of 2 is there, but a may still send a fresh one
    effects = drive.lose("a", at=63)
    assert scales(effects) == {"a": 1.0, "b": 1.0}  # the version has not moved: nothing is stale
    drive.fold(at=64)
    assert drive.row("a", 1).used_in == 2


def test_what_could_not_be_aggregated_is_not_tried_again() -> None:
    drive = late_in_next_round()
    drive.update("b", at=63, round_id=1)
    drive.update("a", at=64)
    drive.tick(at=122)
    drive.do(AggregationFailed(RoundId(2), "out of memory"), at=123)
    assert drive.machine.ledger.carried == {}
    assert drive.row("b", 1).unused_because == "the aggregation of round 2 failed"
    assert drive.row("a", 2).unused_because == "the round was abandoned: aggregation_failed"
    drive.do(RoundDue(), at=124)
    drive.draw("ab")
    drive.update("a", at=125)
    assert scales(drive.tick(at=184)) == {"a": 1.0}


def test_each_round_whose_late_update_could_not_be_aggregated_says_so() -> None:
    drive = Drive(cohort_size=3, quorum=1, deadline=60.0, late="next_round", max_staleness=3)
    drive.begin("abc")
    for number, start in ((1, 0), (2, 100)):
        drive.update("a", at=start + 1)
        drive.tick(at=start + 90)
        drive.fold(at=start + 91)
        drive.do(RoundDue(), at=start + 92)
        drive.draw("abc")
        assert drive.newest == number + 1
    drive.update("b", at=200, round_id=1)
    drive.update("c", at=200, round_id=2)
    drive.update("a", at=201)
    drive.tick(at=300)
    effects = drive.do(AggregationFailed(RoundId(3), "out of memory"), at=301)
    assert [e.round_id for e in effects if isinstance(e, AmendRecord)] == [1, 2]


def test_every_reconnection_is_counted() -> None:
    drive = Drive(cohort_size=2, deadline=60.0)
    drive.begin("ab")
    for second in (1, 3, 5):
        drive.do(
            ClientDisconnected(ClientId("a"), drive.machine.ledger.membership.members[ClientId("a")].session or ""),
            at=second,
        )
        drive.join("a", at=second + 1)
    assert drive.row("a").num_reconnects == 3


def test_a_late_update_that_is_sent_again_gets_the_same_answer_and_changes_nothing() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0)
    drive.begin("ab")
    drive.update("a", at=1)
    drive.tick(at=60)
    drive.fold(at=61)
    [first, amended] = drive.update("b", at=63, round_id=1)
    assert (first.reason, amended) == (RejectReason.TOO_LATE, AmendRecord(RoundId(1)))
    row = replace(drive.row("b", 1))
    assert drive.update("b", at=70, round_id=1) == [first]
    assert drive.update("b", at=71, round_id=1, digest="another") == [replace(first, digest="another")]
    assert drive.row("b", 1) == row


# ---------------------------------------------------------------- partial_work


@pytest.mark.parametrize(("rule", "expected"), [("accept", 1.0), ("scaled", 0.25)])
def test_partial_work_weighs(rule: str, expected: float) -> None:
    drive = Drive(cohort_size=2, quorum=2, partial_work=rule)
    drive.begin("ab")
    drive.update("a", at=1)
    assert scales(drive.update("b", at=2, work=0.25)) == {"a": 1.0, "b": expected}


def test_partial_work_is_refused() -> None:
    drive = Drive(cohort_size=2, quorum=1, partial_work="refuse")
    drive.begin("ab")
    assert verdict(drive.update("a", at=1, work=0.9)) is RejectReason.PARTIAL_WORK
    assert drive.row("a").fate is Fate.REFUSED


def test_partial_work_of_a_late_update_is_scaled_and_discounted() -> None:
    drive = late_in_next_round(partial_work="scaled")
    drive.update("b", at=63, round_id=1, work=0.5)
    drive.update("a", at=64)
    assert scales(drive.tick(at=122))["b"] == round(0.5 * 2**-0.5, 6)


# ---------------------------------------------------------------- outage_max


def outage(seconds: float, begins: float, **policy: Any) -> Drive:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, **policy)
    drive.begin("ab")
    drive.do(CoordinatorStarted(1000.0 + begins), at=begins + seconds)
    return drive


def test_outage_extends_the_open_round_by_the_downtime() -> None:
    drive = outage(seconds=25, begins=10)
    assert drive.deadline == 85
    assert [(o.seconds, o.extended) for o in drive.record.outages] == [(25, 25)]


def test_outage_max_limits_the_extension_of_all_outages_together() -> None:
    drive = outage(seconds=25, begins=10, outage_max=30.0)
    drive.do(CoordinatorStarted(1040.0), at=60)
    assert drive.deadline == 90
    assert [(o.seconds, o.extended) for o in drive.record.outages] == [(25, 25), (20, 5)]


def test_outage_extends_linger_and_grace_and_the_selection_too() -> None:
    lingering = outage(seconds=10, begins=20, linger=30.0)
    lingering.update("a", at=31)
    assert lingering.deadline == 61
    lingering.do(CoordinatorStarted(1040.0), at=50)
    assert lingering.deadline == 71
    gracious = Drive(cohort_size=1, deadline=60.0, grace=20.0)
    gracious.begin("a")
    gracious.upload_begins("a", at=59)
    gracious.tick(at=60)
    gracious.do(CoordinatorStarted(1065.0), at=75)
    assert gracious.deadline == 90
    selecting = Drive(cohort_size=2, selection_timeout=50.0)
    selecting.do(RoundDue(), at=0)
    selecting.do(CoordinatorStarted(1005.0), at=12)
    assert selecting.deadline == 57


def test_outage_repeats_the_aggregation_and_a_returning_client_is_invited_again() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0)
    drive.begin("ab")
    drive.do(CoordinatorStarted(1010.0), at=20)
    [again] = drive.join("a", at=22, working_on=(1,))
    assert again == Invite(ClientId("a"), RoundId(1), Version(0), 1070.0, asked_at=1000.0)
    drive.update("a", at=23)
    assert kinds(drive.lose("b", at=24)) == ["Aggregate"]
    [aggregate] = [e for e in drive.effects if isinstance(e, Aggregate)]
    assert drive.do(CoordinatorStarted(1025.0), at=26) == [aggregate]


# ---------------------------------------------------------------- min_available, selection_timeout


def test_min_available_clients_must_be_there_before_a_cohort_is_drawn() -> None:
    drive = Drive(cohort_size=2, min_available=4)
    drive.do(RoundDue(), at=0)
    assert drive.join("abc", at=1) == []
    [draw] = drive.join("d", at=2)
    assert isinstance(draw, DrawCohort)
    assert (draw.count, len(draw.candidates)) == (2, 4)


def test_the_first_round_alone_waits_for_more_clients_and_not_for_ever() -> None:
    drive = Drive(cohort_size=3, min_available=2, quorum=1, first_available=3, selection_timeout=1e6)
    drive.do(RoundDue(), at=0)
    assert drive.join("ab", at=1) == []
    assert (drive.deadline, drive.record.num_needed_to_draw) == (FIRST_WAIT_S, 3)
    drive.do(CoordinatorStarted(1010.0), at=20)  # an outage of 10 s
    assert drive.join("ab", at=21) == []
    assert drive.tick(at=FIRST_WAIT_S + 9) == []
    [draw] = drive.tick(at=FIRST_WAIT_S + 10)
    assert isinstance(draw, DrawCohort)
    assert draw.count == 2
    together = Drive(cohort_size=3, min_available=2, quorum=1, first_available=3)
    together.do(RoundDue(), at=0)
    assert together.join("ab", at=1) == []
    [draw] = together.join("c", at=2)
    assert isinstance(draw, DrawCohort)
    assert draw.count == 3


def test_a_later_round_waits_for_the_fewest_alone() -> None:
    drive = Drive(cohort_size=3, min_available=2, quorum=1, first_available=3)
    drive.begin("abc")
    drive.do(ClientDisconnected(ClientId("c"), "c@1000.0"), at=1)
    for client in "ab":
        drive.update(client, at=2)
    drive.lose("c", at=3)
    drive.fold(at=4)
    [draw] = drive.do(RoundDue(), at=5)
    assert isinstance(draw, DrawCohort)
    assert draw.count == 2


def test_a_client_that_went_is_not_available() -> None:
    drive = Drive(cohort_size=2)
    drive.do(RoundDue(), at=0)
    drive.join("a", at=1)
    drive.do(ClientDisconnected(ClientId("a"), "a@1001.0"), at=2)
    assert drive.join("b", at=3) == []


def test_selection_timeout_draws_from_fewer_when_they_can_make_the_quorum() -> None:
    drive = Drive(cohort_size=3, quorum=2, selection_timeout=50.0)
    drive.do(RoundDue(), at=0)
    drive.join("ab", at=1)
    [draw] = drive.tick(at=50)
    assert isinstance(draw, DrawCohort)
    assert draw.count == 2
    assert drive.deadline is None  # the sampler is at work


def test_selection_timeout_abandons_below_the_quorum() -> None:
    drive = Drive(cohort_size=3, quorum=2, selection_timeout=50.0)
    drive.do(RoundDue(), at=0)
    drive.join("a", at=1)
    assert kinds(drive.tick(at=50)) == ["Abandon", "OpenNextRound"]
    assert drive.record.abandon_reason is AbandonReason.TOO_FEW_CLIENTS
    assert drive.record.detail == "1 available after 50 s, 2 needed"


def test_a_sampler_that_fails_costs_the_round() -> None:
    drive = Drive(cohort_size=1)
    drive.join("a")
    drive.do(RoundDue())
    effects = drive.do(SamplerFailed(RoundId(1), "ValueError: no"))
    assert effects[0] == Abandon(RoundId(1), AbandonReason.SAMPLER_FAILED)
    assert drive.record.detail == "ValueError: no"


def test_a_client_lost_while_the_sampler_was_at_work_is_not_waited_for() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0)
    drive.join("ab")
    drive.do(RoundDue())
    drive.lose("b", at=3)
    invited = drive.draw("ab")
    assert [e.client_id for e in invited if isinstance(e, Invite)] == ["a"]
    assert (drive.row("b").fate, drive.row("b").reason) == (Fate.LOST, "lease_expired")
    assert kinds(drive.update("a", at=4)) == ["Accept", "Aggregate"]


def test_a_client_lost_while_the_sampler_was_at_work_is_invited_when_it_comes_back() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0)
    drive.join("ab")
    drive.do(RoundDue())
    drive.lose("b", at=3)
    drive.draw("ab")
    assert kinds(drive.join("b", at=5)) == ["Invite"]
    assert drive.row("b").fate is Fate.WAITING


# ---------------------------------------------------------------- max_examples and the claims of an update


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"num_examples": 0}, RejectReason.NO_EXAMPLES),
        ({"num_examples": -3}, RejectReason.NO_EXAMPLES),
        ({"num_examples": 101}, RejectReason.TOO_MANY_EXAMPLES),
        ({"work": 0.0}, RejectReason.BAD_WORK),
        ({"work": 1.001}, RejectReason.BAD_WORK),
        ({"work": float("nan")}, RejectReason.BAD_WORK),
        ({"base_version": 1}, RejectReason.WRONG_BASE),
        ({"round_id": 7}, RejectReason.WRONG_ROUND),
        ({"client_id": "stranger"}, RejectReason.NOT_INVITED),
    ],
)
def test_max_examples_and_other_claims_are_judged(claims: dict[str, Any], reason: RejectReason) -> None:
    drive = Drive(cohort_size=2, quorum=1, max_examples=100)
    drive.begin("ab")
    update = replace(Update(ClientId("a"), RoundId(1), Version(0), Digest("x"), 10, 1.0), **claims)
    effects = drive.do(UpdateReceived(update), at=1)
    assert verdict(effects) is reason
    assert drive.record.num_reported == 0


def test_max_examples_itself_is_allowed() -> None:
    drive = Drive(cohort_size=2, quorum=1, max_examples=100)
    drive.begin("ab")
    assert verdict(drive.update("a", at=1, num_examples=100)) == "accepted"


def test_a_repeated_upload_gets_the_same_answer_and_counts_once() -> None:
    drive = Drive(cohort_size=2, quorum=2)
    drive.begin("ab")
    assert verdict(drive.update("a", at=1)) == "accepted"
    assert verdict(drive.update("a", at=2)) == "accepted"
    assert drive.record.num_reported == 1
    assert verdict(drive.update("a", at=3, digest="other")) is RejectReason.ALREADY_REPORTED
    drive.update("b", at=4)
    assert verdict(drive.update("a", at=5)) == "accepted"  # also when the round has closed
    drive.fold(at=6)
    assert verdict(drive.update("a", at=7, round_id=1)) == "accepted"
    assert drive.machine.ledger.state is RunState.RUNNING


def test_a_refused_client_does_not_get_a_second_try_in_its_round() -> None:
    drive = Drive(cohort_size=2, quorum=1)
    drive.begin("ab")
    drive.update("a", at=1, num_examples=0)
    assert verdict(drive.update("a", at=2, digest="other")) is RejectReason.ALREADY_REPORTED


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.FAILED])
def test_a_client_that_was_given_up_may_still_surprise_us_in_time(fate: Fate) -> None:
    drive = Drive(cohort_size=2, quorum=1)
    drive.begin("ab")
    if fate is Fate.LOST:
        drive.lose("a", at=1)
    else:
        drive.do(ClientFailed(ClientId("a"), RoundId(1), FailureReason.WORKER_CRASHED), at=1)
    assert drive.row("a").fate is fate
    assert verdict(drive.update("a", at=2)) == "accepted"


def test_a_client_that_reconnects_is_told_the_deadline_again() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0)
    drive.begin("ab")
    drive.do(ClientDisconnected(ClientId("a"), "a@1000.0"), at=5)
    assert drive.row("a").disconnected_at == 1005.0
    assert drive.join("a", at=8) == [Invite(ClientId("a"), RoundId(1), Version(0), 1060.0, asked_at=1000.0)]
    assert (drive.row("a").num_reconnects, drive.row("a").disconnected_at) == (1, None)


def test_contributions_are_sorted_by_client_whatever_the_order_of_arrival() -> None:
    drive = Drive(cohort_size=3, quorum=3)
    drive.begin("abc")
    drive.update("c", at=1)
    drive.update("a", at=2)
    assert list(scales(drive.update("b", at=3))) == ["a", "b", "c"]


def test_commit_names_what_it_used_and_the_version_grows_by_one() -> None:
    drive = Drive(cohort_size=2, quorum=2)
    drive.begin("ab")
    drive.update("b", at=1)
    drive.update("a", at=2)
    commit = drive.fold(at=3)[0]
    assert commit == Commit(RoundId(1), Version(1), Digest("next"), (Digest("a1"), Digest("b1")))
    assert (drive.record.phase, drive.record.version) == (Phase.COMMITTED, 1)


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    drive = Drive(cohort_size=2, quorum=1)
    drive.begin("ab")
    assert drive.do(CohortDrawn(RoundId(1), (ClientId("z"),)), at=1) == []
    assert drive.do(SamplerFailed(RoundId(1), "too late"), at=1) == []
    assert drive.do(Aggregated(RoundId(9), Digest("x")), at=1) == []
    assert drive.do(UploadBegun(ClientId("z"), RoundId(1)), at=1) == []
    assert drive.do(ClientFailed(ClientId("z"), RoundId(1), FailureReason.TASK_BROKEN), at=1) == []
    assert sorted(drive.record.clients) == ["a", "b"]


def test_time_may_not_run_backward() -> None:
    drive = Drive(cohort_size=1)
    drive.join("a", at=5)
    with pytest.raises(AssertionError):
        drive.join("b", at=4)


# ---------------------------------------------------------------- the candidates of a draw


def candidate_of(drive: Drive, client: str) -> Candidate:
    [found] = [c for c in drive.machine.ledger.membership.candidates() if c.client_id == client]
    return found


def test_a_draw_knows_what_the_clients_reported_and_how_often_they_were_chosen() -> None:
    drive = Drive(cohort_size=2, quorum=1)
    drive.begin("abc", cohort="ab")
    drive.upload_begins("a", at=10)
    drive.update("a", at=12, statistics={"loss": (6.0, 3.0)}, download_seconds=1.0, train_seconds=7.0)
    drive.update("b", at=13, statistics={"accuracy": (1.0, 2.0)})
    drive.fold()
    [draw] = [e for e in drive.do(RoundDue()) if isinstance(e, DrawCohort)]
    assert [tuple(c) for c in draw.candidates] == [
        ("a", 0, "", 2.0, 20.0, 1.0 + 7.0 + 2.0, 1, 1),
        ("b", 0, "", None, 0.0, 0.0, 1, 1),
        ("c", 0, "", None, 0.0, None, 0, 0),
    ]


def test_a_late_update_that_counts_tells_its_loss_and_one_that_is_refused_does_not() -> None:
    for late, loss in (("next_round", 2.0), ("discard", None)):
        drive = Drive(cohort_size=1, over_selection=2.0, quorum=1, late=late)
        drive.begin("ab")
        drive.update("a")
        drive.update("b", statistics={"loss": (6.0, 3.0)})
        assert candidate_of(drive, "b").loss == loss


def test_the_pacer_hears_of_commits_alone_and_only_where_somebody_asks() -> None:
    for window, relaxed in ((2, 1), (0, 0)):
        drive = Drive(rounds=9, rules={"pacer_window": window}, cohort_size=1, quorum=1, retry=9)
        drive.join("a")
        for loss in (5.0, 4.0, 0.0, 4.0, 5.0):
            drive.do(RoundDue())
            drive.draw("a")
            if loss == 0.0:
                drive.lose("a")  # abandoned
                drive.join("a")
                continue
            drive.update("a", statistics={"loss": (loss, 1.0)})
            drive.fold()
        [draw] = [e for e in drive.do(RoundDue()) if isinstance(e, DrawCohort)]
        assert (draw.relaxed, drive.machine.ledger.version) == (relaxed, 4)
