"""Files that are lost on the coordinator's disk: which updates end, what becomes of their round, when a run ends."""

import pytest

from atoll.protocol.vocabulary import AbandonReason, ClientId, Digest, Fate, Phase, RejectReason, RunState, Version
from atoll.server.journal.codec import decode_event, encode_event
from atoll.server.rounds.events import (
    Abandon,
    Aggregate,
    AmendRecord,
    Commit,
    CoordinatorStarted,
    EndRun,
    Event,
    FilesLost,
    MetricsComputed,
    ModelEvaluated,
    OpenNextRound,
    ResumeRequested,
    RoundDue,
    Update,
)
from atoll.server.rounds.record import UPDATE_LOST
from atoll.server.rounds.run_rules import WatchedMetric
from tests.server.rounds.test_buffer_round import Flow, buffered, invited
from tests.server.rounds.test_cohort_round import Drive, kinds, released, scales, verdict


def lost(*digests: str, versions: tuple[int, ...] = ()) -> FilesLost:
    return FilesLost(tuple(map(Digest, digests)), tuple(map(Version, versions)), detail="x.bin is missing")


def abandoned(effects: list[object]) -> list[AbandonReason]:
    return [effect.reason for effect in effects if isinstance(effect, Abandon)]


def test_an_open_round_goes_on_without_a_lost_update_and_says_so() -> None:
    drive = Drive(cohort_size=3, quorum=2, deadline=60.0)
    drive.begin("abc")
    drive.update("a", at=5)
    assert drive.do(lost("a1"), 10) == []
    row = drive.row("a")
    assert (row.fate, row.reason, row.digest, row.is_lost) == (Fate.FAILED, UPDATE_LOST, "a1", True)
    assert row.unused_because == "lost after it was accepted: x.bin is missing"
    assert drive.record.num_in == 0
    drive.update("b", at=20)
    effects = drive.update("c", at=21)
    assert scales(effects) == {"b": 1.0, "c": 1.0}
    assert drive.record.close_reason == "all_answered"


def test_a_lost_update_counts_when_its_client_still_has_it() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0)
    drive.begin("ab")
    drive.update("a", at=5)
    drive.do(lost("a1"), 10)
    assert not drive.machine.is_accepted(update := drive_update(drive, "a")), "its bytes are wanted"
    assert drive.machine.refusal(update) is None
    assert verdict(drive.update("a", at=12)) == "accepted"
    row = drive.row("a")
    assert (row.fate, row.is_lost, row.unused_because) == (Fate.REPORTED, False, "")
    assert verdict(drive.update("a", at=13)) == "accepted", "its answer was lost"
    drive.update("b", at=14)
    drive.fold()
    assert drive.row("a", 1).used_in == 1


def drive_update(drive: Drive, client: str) -> Update:
    return Update(ClientId(client), drive.record.round_id, Version(0), Digest(f"{client}1"), 10, 1.0)


def test_a_quorum_that_lacks_only_lost_updates_costs_no_retry() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, retry=0)
    drive.begin("ab")
    drive.update("a", at=5)
    drive.do(lost("a1"), 10)
    drive.lose("b", at=20)
    drive.tick(60)
    assert drive.record.phase is Phase.ABANDONED
    assert drive.record.abandon_reason is AbandonReason.FILES_LOST
    assert drive.machine.ledger.state is RunState.RUNNING
    assert "1 failed (update_lost)" in drive.record.detail


@pytest.mark.parametrize(("quorum", "then"), [(1, "Aggregate"), (2, "Abandon")])
def test_a_round_that_aggregates_folds_what_is_left_or_ends_below_its_quorum(quorum: int, then: str) -> None:
    drive = Drive(cohort_size=2, quorum=quorum, deadline=60.0, retry=0)
    drive.begin("ab")
    drive.update("a", at=5)
    drive.update("b", at=6)
    assert kinds(drive.do(CoordinatorStarted(1010.0), 20)) == ["Aggregate"]
    effects = drive.do(lost("a1"), 20)
    assert kinds(effects)[0] == then
    if then == "Aggregate":
        assert scales(effects) == {"b": 1.0}
        assert [e.used for e in drive.fold() if isinstance(e, Commit)] == [("b1",)]
    else:
        assert abandoned(list(effects)) == [AbandonReason.FILES_LOST]
        assert any(isinstance(effect, OpenNextRound) for effect in effects)


def test_a_linger_ends_no_round_that_has_lost_its_quorum() -> None:
    drive = Drive(cohort_size=3, quorum=2, deadline=60.0, linger=5.0)
    drive.begin("abc")
    drive.update("a", at=1)
    drive.update("b", at=2)
    assert drive.deadline == 7.0
    drive.do(lost("b1"), 3)
    assert drive.deadline == 60.0


def test_a_late_update_that_a_lost_one_had_superseded_counts_after_all() -> None:
    drive = Drive(cohort_size=2, quorum=1, deadline=60.0, late="next_round", max_staleness=2)
    drive.begin("ab")
    drive.update("a", at=5)
    drive.tick(60)
    drive.fold()
    drive.begin("ab", at=70)
    drive.update("b", at=71, round_id=1)
    drive.update("a", at=72)
    effects = drive.update("b", at=73)
    assert scales(effects) == {"a": 1.0, "b": 1.0}
    assert drive.record.superseded == ["b1"]
    effects = drive.do(lost("b2"), 74)
    assert [c.digest for e in effects if isinstance(e, Aggregate) for c in e.contributions] == ["a2", "b1"]
    assert drive.record.superseded == []
    drive.fold()
    assert drive.row("b", 1).used_in == 2


def test_a_lost_update_that_was_carried_over_is_in_the_record_of_its_round() -> None:
    drive = Drive(cohort_size=2, deadline=60.0, late="next_round", max_staleness=2)
    drive.begin("ab")
    drive.update("a", at=5)
    drive.tick(60)
    assert set(drive.machine.ledger.carried) == {"a"}
    assert drive.do(lost("a1"), 61) == [AmendRecord(drive.record.round_id)]
    assert drive.machine.ledger.carried == {}
    assert drive.row("a", 1).is_lost


def test_a_buffer_lets_lost_updates_go_in_it_and_in_the_queue() -> None:
    flow = Flow(buffer_size=2, concurrency=3)
    flow.join("abc")
    flow.update("a")
    assert kinds(flow.do(lost("a1"))) == []
    flow.update("b")
    effects = flow.update("c")
    assert [client for client, *_ in buffered(effects)] == ["b", "c"]
    effects = flow.do(lost("b1"))
    assert abandoned(list(effects)) == [AbandonReason.FILES_LOST]
    assert [update.digest for update in flow.machine.ledger.waiting] == ["c1"]
    effects = flow.do(lost("c1"))
    assert AmendRecord(flow.record.round_id) in effects
    assert flow.machine.ledger.waiting == []


def test_an_abandoned_fold_leaves_its_updates_before_those_that_came_meanwhile() -> None:
    flow = Flow(buffer_size=2, concurrency=3)
    flow.join("abc")
    flow.update("a")
    assert [client for client, *_ in buffered(flow.update("b"))] == ["a", "b"]
    flow.update("c")
    flow.do(lost("a1"))
    assert [update.digest for update in flow.machine.ledger.waiting] == ["b1", "c1"]


def test_clients_that_train_from_a_lost_version_are_told_to_stop_and_their_updates_are_refused() -> None:
    flow = Flow(buffer_size=1, concurrency=2, max_staleness=4)
    flow.join("a")
    flow.update("a")
    flow.commit()
    assert invited(flow.join("b")) == {"b": 1}
    flow.update("a", round_id=2)
    flow.commit()
    assert flow.training["b"] == 2
    assert released(flow.do(lost(versions=(1,)))) == {"b": False}
    assert flow.training["b"] == 3, "it is invited again, from the current version"
    assert verdict(flow.update("b", round_id=2)) is RejectReason.TOO_STALE
    assert flow.machine.ledger.state is RunState.RUNNING


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("phase", ["between", "collecting", "aggregating"])
def test_a_run_without_its_model_fails_and_names_the_file(version: int, phase: str) -> None:
    drive = Drive(cohort_size=1, rounds=5)
    drive.begin("a")
    drive.update("a")
    drive.fold()
    if phase != "between":
        drive.begin("a")
    if phase == "aggregating":
        drive.update("a")
    effects = drive.do(lost(versions=(version,)))
    assert [e.state for e in effects if isinstance(e, EndRun)] == [RunState.FAILED]
    assert "x.bin is missing" in drive.machine.ledger.cause
    assert abandoned(list(effects)) == ([] if phase == "between" else [AbandonReason.FILES_LOST])
    assert drive.machine.ledger.lost == [version]
    drive.do(ResumeRequested())
    assert drive.machine.ledger.lost == []
    assert drive.machine.ledger.state is RunState.RUNNING, "the driver has seen that the files are back"


def test_a_lost_best_version_makes_place_for_a_later_one() -> None:
    best = WatchedMetric("loss", "server", "min")
    drive = Drive(rounds=5, cohort_size=1, rules={"best": best, "evaluate_server_every": 1})
    for number in (1, 2, 3):
        drive.begin("a") if number == 1 else drive.do(RoundDue()) and drive.draw("a")
        drive.update("a")
        drive.fold()
        drive.do(ModelEvaluated(Version(number), {"loss": (1.0, 1.0)}))
        drive.do(MetricsComputed(Version(number), "server", {"loss": float(number)}))
        if number == 2:
            drive.do(lost(versions=(1,)))
            assert drive.machine.ledger.best is None
    assert drive.machine.ledger.best is not None
    assert drive.machine.ledger.best.version == 3


def test_an_ended_run_notes_lost_versions_and_goes_on_ending_once() -> None:
    drive = Drive(rounds=1, cohort_size=1)
    drive.begin("a")
    drive.update("a")
    drive.fold()
    assert drive.machine.ledger.state is RunState.FINISHED
    assert drive.do(lost(versions=(1,))) == []
    assert drive.machine.ledger.lost == [1]


def test_the_event_is_journaled_as_it_is() -> None:
    event: Event = lost("a" * 64, versions=(3,))
    assert decode_event(*encode_event(event), where="here") == event
