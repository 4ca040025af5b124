"""The round of an invitation whose update counted last: its outcome is the client's current state."""

from typing import Any

from atoll.protocol.vocabulary import ClientId, LossReason
from atoll.server.journal.codec import decode_ledger, encode_ledger
from atoll.server.rounds.events import AskEvaluation, CoordinatorStarted, Effect, Invite, RoundDue
from tests.server.rounds.test_buffer_round import Flow
from tests.server.rounds.test_cohort_round import Drive, late_in_next_round


def counted(effects: list[Effect]) -> dict[str, int]:
    return {e.client_id: e.counted_round for e in effects if isinstance(e, Invite | AskEvaluation)}


def next_round(drive: Drive, cohort: str) -> dict[str, int]:
    drive.do(RoundDue())
    return counted(drive.draw(cohort))


def committed(drive: Drive, clients: str) -> None:
    for client in clients:
        drive.update(client)
    drive.fold()


def test_it_is_the_newest_round_whose_update_is_in_a_model() -> None:
    drive = Drive(rounds=9, cohort_size=2)
    assert counted(drive.begin("ab")) == {"a": 0, "b": 0}
    committed(drive, "ab")
    drive.join("c")
    assert next_round(drive, "bc") == {"b": 1, "c": 0}
    committed(drive, "bc")
    assert next_round(drive, "ab") == {"a": 1, "b": 2}


def test_an_accepted_update_of_an_abandoned_round_does_not_count() -> None:
    drive = Drive(rounds=9, cohort_size=2)
    drive.begin("ab")
    committed(drive, "ab")
    next_round(drive, "ab")
    drive.update("a", at=1)
    drive.lose("b", at=2, why=LossReason.LEFT)  # below the quorum: abandoned
    assert drive.record.phase == "abandoned"
    drive.join("b", at=3)
    assert next_round(drive, "ab") == {"a": 1, "b": 1}


def test_while_the_fold_is_under_way_nothing_has_counted_yet() -> None:
    drive = Drive(rounds=9, cohort_size=1, over_selection=2.0)
    drive.begin("ab")
    drive.update("a")
    assert drive.machine.ledger.membership.counted_round(ClientId("a")) == 0
    drive.fold()
    assert drive.machine.ledger.membership.counted_round(ClientId("a")) == 1
    assert drive.machine.ledger.membership.counted_round(ClientId("b")) == 0


def test_a_late_update_counts_with_its_own_round() -> None:
    drive = late_in_next_round()
    drive.update("b", at=63, round_id=1)
    drive.update("a", at=64)
    drive.tick(at=122)
    drive.fold(at=123)
    drive.do(RoundDue(), at=124)
    assert counted(drive.draw("ab")) == {"a": 2, "b": 1}


def test_a_client_that_returns_or_a_restarted_coordinator_gets_the_same_count() -> None:
    drive = Drive(rounds=9, cohort_size=2)
    drive.begin("ab")
    committed(drive, "ab")
    assert next_round(drive, "ab") == {"a": 1, "b": 1}
    drive.do(CoordinatorStarted(drive.now))
    assert counted(drive.join("a")) == {"a": 1}


def test_it_is_in_the_snapshot_and_older_snapshots_have_none() -> None:
    drive = Drive(rounds=9, cohort_size=2)
    drive.begin("ab")
    committed(drive, "ab")
    body = encode_ledger(drive.machine.ledger)
    ledger = decode_ledger(body, where="here")
    assert ledger.membership.counted_round(ClientId("a")) == 1
    older = decode_ledger(body.replace(',"counted_round":1', ""), where="here")
    assert older.membership.counted_round(ClientId("a")) == 0


def test_an_evaluation_asks_with_what_the_version_holds() -> None:
    rules: dict[str, Any] = {"evaluate_clients_every": 1}
    drive = Drive(rounds=9, rules=rules, cohort_size=1)
    drive.join("b")
    drive.begin("a", cohort="a")
    drive.update("a")
    assert counted(drive.fold()) == {"a": 1, "b": 0}


def test_in_an_asynchronous_run_it_is_the_round_of_the_invitation() -> None:
    flow = Flow(concurrency=3, buffer_size=2)
    assert counted(flow.join("abc")) == {"a": 0, "b": 0, "c": 0}
    flow.update("a")
    assert counted(flow.update("b")) == {}, "nothing counts before it is in a model"
    assert counted(flow.commit()) == {"a": 1, "b": 1}
    flow.update("a")
    flow.update("c", round_id=1)
    assert counted(flow.commit()) == {"a": 2, "c": 1}
    assert counted(flow.join("b")) == {"b": 1}, "who comes back is told the same"
