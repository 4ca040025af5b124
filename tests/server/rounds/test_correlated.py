"""Correlated noise in a run: clients stay apart, each fold names the noises it takes off, all rounds are one use."""

import random
from dataclasses import replace

import pytest

from atoll.protocol.privacy.correlated import inverse_of, inverse_square_root, squared_sensitivity
from atoll.protocol.privacy.gaussian import epsilon_of, mu_within, noise_multiplier_of
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunState
from atoll.server.journal.codec import decode_ledger, decode_rules, encode_ledger, encode_rules
from atoll.server.rounds.events import (
    Aggregate,
    AggregationFailed,
    CoordinatorStarted,
    DrawCohort,
    EndRun,
    NoiseRow,
    ResumeRequested,
    RoundDue,
    set_digest,
)
from atoll.server.rounds.privacy_rules import CorrelatedRules
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.waiting import why_not
from tests.server.rounds.test_cohort_round import Drive
from tests.server.rounds.test_privacy import DELTA, named, private, uses


def correlated(rounds: int = 12, apart: int = 3, bands: int = 3, *, epsilon: float = 4.0) -> CorrelatedRules:
    z, most = noise_multiplier_of(epsilon, DELTA), -(-rounds // apart)
    spent_max = mu_within(epsilon, DELTA) ** 2
    return CorrelatedRules(epsilon, DELTA, z, 1.0, most, spent_max, rounds=rounds, apart=apart, bands=bands)


def offered(drive: Drive) -> list[str]:
    """Open a round, and return the clients that its sampler may draw."""
    [draw] = [effect for effect in drive.do(RoundDue()) if isinstance(effect, DrawCohort)]
    return [str(candidate.client_id) for candidate in draw.candidates]


def aggregated(drive: Drive, clients: str) -> Aggregate:
    """Close the open round with a cohort."""
    effects = [*drive.draw(clients), *(effect for client in clients for effect in drive.update(client))]
    [aggregate] = [effect for effect in effects if isinstance(effect, Aggregate)]
    return aggregate


@pytest.mark.parametrize("clients", ["abcdefgh", "abcdefghij"])
@pytest.mark.parametrize("seed", range(3))
def test_no_client_is_drawn_before_its_versions_are_apart_through_failures_and_restarts(
    seed: int, clients: str
) -> None:
    """With no cohort to spare, too, no round lacks clients: the run ends when those that are apart have no budget."""
    draw, of_run = random.Random(seed), correlated(rounds=40, apart=4)
    drive = private(of_run, clients, rounds=40, retry=1000)
    last: dict[str, int] = {}
    failed = 0
    while drive.machine.ledger.state is RunState.RUNNING:
        version = drive.machine.ledger.version
        free = offered(drive)
        assert all(version >= last[client] + 4 for client in free if client in last)
        kept = [client for client, row in last.items() if row + 4 > version]
        spent = {client for client, number in uses(drive).items() if number >= of_run.participations_max}
        assert {*free} == {*clients} - {*kept} - spent, "all others are candidates"
        assert len(free) >= 2, "a run that no client can continue has ended"
        cohort = "".join(sorted(draw.sample(free, 2)))
        aggregated(drive, cohort)
        if draw.random() < 0.3:
            drive.do(CoordinatorStarted(drive.now))
            drive.join(clients)
        if draw.random() < 0.1:
            drive.do(AggregationFailed(RoundId(drive.newest), "disk"))  # its clients are charged, and may repeat it
            failed += 1
        else:
            drive.fold()
            last |= dict.fromkeys(cohort, version)
        drive.machine.validate()
        if drive.machine.ledger.state is RunState.RUNNING:
            ledger = decode_ledger(encode_ledger(drive.machine.ledger), where="here")
            assert ledger == drive.machine.ledger
            drive.machine = RunMachine(drive.rules, ledger)
            drive.machine.validate()
    assert failed
    assert max(uses(drive).values()) <= of_run.participations_max
    assert drive.machine.ledger.version == 40 or "privacy budget is spent" in drive.machine.ledger.cause


def test_a_fold_names_the_noises_of_the_last_versions_and_its_repetition_the_same() -> None:
    drive = private(correlated(apart=1, bands=3), "ab", rounds=12)
    rows: list[NoiseRow] = []
    base = "v0"
    for number in range(5):
        offered(drive)
        aggregate = aggregated(drive, "ab")
        assert aggregate.earlier == tuple(rows[:2])
        again = drive.do(CoordinatorStarted(drive.now))
        assert [effect for effect in again if isinstance(effect, Aggregate)] == [aggregate]
        drive.join("ab")
        drive.fold()
        used = [contribution.digest for contribution in aggregate.contributions]
        rows.insert(0, NoiseRow(aggregate.round_id, Digest(base), set_digest(used)))
        base = "next"
        assert drive.machine.ledger.noises == tuple(rows[:2])
        assert len(used) == 2, number


def test_a_fold_that_fails_leaves_no_noise_to_take_off() -> None:
    drive = private(correlated(apart=1, bands=3), "ab", rounds=12, retry=10)
    offered(drive)
    aggregated(drive, "ab")
    drive.do(AggregationFailed(RoundId(drive.newest), "disk"))
    offered(drive)
    assert aggregated(drive, "ab").earlier == ()


def test_clients_of_a_version_are_named_as_apart_and_those_of_a_failed_fold_may_repeat_it() -> None:
    drive = private(replace(correlated(apart=2), participations_max=3), "abcd", rounds=12, retry=10)
    membership = drive.machine.ledger.membership
    offered(drive)
    aggregated(drive, "ab")
    drive.do(AggregationFailed(RoundId(drive.newest), "disk"))
    assert offered(drive) == [*"abcd"]
    aggregated(drive, "ab")
    drive.fold()
    assert [why_not(membership, ClientId(client)) for client in "ac"] == ["apart from its last use until version 2", ""]
    for cohort in ("cd", "ab"):
        assert offered(drive) == [*cohort]
        aggregated(drive, cohort)
        drive.fold()
    assert why_not(membership, ClientId("a")) == "without a privacy budget for another round"
    assert offered(drive) == [*"cd"]
    aggregated(drive, "cd")
    assert drive.fold()[-1].cause.startswith("the privacy budget is spent"), "c, d wait for a version that none makes"


def test_a_client_has_spent_the_share_of_its_uses_and_all_of_them_spend_the_budget() -> None:
    of_run = correlated(rounds=12, apart=3, bands=3)
    c = inverse_of(inverse_square_root(3), 12)
    spent = 0.0
    for number in range(1, 5):
        assert of_run.allows(spent, number - 1)
        spent = of_run.spent_after(spent, number - 1)
        share = squared_sensitivity(c, 12, 3, number) / squared_sensitivity(c, 12, 3, 4)
        assert spent == pytest.approx(share / of_run.noise_multiplier**2)
    assert not of_run.allows(spent, 4)
    assert of_run.epsilon_of(spent) == pytest.approx(4.0, abs=1e-6)
    assert of_run.epsilon_of(spent) == epsilon_of(1.0 / of_run.noise_multiplier, DELTA)
    sentence = of_run.guarantee(spent, 4).sentence
    assert "Gaussian noise that is correlated over rounds (a banded inverse square root)" in sentence
    assert "at most 4 uses of one client, at least 3 rounds apart" in sentence
    assert decode_rules(encode_rules(private(of_run).rules), where="").privacy == of_run


@pytest.mark.parametrize("is_open", [False, True], ids=["between rounds", "in a fold"])
def test_a_restored_run_whose_later_noises_are_unknown_ends(*, is_open: bool) -> None:
    privacy = correlated(apart=1)
    drive = private(privacy, "ab", rounds=12)
    offered(drive)
    aggregated(drive, "ab")
    drive.fold()
    if is_open:
        offered(drive)
        aggregated(drive, "ab")
    ends = [effect for effect in named(drive, 3) if isinstance(effect, EndRun)]
    why = "rounds 2 to 3 came after the restored backup, and the noise of later rounds would need theirs"
    spent = "the privacy budget is spent: epsilon 4 of 4 at delta 1e-05 after 1 round"
    assert ends == [EndRun(RunState.FINISHED, spent if is_open else why)]
    assert min(uses(drive).values()) >= privacy.participations_max
    if is_open:
        assert drive.record.detail == why
    drive.machine.validate()
    more = replace(privacy, epsilon=8.0, spent_max=mu_within(8.0, DELTA) ** 2)
    again = drive.do(ResumeRequested(rules=replace(drive.machine.rules, privacy=more)))
    assert again == [EndRun(RunState.FINISHED, spent.replace("of 4", "of 8"))], "no round follows a resume"
    drive.machine.validate()
