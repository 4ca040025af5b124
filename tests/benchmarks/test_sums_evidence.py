"""The evidence about runs with secure sums must be able to fail: what it looks for is planted here, and found."""

import sqlite3
from contextlib import closing

import pytest

from atoll.protocol.vocabulary import AbandonReason, ClientId, Fate, Phase, RoundId, RunState, Version
from atoll.server.rounds.record import ClientRecord, RoundRecord
from atoll.task.randomness import training_seed
from atoll.tensors.safetensors_file import write
from benchmarks.evidence import Ledger
from benchmarks.sums_evidence import by_noise, faults_of_promises, judge_sums, left_behind
from benchmarks.tasks import Noise

TASK = Noise({"ATOLL_BENCH_ELEMENTS": "30"})


class Seeded:
    def __init__(self, site):
        self.seed = training_seed(7, "crash", 1, site)


@pytest.fixture
def ended(tmp_path):
    """A run of one round whose version is the weighted mean of the updates of a and b."""
    base = TASK.initial(0)
    trained = {site: TASK.train(base, Seeded(site)) for site in "ab"}
    weights = {site: min(1.0, one.num_examples / 500) for site, one in trained.items()}
    made = {
        key: base[key] + sum(weights[site] * one.update[key] for site, one in trained.items()) / sum(weights.values())
        for key in base
    }
    write(tmp_path / "000000.safetensors", base)
    write(tmp_path / "000001.safetensors", {key: made[key].astype(base[key].dtype) for key in base})
    record = RoundRecord(RoundId(1), Version(0), 0.0, cohort_size=3, quorum=2, num_needed_to_draw=3)
    record.phase, record.version = Phase.COMMITTED, Version(1)
    record.clients = {ClientId(site): ClientRecord(0.0, Fate.REPORTED, used_in=RoundId(1)) for site in "ab"}
    record.clients[ClientId("c")] = ClientRecord(0.0, Fate.FAILED, detail="it was restarted")
    state = tmp_path / "a"
    (state / "encoded").mkdir(parents=True)
    with closing(sqlite3.connect(state / "policy.db")) as database:
        database.execute("CREATE TABLE promises (number, kind, run, purpose, round, attempt)")
        database.commit()
    return tmp_path, record


def judged(ended, logs=(), in_logs=(), state=RunState.FINISHED):
    folder, record = ended
    return judge_sums(
        Ledger(state, "because", (record,), {}),
        set(in_logs),
        versions=folder,
        trained=by_noise(TASK, 7, "crash"),
        examples_max=500,
        states={"a": folder / "a"},
        logs=dict(logs),
    )


def test_a_version_that_is_the_sum_of_its_clients_is_well(ended):
    assert judged(ended, in_logs={(1, "a"), (1, "c")}).text == "well"


def test_a_version_without_an_update_that_the_record_counts_is_found(ended):
    ended[1].clients["c"].used_in = RoundId(1)
    assert judged(ended).text == "other bits"


def test_an_accepted_update_without_a_word_is_lost(ended):
    ended[1].clients["c"].detail = ""
    assert judged(ended, in_logs={(1, "c")}).lost == ["round 1 of c, accepted by its log"]


def test_a_traceback_an_unfinished_run_and_what_is_left_of_an_update_are_faults(ended):
    (ended[0] / "a" / "encoded" / "update").write_bytes(b"1")
    verdict = judged(ended, logs={"a": "Traceback (most recent call last)"}, state=RunState.FAILED)
    assert verdict.faults == [
        "the run is failed (because)",
        "a keeps encoded/update",
        "the log of a has a traceback",
    ]
    assert [str(path) for path in left_behind(ended[0] / "a")] == ["encoded/update"]


def test_a_round_may_be_abandoned_for_its_sums_alone(ended):
    record = ended[1]
    record.phase, record.abandon_reason = Phase.ABANDONED, AbandonReason.SECURE_FAILED
    assert judged(ended).text == "well"
    record.abandon_reason = AbandonReason.STOP_REQUESTED
    assert "round 1 is abandoned" in judged(ended).text


def test_a_promise_that_is_given_twice_or_after_a_signature_is_found():
    joined, signed = ("joined", "digits-1", 1, 1), ("signed", "digits-1", 1, 1)
    assert faults_of_promises([joined, signed, ("joined", "digits-1", 2, 1)]) == []
    assert faults_of_promises([joined, joined]) == ["joined twice in round 1, attempt 1"]
    assert faults_of_promises([joined, signed, ("joined", "digits-1", 1, 2)]) == [
        "joined attempt 2 of round 1 after a signature"
    ]
