"""The budget of a private run: charged when a round closes, never refunded, and the run ends before it is exceeded."""

import random
from dataclasses import replace

import pytest

from atoll.protocol.privacy.adaptive_clip import AdaptiveClip
from atoll.protocol.privacy.gaussian import epsilon_of, mu_of, mu_within, noise_multiplier_of
from atoll.protocol.vocabulary import AbandonReason, ClientId, Digest, FailureReason, RoundId, RunState
from atoll.server.journal.codec import decode_ledger, decode_rules, encode_ledger, encode_rules
from atoll.server.members.member import Candidate, Profile
from atoll.server.rounds.events import (
    Aggregate,
    Aggregated,
    AggregationFailed,
    ClientFailed,
    ClientJoined,
    CoordinatorStarted,
    DrawCohort,
    Effect,
    EndRun,
    FilesLost,
    OpenNextRound,
    PublishedNamed,
    ResumeRequested,
    RoundDue,
)
from atoll.server.rounds.privacy_rules import PrivacyRules
from atoll.server.rounds.run_machine import RunMachine
from tests.server.rounds.test_cohort_round import Drive, kinds

DELTA = 1e-5


def rules(uses: int = 3, *, epsilon: float = 4.0, participations_max: int = 1000) -> PrivacyRules:
    z = noise_multiplier_of(epsilon, DELTA, uses)
    return PrivacyRules(epsilon, DELTA, z, 1.0, participations_max, mu_within(epsilon, DELTA) ** 2)


def private(privacy: PrivacyRules, clients: str = "ab", rounds: int = 50, **policy: object) -> Drive:
    fields: dict[str, object] = {"cohort_size": 2, "quorum": 2, "deadline": 60.0} | policy
    drive = Drive(rounds=rounds, rules={"privacy": privacy}, **fields)
    drive.join(clients)
    return drive


def opened(drive: Drive, clients: str) -> None:
    drive.do(RoundDue())
    drive.draw(clients)


def closed(drive: Drive, clients: str = "ab") -> None:
    opened(drive, clients)
    for client in clients:
        drive.update(client)


def uses(drive: Drive) -> dict[str, int]:
    return {str(name): member.uses for name, member in sorted(drive.machine.ledger.membership.members.items())}


def test_the_run_ends_before_the_round_that_would_exceed_its_budget() -> None:
    privacy = rules(uses=3)
    drive = private(privacy)
    for number in range(3):
        closed(drive)
        drive.fold()
        assert drive.record.charge is not None
        assert drive.record.charge.epsilon == pytest.approx(
            epsilon_of(mu_of([(privacy.noise_multiplier, number + 1)]), DELTA)
        )
        drive.machine.validate()
    assert drive.effects[-1] == EndRun(
        RunState.FINISHED, "the privacy budget is spent: epsilon 4 of 4 at delta 1e-05 after 3 rounds"
    )
    assert drive.machine.ledger.membership.most_spent <= privacy.spent_max


def test_a_charge_is_made_by_the_event_that_closes_the_round_before_its_fold() -> None:
    drive = private(rules())
    opened(drive, "ab")
    drive.update("a")
    assert uses(drive) == {"a": 0, "b": 0}
    assert kinds(drive.update("b")) == ["Accept", "AuditCharge", "Aggregate"]
    assert uses(drive) == {"a": 1, "b": 1}
    assert kinds(drive.do(CoordinatorStarted(drive.now))) == ["Aggregate"], "a charge is audited once"
    assert drive.record.charge is not None
    assert drive.record.charge.clients == 2


def test_a_round_that_fails_after_its_charge_stays_charged() -> None:
    drive = private(rules(uses=2), retry=9)
    closed(drive)
    drive.do(AggregationFailed(RoundId(drive.newest), "disk"))
    closed(drive)
    drive.do(AggregationFailed(RoundId(drive.newest), "disk"))
    assert uses(drive) == {"a": 2, "b": 2}
    assert (drive.machine.ledger.state, drive.machine.ledger.version) == (RunState.FINISHED, 0)
    assert drive.machine.ledger.cause == "the privacy budget is spent: epsilon 4 of 4 at delta 1e-05 after 0 rounds"


def test_a_round_that_never_closes_costs_nothing() -> None:
    drive = private(rules(), retry=9)
    opened(drive, "ab")
    drive.update("a")
    drive.do(ClientFailed(ClientId("b"), RoundId(drive.newest), FailureReason.TRAINING_FAILED))
    assert uses(drive) == {"a": 0, "b": 0}


def test_lost_updates_and_restarts_neither_charge_again_nor_refund() -> None:
    drive = private(rules(), clients="abc", cohort_size=3, quorum=2)
    opened(drive, "abc")
    for client in "abc":
        drive.update(client)
    assert kinds(drive.do(CoordinatorStarted(drive.now))) == ["Aggregate"]
    assert uses(drive) == {"a": 1, "b": 1, "c": 1}
    lost = drive.machine.round.reported_on_time[ClientId("c")].digest  # type: ignore[union-attr]
    drive.do(FilesLost((lost,), detail="gone"))
    assert uses(drive) == {"a": 1, "b": 1, "c": 1}


def test_a_client_that_has_taken_part_often_enough_is_no_candidate() -> None:
    drive = private(rules(uses=100, participations_max=1), clients="abcd")
    closed(drive, "ab")
    drive.fold()
    membership = drive.machine.ledger.membership
    assert [*membership.available()] == ["c", "d"]
    assert membership.unavailable() == ["a", "b"]
    assert membership.num_available == 2
    drive.join("a")
    assert [*membership.available()] == ["c", "d"], "not after it has joined again"
    drive.machine.validate()
    closed(drive, "cd")
    drive.fold()
    assert drive.machine.ledger.state is RunState.FINISHED


def test_a_sampler_sees_no_value_of_a_single_clients_data() -> None:
    drive = Drive(rules={"privacy": rules()}, cohort_size=1, quorum=1)
    drive.do(ClientJoined(ClientId("a"), "s", Profile(977, "north")))
    [drawing] = [effect for effect in drive.do(RoundDue()) if isinstance(effect, DrawCohort)]
    assert drawing.candidates == (Candidate(ClientId("a"), 0, "north"),)


def test_the_run_waits_for_members_that_still_have_a_budget() -> None:
    drive = private(rules(uses=100, participations_max=1), clients="abcd")
    closed(drive, "ab")
    drive.lose("c")
    assert kinds(drive.fold())[-1] == "OpenNextRound"


def test_a_resume_with_a_larger_budget_continues_and_forgets_no_charge() -> None:
    privacy = rules(uses=1)
    drive = private(privacy)
    closed(drive)
    drive.fold()
    assert drive.machine.ledger.state is RunState.FINISHED
    assert kinds(drive.do(ResumeRequested(rules=drive.machine.rules))) == ["EndRun"], "the same budget is still spent"
    more = replace(privacy, epsilon=8.0, spent_max=mu_within(8.0, DELTA) ** 2)
    effects = drive.do(ResumeRequested(rules=replace(drive.machine.rules, privacy=more)))
    assert isinstance(effects[-1], OpenNextRound)
    assert uses(drive) == {"a": 1, "b": 1}
    drive.join("ab")
    closed(drive)
    drive.fold()
    assert drive.record.charge is not None
    assert 4.0 < drive.record.charge.epsilon <= 8.0


def test_the_ledger_and_the_rules_survive_their_encoding() -> None:
    drive = private(rules(uses=1))
    closed(drive)
    drive.fold()
    assert decode_rules(encode_rules(drive.rules), where="") == drive.rules
    ledger = decode_ledger(encode_ledger(drive.machine.ledger), where="here")
    assert ledger == drive.machine.ledger
    again = RunMachine(drive.rules, ledger)
    again.validate()
    assert ledger.membership.num_apart(ledger.version) == (2, 0)
    assert [*ledger.membership.available()] == []


@pytest.mark.parametrize("seed", range(3))
def test_charges_never_fall_in_a_thousand_restarts(seed: int) -> None:
    """Rounds that commit or fail, with a restart from the encoded ledger or a replayed start after any event."""
    draw, privacy = random.Random(seed), rules(uses=60)
    drive = private(privacy, clients="abcd", rounds=10_000, retry=1000)
    before, restarts = uses(drive), 0
    while drive.machine.ledger.state is RunState.RUNNING:
        clients = "".join(sorted(draw.sample("abcd", 2)))
        free = "".join(map(str, drive.machine.ledger.membership.available()))
        clients = clients if set(clients) <= set(free) else free[:2]
        closed(drive, clients)
        for _ in range(draw.randint(0, 9)):
            drive.do(CoordinatorStarted(drive.now))
            restarts += 1
        drive.join("abcd")
        if draw.random() < 0.3:
            drive.do(AggregationFailed(RoundId(drive.newest), "disk"))
        else:
            drive.fold()
        if drive.machine.ledger.state is RunState.RUNNING:
            ledger = decode_ledger(encode_ledger(drive.machine.ledger), where="here")
            drive.machine = RunMachine(drive.rules, ledger)
        now = uses(drive)
        assert all(now[name] >= count for name, count in before.items())
        assert sum(now.values()) == sum(before.values()) + 2
        assert drive.machine.ledger.membership.most_spent <= privacy.spent_max
        before = now
    assert restarts > 200
    assert drive.machine.ledger.cause.startswith("the privacy budget is spent: epsilon ")


# ---------------------------------------------------------------- a restored backup


def named(drive: Drive, number: int, restoration: str = "r1") -> list[Effect]:
    return drive.do(PublishedNamed(RoundId(number), restoration))


def test_rounds_after_a_restored_backup_are_charged_to_all_clients_and_to_those_that_join_later() -> None:
    drive = private(rules(uses=5), clients="abc")
    closed(drive)
    drive.fold()
    effects = named(drive, 4)
    assert kinds(effects) == ["AuditCharge", "OpenNextRound"]
    assert uses(drive) == {"a": 4, "b": 4, "c": 3}
    drive.join("d")
    assert uses(drive)["d"] == 3, "it may have been in each of the forgotten rounds"
    assert named(drive, 9) == [], "a restoration is answered once"
    assert uses(drive) == {"a": 4, "b": 4, "c": 3, "d": 3}
    drive.machine.validate()
    named(drive, 4, "r2")
    assert uses(drive) == {"a": 7, "b": 7, "c": 6, "d": 6}, "another restoration forgets other rounds"
    assert drive.machine.ledger.state is RunState.FINISHED
    assert drive.machine.ledger.cause.startswith("the privacy budget is spent: epsilon ")


def test_no_charge_follows_if_the_backup_knows_every_published_round() -> None:
    drive = private(rules(uses=5))
    closed(drive)
    drive.fold()
    opened(drive, "ab")
    assert named(drive, 1) == []
    assert uses(drive) == {"a": 1, "b": 1}
    drive.update("a")
    assert kinds(drive.update("b"))[-1] == "Aggregate", "the open round continues"


@pytest.mark.parametrize("uses_left", [4, 2])
def test_an_open_round_of_a_restored_backup_is_abandoned_as_its_clients_may_be_spent(uses_left: int) -> None:
    drive = private(rules(uses=1 + uses_left))
    closed(drive)
    drive.fold()
    opened(drive, "ab")
    drive.update("a")
    effects = named(drive, 3)
    assert "Abandon" in kinds(effects)
    assert drive.machine.ledger.past[RoundId(2)].abandon_reason is AbandonReason.RESTORED
    assert uses(drive) == {"a": 3, "b": 3}
    is_left = uses_left == 4
    assert kinds(effects)[-1] == ("OpenNextRound" if is_left else "EndRun")
    assert drive.machine.ledger.failures == 0
    drive.machine.validate()


def test_no_passed_deadline_closes_a_round_before_its_clients_are_charged_for_forgotten_ones() -> None:
    drive = private(rules(uses=2), clients="abc", cohort_size=3, quorum=2)
    opened(drive, "abc")
    for client in "ab":
        drive.update(client)
    drive.now += 1000.0
    effects = drive.do(PublishedNamed(RoundId(2), "r1"))
    assert "Aggregate" not in kinds(effects)
    assert uses(drive) == {"a": 2, "b": 2, "c": 2}
    assert drive.machine.ledger.state is RunState.FINISHED


def test_a_round_that_aggregated_at_the_backup_is_finished_and_counts_twice() -> None:
    drive = private(rules(uses=5))
    closed(drive)
    named(drive, 2)
    assert uses(drive) == {"a": 3, "b": 3}, "its charge, and as published as another set, and round 2"
    assert kinds(drive.do(CoordinatorStarted(drive.now))) == ["Aggregate"]
    drive.fold()
    assert (drive.machine.ledger.version, uses(drive)) == (1, {"a": 3, "b": 3})


def test_an_ended_run_is_charged_too_and_a_larger_budget_counts_it() -> None:
    privacy = rules(uses=1)
    drive = private(privacy)
    closed(drive)
    drive.fold()
    assert drive.machine.ledger.state is RunState.FINISHED
    assert kinds(named(drive, 3)) == ["AuditCharge"]
    more = replace(privacy, epsilon=8.0, spent_max=mu_within(8.0, DELTA) ** 2)
    drive.do(ResumeRequested(rules=replace(drive.machine.rules, privacy=more)))
    spent = epsilon_of(mu_of([(privacy.noise_multiplier, 3)]), DELTA)
    assert (drive.machine.ledger.state is RunState.RUNNING) == (spent < 8.0 and 4 * privacy.cost <= more.spent_max)
    assert uses(drive) == {"a": 3, "b": 3}


def test_a_run_without_privacy_and_an_empty_one_take_an_answer() -> None:
    plain = Drive()
    assert named(plain, 7) == []
    empty = Drive(rules={"privacy": rules(uses=3)}, cohort_size=2, quorum=2)
    assert kinds(named(empty, 7)) == ["AuditCharge", "EndRun"], "no later client has a budget either"


def test_an_adaptive_clip_norm_is_in_the_record_and_follows_committed_rounds_alone() -> None:
    privacy = replace(rules(uses=5), adaptive=AdaptiveClip(0.5, 0.2, 10.0, 2))
    drive = private(privacy)

    def aggregated(clip_norm: float) -> Aggregate:
        effect = [each for each in drive.effects if isinstance(each, Aggregate)][-1]
        assert effect.clip_norm == clip_norm == drive.record.clip_norm
        return effect

    closed(drive)
    aggregated(1.0)
    drive.do(Aggregated(RoundId(1), Digest("next"), clip_norm=1.25))
    closed(drive)
    aggregated(1.25)
    drive.do(AggregationFailed(RoundId(2), "no"))
    closed(drive)
    first = aggregated(1.25)
    assert [*drive.do(CoordinatorStarted(drive.now))] == [first], "after a kill it is the same"
    drive.do(Aggregated(RoundId(2), Digest("late"), clip_norm=9.0))
    again = decode_ledger(encode_ledger(drive.machine.ledger), where="")
    assert again.clip_norm == 1.25, "the answer of an ended round changes nothing"
    assert decode_rules(encode_rules(drive.machine.rules), where="") == drive.machine.rules
    drive.do(Aggregated(RoundId(3), Digest("next"), clip_norm=1.5))
    assert drive.machine.ledger.clip_norm == 1.5
    assert uses(drive) == {"a": 3, "b": 3}
