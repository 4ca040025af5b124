"""An asynchronous run, rule by rule: invitations and their deadlines, the buffer's updates, its commit."""

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
    RejectReason,
    ReleaseReason,
    RoundId,
    RunState,
)
from atoll.server.journal.codec import decode_ledger, encode_ledger
from atoll.server.required.keep import Keep
from atoll.server.rounds.events import (
    Abandon,
    Aggregate,
    AggregationFailed,
    AmendRecord,
    AskEvaluation,
    ClientDisconnected,
    ClientFailed,
    ClientLost,
    Commit,
    CoordinatorStarted,
    DrawCohort,
    Effect,
    EndRun,
    Invite,
    ModelEvaluated,
    Release,
    ResumeRequested,
    RoundDue,
    SamplerFailed,
    StopRequested,
    UploadBegun,
)
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_machine import RunMachine
from tests.server.rounds.test_cohort_round import Drive, kinds, released, verdict


class Flow(Drive):
    """An asynchronous run whose sampler answers each draw at once, with the first candidates by name."""

    def __init__(self, rounds: int = 9, rules: dict[str, Any] | None = None, **policy: Any) -> None:
        super().__init__(rounds, rules, **({"mode": "fedbuff", "buffer_size": 2, "concurrency": 2} | policy))
        self.do(RoundDue())

    def do(self, event: object, at: float | None = None) -> list[Effect]:
        decided = super().do(event, at)  # type: ignore[arg-type]
        for effect in decided:
            if isinstance(effect, DrawCohort):
                chosen = "".join(c.client_id for c in effect.candidates[: effect.count])
                decided = decided + self.draw(chosen)
        return decided

    def commit(self, at: float | None = None) -> list[Effect]:
        """Finish the fold and open the next buffer."""
        return self.fold(at) + self.do(RoundDue())

    @property
    def training(self) -> dict[str, int]:
        return {**self.machine.ledger.training}


def invited(effects: list[Effect]) -> dict[str, int]:
    """Return the invited clients, each with the version that it trains from."""
    return {e.client_id: e.base_version for e in effects if isinstance(e, Invite)}


def buffered(effects: list[Effect]) -> list[tuple[str, int, float]]:
    """Return (client, version that it trained from, scale) of each aggregated update."""
    [aggregate] = [e for e in effects if isinstance(e, Aggregate)]
    return [(c.client_id, c.base_version or 0, round(c.scale, 6)) for c in aggregate.contributions]


# ---------------------------------------------------------------- invitations


def test_as_many_as_concurrency_train_and_a_place_that_is_free_is_given_away() -> None:
    flow = Flow(concurrency=2, buffer_size=3)
    assert invited(flow.join("abc")) == {"a": 0, "b": 0}
    assert invited(flow.update("a", at=5)) == {"c": 0}
    assert flow.training == {"b": 1, "c": 1}


@pytest.mark.parametrize("how", ["fails", "is lost", "is out of time"])
def test_a_client_that_comes_to_nothing_is_replaced(how: str) -> None:
    flow = Flow(concurrency=1, deadline=60.0)
    flow.join("ab")
    match how:
        case "fails":
            effects = flow.do(ClientFailed(ClientId("a"), RoundId(1), FailureReason.TRAINING_FAILED), at=60)
        case "is lost":
            effects = flow.lose("a", at=60)
        case _:
            effects = flow.tick(at=60)
            assert Release(ClientId("a"), RoundId(1), ReleaseReason.OUT_OF_TIME, submit=True) in effects
            assert flow.row("a").fate is Fate.STRAGGLER
    assert invited(effects) == {"b": 0}


def test_nobody_is_invited_twice_for_one_version_and_again_for_the_next() -> None:
    flow = Flow(concurrency=2, buffer_size=2)
    flow.join("ab")
    assert invited(flow.update("a")) == {}
    flow.update("b")
    assert invited(flow.commit()) == {"a": 1, "b": 1}


def test_each_draw_of_a_round_has_a_number_of_its_own() -> None:
    flow = Flow(concurrency=1, buffer_size=3)
    flow.join("abc")
    flow.update("a")
    flow.update("b")
    assert [e.number for e in flow.effects if isinstance(e, DrawCohort)] == [0, 1, 2]


def test_nobody_is_invited_while_a_buffer_is_aggregated() -> None:
    flow = Flow(concurrency=1, buffer_size=1)
    flow.join("ab")
    assert invited(flow.update("a")) == {}
    assert invited(flow.commit()) == {"a": 1}


def test_who_trains_goes_on_when_a_version_is_committed() -> None:
    flow = Flow(concurrency=3, buffer_size=2)
    flow.join("abc")
    flow.update("a")
    flow.update("b")
    effects = flow.commit()
    assert released(effects) == {}
    assert flow.training["c"] == 1
    assert flow.row("c", 1).fate is Fate.WAITING


def test_a_lost_client_that_is_back_in_time_goes_on_although_replaced() -> None:
    flow = Flow(concurrency=1, deadline=60.0)
    flow.join("ab")
    assert invited(flow.lose("a", at=20)) == {"b": 0}
    assert invited(flow.join("a", at=30, working_on=(1,))) == {"a": 0}
    assert flow.training == {"a": 1, "b": 1}
    assert invited(flow.lose("b", at=40)) == {}


def test_a_client_that_was_lost_and_is_back_too_late_may_hand_in_what_it_has() -> None:
    flow = Flow(concurrency=1, deadline=60.0)
    flow.join("ab")
    flow.lose("a", at=20)
    assert released(flow.join("a", at=61, working_on=(1,)))["a"] is True
    assert verdict(flow.update("a", round_id=1)) == "accepted"


def test_a_client_given_up_while_the_sampler_was_at_work_is_lost_at_once() -> None:
    flow = Drive(mode="fedbuff", buffer_size=2, concurrency=2)
    flow.do(RoundDue())
    flow.join("ab")
    flow.lose("a")
    assert invited(flow.draw("a")) == {}
    assert flow.row("a").fate is Fate.LOST


# ---------------------------------------------------------------- the updates of a buffer


def test_a_stale_update_is_discounted_and_the_record_says_by_how_much() -> None:
    flow = Flow(concurrency=3, buffer_size=2, staleness_exponent=0.5)
    flow.join("abc")
    flow.update("a")
    flow.update("b")
    flow.commit()
    flow.update("a")
    effects = flow.update("c", round_id=1)
    assert buffered(effects) == [("a", 1, 1.0), ("c", 0, round(2**-0.5, 6))]
    [aggregate] = [e for e in effects if isinstance(e, Aggregate)]
    assert aggregate.mode == "fedbuff"
    assert {(r.client_id, r.round_id, r.staleness) for r in flow.record.buffer} == {("a", 2, 0), ("c", 1, 1)}
    assert AmendRecord(RoundId(1)) in flow.fold()
    assert flow.row("c", 1).used_in == 2


def test_one_client_may_be_twice_in_a_buffer_with_two_versions() -> None:
    flow = Flow(concurrency=3, buffer_size=2, deadline=60.0)
    flow.join("abc")
    flow.update("a", at=10)
    flow.update("b", at=20)
    flow.commit(at=30)
    assert invited(flow.tick(at=60)) == {"c": 1}
    flow.update("c", round_id=1)
    assert buffered(flow.update("c")) == [("c", 0, round(2**-0.5, 6)), ("c", 1, 1.0)]
    flow.fold()
    assert flow.row("c", 1).used_in == flow.row("c", 2).used_in == 2


def test_an_update_counts_once_for_client_and_version_over_all_rounds() -> None:
    flow = Flow(concurrency=1, buffer_size=2, deadline=60.0, retry=5)
    flow.join("a")
    flow.tick(at=60)  # nobody else is there: the round is abandoned, and a may be asked again
    assert flow.record.abandon_reason is AbandonReason.QUORUM_OUT_OF_REACH
    assert invited(flow.do(RoundDue())) == {"a": 0}
    effects = flow.update("a", round_id=1)
    assert verdict(effects) == "accepted"
    assert released(effects) == {"a": False}, "it trains for nothing"
    assert verdict(flow.update("a", round_id=2)) is RejectReason.ALREADY_REPORTED
    assert flow.row("a", 2).fate is Fate.LATE


def test_a_repeated_upload_is_answered_again_and_counts_once() -> None:
    flow = Flow(buffer_size=3)
    flow.join("ab")
    assert verdict(flow.update("a")) == verdict(flow.update("a")) == "accepted"
    assert len(flow.record.buffer) == 1
    assert verdict(flow.update("a", digest=Digest("other"))) is RejectReason.ALREADY_REPORTED


def test_an_update_that_is_too_stale_is_refused_with_the_reason() -> None:
    flow = Flow(concurrency=2, buffer_size=1, max_staleness=1)
    flow.join("ab")
    for _ in range(2):
        flow.update("a")
        effects = flow.commit()
    assert released(flow.effects) == {"b": False}, "it trained on after one commit, and not after two"
    assert flow.row("b", 1).fate is Fate.RELEASED
    assert invited(effects) == {"a": 2, "b": 2}
    assert verdict(flow.update("b", round_id=1)) is RejectReason.TOO_STALE
    assert flow.row("b", 1).detail == "2 versions old, max_staleness is 1"
    too_old = [(r.client_id, r.round_id, r.staleness) for r in flow.machine.record_of(RoundId(2)).too_old]
    assert too_old == [("b", 1, 2)], "it is recorded once, by the commit that decided it"
    assert flow.machine.record_of(RoundId(1)).too_old == []


def test_staleness_is_that_of_the_commit_that_will_use_the_update() -> None:
    """Two updates wait while a buffer of one is aggregated: the second of them counts two versions from now."""
    flow = Flow(concurrency=4, buffer_size=1, max_staleness=1)
    flow.join("abcd")
    flow.update("a")
    assert verdict(flow.update("b")) == "accepted"
    assert verdict(flow.update("c")) is RejectReason.TOO_STALE
    assert [(r.client_id, r.round_id, r.staleness) for r in flow.record.too_old] == [("c", 1, 2)]
    assert buffered(flow.commit()) == [("b", 0, round(2**-0.5, 6))]


def test_what_comes_while_a_buffer_is_aggregated_waits_in_its_order() -> None:
    flow = Flow(concurrency=5, buffer_size=2)
    flow.join("abcde")
    for client in "abdec":
        flow.update(client)
    assert [u.client_id for u in flow.machine.ledger.waiting] == ["d", "e", "c"]
    assert [c for c, *_ in buffered(flow.commit())] == ["d", "e"]
    assert [u.client_id for u in flow.machine.ledger.waiting] == ["c"]


def test_who_comes_back_when_a_deadline_has_just_ended_the_run_is_not_invited() -> None:
    flow = Flow(concurrency=2, buffer_size=2, quorum=2, retry=0, fill_timeout=30.0, deadline=60.0)
    flow.join("a", at=1)
    flow.do(ClientLost(ClientId("a"), LossReason.LEASE_EXPIRED), at=10)
    effects = flow.join("a", at=40)  # nobody trained, and the buffer was overdue: the last retry is over
    assert flow.machine.ledger.state is RunState.FAILED
    assert invited(effects) == {}
    assert flow.training == {}


def test_what_waits_survives_in_the_snapshot_and_on_disk() -> None:
    flow = Flow(concurrency=3, buffer_size=2)
    flow.join("abc")
    flow.update("a")
    flow.update("b")
    flow.update("c")
    flow.fold()
    keep = Keep.after(9, flow.machine, flow.rules.policy)
    assert keep.updates == {"c1"}
    assert keep.versions == {0}
    assert flow.machine.may_snapshot
    ledger = decode_ledger(encode_ledger(flow.machine.ledger), where="here")
    assert ledger == flow.machine.ledger
    again = RunMachine(flow.rules, ledger)
    assert again.receive(RoundDue(), flow.now) == tuple(Drive.do(flow, RoundDue()))


def test_fedasync_commits_each_update_by_itself_in_the_order_of_arrival() -> None:
    flow = Flow(mode="fedasync", buffer_size=10, concurrency=3, alpha=0.5)
    flow.join("abc")
    assert buffered(flow.update("b")) == [("b", 0, 0.5)]
    flow.update("a")
    assert buffered(flow.commit()) == [("a", 0, round(0.5 * 2**-0.5, 6))]


def test_hinge_and_partial_work_scale_together() -> None:
    flow = Flow(buffer_size=1, staleness="hinge", hinge_delay=0, hinge_slope=1.0, partial_work="scaled")
    flow.join("ab")
    flow.update("a")
    flow.commit()
    assert buffered(flow.update("b", round_id=1, work=0.5)) == [("b", 0, 0.5 * 0.5)]


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"num_examples": 0}, RejectReason.NO_EXAMPLES),
        ({"work": 0.5}, RejectReason.PARTIAL_WORK),
        ({"base_version": 7}, RejectReason.WRONG_BASE),
    ],
)
def test_a_claim_that_cannot_be_frees_the_place(claims: dict[str, Any], reason: RejectReason) -> None:
    flow = Flow(concurrency=1, partial_work="refuse")
    flow.join("ab")
    effects = flow.update("a", **claims)
    assert verdict(effects) is reason
    assert invited(effects) == {"b": 0}
    assert flow.row("a").fate is Fate.REFUSED


# ---------------------------------------------------------------- deadlines


def test_each_invitation_has_a_deadline_of_its_own() -> None:
    flow = Flow(concurrency=1, buffer_size=3, deadline=60.0)
    flow.join("ab")
    flow.update("a", at=50)
    assert flow.deadline == 110


def test_an_adaptive_deadline_is_that_of_the_client() -> None:
    flow = Flow(deadline="adaptive", adaptive_margin=2.0, deadline_min=1.0, deadline_max=500.0, buffer_size=1)
    flow.join("a", at=0)
    assert flow.row("a").deadline == 1500.0, "nothing is measured yet"
    flow.upload_begins("a", at=33)
    flow.update("a", at=35, train_seconds=30.0, download_seconds=1.0)
    flow.commit()
    assert flow.row("a").deadline == 1035.0 + 2.0 * (1 + 30 + 2)


def test_an_outage_moves_the_deadlines_of_buffer_and_invitations_up_to_outage_max() -> None:
    flow = Flow(concurrency=1, deadline=60.0, fill_timeout=100.0, outage_max=50.0)
    flow.join("ab", at=0)
    flow.do(CoordinatorStarted(down_since=1010.0), at=40)
    assert flow.row("a").deadline == 1090.0
    assert flow.record.deadline == 1130.0
    flow.do(CoordinatorStarted(down_since=1050.0), at=80)
    assert flow.row("a").deadline == 1110.0, "20 of the 30 seconds"
    assert flow.record.deadline == 1150.0
    assert invited(flow.join("a", at=85, working_on=(1,))) == {"a": 0}


def test_a_deadline_ends_also_while_no_buffer_is_open() -> None:
    flow = Flow(concurrency=2, buffer_size=1, deadline=60.0)
    flow.join("ab", at=0)
    flow.update("a", at=10)
    assert flow.deadline == 60
    assert released(flow.tick(at=60)) == {"b": True}
    assert flow.training == {}


def test_who_was_away_and_how_often_stands_in_the_record() -> None:
    flow = Flow(concurrency=1, deadline=60.0)
    flow.join("a", at=0)
    flow.do(ClientDisconnected(ClientId("a"), "a@1000.0"), at=5)
    assert flow.row("a").disconnected_at == 1005.0
    flow.join("a", at=7)
    assert (flow.row("a").disconnected_at, flow.row("a").num_reconnects) == (None, 1)
    flow.do(CoordinatorStarted(down_since=1010.0), at=12)
    assert flow.row("a").disconnected_at == 1012.0
    flow.do(CoordinatorStarted(down_since=1013.0), at=14)
    assert flow.row("a").disconnected_at == 1012.0
    flow.join("a", at=15)
    assert (flow.row("a").disconnected_at, flow.row("a").num_reconnects) == (None, 2)


def test_an_upload_is_measured_from_its_own_beginning() -> None:
    flow = Flow(concurrency=3, buffer_size=2, deadline=60.0)
    flow.join("abc", at=0)
    flow.update("a", at=10)
    flow.update("b", at=20)
    flow.commit(at=30)
    flow.tick(at=60)  # c trains for the second round now; what it had for the first is late
    flow.do(UploadBegun(ClientId("c"), RoundId(1)), at=61)
    assert flow.row("c", 1).upload_begun_at is None
    assert flow.row("c", 2).upload_begun_at is None
    flow.upload_begins("c", at=70)
    flow.upload_begins("c", at=71)
    assert flow.row("c", 2).upload_begun_at == 1070.0


# ---------------------------------------------------------------- the end of a buffer


def test_a_buffer_that_does_not_fill_in_time_is_committed_with_the_quorum() -> None:
    flow = Flow(buffer_size=3, concurrency=3, quorum=1, fill_timeout=100.0)
    flow.join("abc")
    flow.update("a", at=20)
    assert [c for c, *_ in buffered(flow.tick(at=100))] == ["a"]
    assert flow.record.close_reason is CloseReason.DEADLINE
    assert flow.training == {"b": 1, "c": 1}, "they go on"


def test_an_overdue_buffer_below_the_quorum_waits_and_invites_no_other_client() -> None:
    flow = Flow(buffer_size=3, concurrency=2, quorum=2, fill_timeout=100.0, deadline=150.0)
    flow.join("abc")
    flow.update("a", at=20)
    assert flow.training == {"b": 1, "c": 1}
    flow.do(ClientFailed(ClientId("b"), RoundId(1), FailureReason.TRAINING_FAILED), at=21)
    flow.join("d", at=22)
    assert flow.tick(at=100) == []
    effects = flow.lose("d", at=101)
    assert invited(effects) == {}
    assert [c for c, *_ in buffered(flow.update("c", at=120))] == ["a", "c"]
    assert flow.record.close_reason is CloseReason.DEADLINE


def test_a_buffer_without_a_quorum_is_abandoned_and_its_updates_wait_for_the_next() -> None:
    flow = Flow(buffer_size=3, concurrency=2, fill_timeout=100.0, retry=1)
    flow.join("ab")
    flow.update("a", at=20)
    flow.update("b", at=30)
    effects = flow.tick(at=100)
    assert Abandon(RoundId(1), AbandonReason.BELOW_QUORUM) in effects
    assert flow.record.detail == "2 accepted, quorum 3"
    assert flow.machine.ledger.failures == 1
    flow.do(RoundDue())
    assert [row.client_id for row in flow.record.buffer] == ["a", "b"]
    assert invited(flow.join("c", at=101)) == {"c": 0}
    assert [c for c, *_ in buffered(flow.update("c"))] == ["a", "b", "c"]
    flow.fold()
    assert flow.row("a", 1).used_in == 2


def test_a_buffer_to_which_nobody_came_says_so_and_in_the_end_the_run_fails() -> None:
    flow = Flow(fill_timeout=100.0, retry=0)
    effects = flow.tick(at=100)
    assert Abandon(RoundId(1), AbandonReason.TOO_FEW_CLIENTS) in effects
    assert flow.machine.ledger.state is RunState.FAILED


def test_with_the_quorum_a_buffer_is_not_kept_waiting_for_clients_that_are_not_there() -> None:
    flow = Flow(buffer_size=5, concurrency=5, quorum=2)
    flow.join("abc")
    flow.update("a")
    flow.update("b")
    assert kinds(flow.update("c")) == ["Accept", "Aggregate"]
    assert flow.record.close_reason is CloseReason.ALL_ANSWERED


def test_below_the_quorum_it_waits_for_others_to_join() -> None:
    flow = Flow(buffer_size=2)
    flow.join("a")
    assert kinds(flow.update("a")) == ["Accept"]
    assert invited(flow.join("b")) == {"b": 0}


def test_a_failed_aggregation_loses_its_updates_and_their_clients_may_be_asked_again() -> None:
    flow = Flow(buffer_size=1, concurrency=2)
    flow.join("ab")
    flow.update("a")
    flow.do(AggregationFailed(RoundId(1), "no room"))
    assert flow.row("a").unused_because == "the aggregation of round 1 failed"
    assert flow.training == {"b": 1}
    assert invited(flow.do(RoundDue())) == {"a": 0}


def test_a_sampler_that_fails_after_the_buffer_is_full_changes_nothing() -> None:
    flow = Drive(mode="fedbuff", buffer_size=1, concurrency=2)
    flow.do(RoundDue())
    flow.join("a")
    flow.draw("a")
    flow.join("b")
    assert kinds(flow.update("a")) == ["Accept", "Aggregate"]
    assert flow.do(SamplerFailed(RoundId(1), "late")) == []
    assert kinds(flow.fold())[0] == "Commit"


# ---------------------------------------------------------------- the end of the run


def test_the_last_commit_releases_everybody_and_no_later_update_is_taken() -> None:
    flow = Flow(rounds=1, concurrency=2, buffer_size=1)
    flow.join("ab")
    flow.update("a")
    assert verdict(flow.update("b")) is RejectReason.TOO_LATE
    assert kinds(flow.fold())[-1] == "EndRun"
    assert flow.training == {}
    flow = Flow(rounds=1, concurrency=3, buffer_size=1, rules={"evaluate_server_every": 1})
    flow.join("ab")
    flow.update("a")
    effects = flow.fold()
    assert released(effects) == {"b": False}
    assert kinds(flow.do(ModelEvaluated(1, None)))[-1] == "EndRun"  # type: ignore[arg-type]


def test_a_stop_makes_a_version_of_what_is_in_with_the_quorum() -> None:
    flow = Flow(buffer_size=3, quorum=1, concurrency=2)
    flow.join("ab")
    flow.update("a")
    effects = flow.do(StopRequested("enough"))
    assert [c for c, *_ in buffered(effects)] == ["a"]
    assert flow.record.close_reason is CloseReason.FLUSHED
    assert verdict(flow.update("b")) is RejectReason.TOO_LATE
    effects = flow.fold()
    assert [type(e) for e in effects if isinstance(e, Commit | EndRun)] == [Commit, EndRun]
    assert (flow.machine.ledger.state, flow.machine.ledger.cause) == (RunState.STOPPED, "enough")


def test_a_stop_below_the_quorum_tells_what_becomes_of_what_is_in_and_who_trains() -> None:
    flow = Flow(buffer_size=3, concurrency=2)
    flow.join("ab")
    flow.update("a")
    effects = flow.do(StopRequested("enough"))
    assert released(effects) == {"b": False}
    assert flow.row("a").unused_because == "the run was stopped below the quorum"
    assert flow.row("b").fate is Fate.RELEASED
    assert flow.machine.ledger.training == {}
    flow.do(ResumeRequested())
    flow.join("ab")
    assert invited(flow.do(RoundDue())) == {"a": 0, "b": 0}


def test_what_still_waits_when_the_run_ends_is_told() -> None:
    flow = Flow(buffer_size=1, concurrency=3, max_staleness=5)
    flow.join("abc")
    flow.update("a")
    flow.update("b")
    flow.fold()
    flow.do(StopRequested("enough"))
    assert flow.row("b", 1).unused_because == "the run ended first (stopped)"


def test_clients_that_train_are_not_asked_to_evaluate() -> None:
    flow = Flow(buffer_size=1, concurrency=1, rules={"evaluate_clients_every": 1})
    flow.join("ab")
    flow.update("a")
    effects = flow.fold()
    assert [e.client_id for e in effects if isinstance(e, AskEvaluation)] == ["a", "b"]
    flow = Flow(buffer_size=1, concurrency=2, rules={"evaluate_clients_every": 1})
    flow.join("abc")
    flow.do(ClientDisconnected(ClientId("c"), "c@1000.0"))
    flow.update("a")
    assert [e.client_id for e in flow.fold() if isinstance(e, AskEvaluation)] == ["a"]


def test_a_synchronous_run_has_no_invitations_beyond_its_rounds() -> None:
    drive = Drive(cohort_size=1)
    drive.begin("a")
    assert len(drive.machine.invitations) == 0
    assert drive.machine.ledger.training == {}
    assert StragglerPolicy().mode == "sync"
