"""Secure sums as a user runs them: processes, sockets, certificates, kill -9. The model is the plain one's."""

import sqlite3
from base64 import b64encode
from contextlib import closing

import numpy as np
import pytest

from atoll.protocol.secure import wire
from atoll.protocol.secure.shamir import combined, weights
from atoll.server.journal.codec import decode_event
from atoll.tensors.safetensors_file import read
from benchmarks.sums_evidence import faults_of_promises, left_behind, promises_of
from tests.cli.invoking import said
from tests.federation.processes import RECORDED, ROOT, federation
from tests.federation.recorded import KINDS
from tests.waiting import BOUND_S

SECURE = {
    "secure__clip_norm": 300.0,
    "secure__bits": 64,
    "secure__examples_max": 200,
    "round__cohort_size": 4,
    "round__quorum": 3,
    "secure__stage_timeout": 120,
}


def model(it, version):
    return read(it.state / "runs" / "trouble-1" / "versions" / f"{version:06d}.safetensors")["w"]


def started(it, sites="abcd", environment=(), **settings):
    it.coordinator(environment=environment, **{**SECURE, **settings})
    for site in sites:
        it.agent(site)


def test_a_secure_run_has_the_model_of_a_plain_one_and_no_single_update(tmp_path):
    with federation(tmp_path) as it:
        started(it, rounds=3)
        assert it.wait_for_end() == 0
        for site in "abcd":
            assert it.wait_for_end(site) == 0
        np.testing.assert_allclose(model(it, 3), np.full(50_000, 3, np.float32), rtol=1e-6)
        for record in it.rounds():
            assert record.phase == "committed"
            assert [record.clients[site].fate for site in "abcd"] == ["reported"] * 4
            assert record.sums[0].stage == "opened"
            assert {row.num_examples for row in record.clients.values()} == {1}
        told = str(it.show("round", "show", "1"))
        assert "a takes part" not in told
        assert "Training of 4 members, in sums: loss 0.5." in told
        measured = it.show("run", "show", "trouble-1")["metrics"]
        assert measured["0"]["training"] == {"loss": 0.5}
        assert "training" not in measured["3"]
        assert "it has sent keys, shares, its masked update, its signature" in told


def test_a_site_that_is_killed_in_its_session_costs_the_others_nothing(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(**SECURE, rounds=2)
        for site in "abc":
            it.agent(site)
        it.agent("d", environment={"ATOLL_CRASH_AT": "agent.masked"}).wait(BOUND_S)
        it.agent("d")
        assert it.wait_for_end() == 0
        first, *_ = it.rounds()
        assert first.phase == "committed"
        assert first.clients["d"].sum.left.startswith("session_lost")
        assert [first.clients[site].fate for site in "abcd"] == ["reported"] * 3 + ["failed"]
        np.testing.assert_allclose(model(it, 1), np.full(50_000, 1, np.float32), rtol=1e-6)


@pytest.mark.parametrize("step", ["agent.promised/joined", "agent.promised/signed"])
def test_a_site_that_is_killed_behind_a_promise_says_so_and_the_round_does_not_wait_for_it(tmp_path, step):
    with federation(tmp_path) as it:
        it.coordinator(**SECURE, rounds=2, round__failure_rest=0.0)
        for site in "abc":
            it.agent(site)
        it.agent("d", environment={"ATOLL_CRASH_AT": step}).wait(BOUND_S)
        it.agent("d")
        assert it.wait_for_end() == 0
        first, _second = it.rounds()
        assert first.phase == "committed"
        if step == "agent.promised/joined":
            assert first.clients["d"].sum.left.startswith("session_lost")
        else:  # its masked update was in, and the others' signatures are enough
            assert (first.clients["d"].fate, first.clients["d"].sum.signed_at) == ("reported", None)
        assert first.ended_at - first.opened_at < SECURE["secure__stage_timeout"]
        np.testing.assert_allclose(model(it, 2), np.full(50_000, 2, np.float32), rtol=1e-6)
        assert faults_of_promises(promises_of(it.folder / "d")) == []
        assert it.wait_for_end("d") == 0
        assert left_behind(it.folder / "d") == []


def test_two_sites_that_are_killed_before_their_masked_updates_cost_a_round_and_nothing_else(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(**SECURE, rounds=1, round__retry_wait=0.5, secure__attempts=1)
        it.agent("a")
        it.agent("b")
        for site in "cd":
            it.agent(site, environment={"ATOLL_CRASH_AT": "agent.promised/joined:1"})
        for site in "cd":
            it.running[site].wait(BOUND_S)
            it.agent(site)
        assert it.wait_for_end() == 0
        first, *_, last = it.rounds()
        assert (first.phase, last.phase) == ("abandoned", "committed")
        np.testing.assert_allclose(model(it, 1), np.full(50_000, 1, np.float32), rtol=1e-6)
        for site in "abcd":
            assert faults_of_promises(promises_of(it.folder / site)) == []


@pytest.mark.parametrize("step", ["round.entry/SharesCame:2", "round.entry/SharesRevealed:2"])
def test_a_coordinator_that_is_killed_in_a_session_opens_the_same_sum(tmp_path, step):
    with federation(tmp_path) as it:
        it.coordinator(**SECURE, rounds=2, environment={"ATOLL_CRASH_AT": step})
        for site in "abcd":
            it.agent(site)
        it.running["coordinator"].wait(BOUND_S)
        it.coordinator(**SECURE, rounds=2)
        assert it.wait_for_end() == 0
        for site in "abcd":
            assert it.wait_for_end(site) == 0
        first = it.rounds()[0]
        assert (first.round_id, first.phase) == (1, "committed")
        assert [first.clients[site].fate for site in "abcd"] == ["reported"] * 4
        np.testing.assert_allclose(model(it, 2), np.full(50_000, 2, np.float32), rtol=1e-6)


def test_after_the_commit_no_state_directory_has_an_update_a_key_a_seed_or_a_share(tmp_path):  # dishonest move 64
    folder, record = tmp_path / "it", tmp_path / "record"
    folder.mkdir()
    with federation(folder, task=str(ROOT / "benchmarks" / "tasks.py") + ":noise") as it:
        size = {"ATOLL_BENCH_ELEMENTS": "5000"}
        watched = {**size, RECORDED: record}
        it.coordinator(**SECURE, rounds=2, environment={**size, "ATOLL_CRASH_AT": "aggregate.after_fold"})
        for site in "abc":
            it.agent(site, environment=watched)
        it.agent("d", environment={**watched, "ATOLL_CRASH_AT": "agent.promised/signed"}).wait(BOUND_S)
        it.agent("d", environment=watched)
        it.running["coordinator"].wait(BOUND_S)
        there, inputs = opened_by(it.state), secrets_of(record, {"plain", "encoded"})
        assert files_with(it.state, there), "the shares and what they open are there until the commit"
        assert files_with(it.folder, inputs), "and so are the encoded updates at their sites"
        it.coordinator(**SECURE, rounds=2, environment=size)
        assert it.wait_for_end() == 0
        for site in "abcd":
            assert it.wait_for_end(site) == 0
        assert [each.phase for each in it.rounds()] == ["committed"] * 2
        known = secrets_of(record, KINDS)
        assert len(known) > 3 * 2 * 4 * len(KINDS)
        assert files_with(it.folder, {*known, *there}) == set()


def secrets_of(record, kinds):
    """Return what agents have recorded of some kinds, in each form that a file could have."""
    lines = [line.split(":") for line in record.read_text().splitlines()]
    assert {kind for kind, _ in lines} == KINDS
    return {form for kind, text in lines if kind in kinds for form in forms(bytes.fromhex(text))}


def forms(secret):
    return secret, secret.hex().encode(), b64encode(secret)[:40]


def opened_by(state):
    """Return the shares in the journal of a coordinator that died before a commit, and the seeds that they give."""
    reveals = {}
    with closing(sqlite3.connect(state / "state.db")) as database:
        for (body,) in database.execute("SELECT body FROM journal WHERE kind = 'SharesRevealed'"):
            event = decode_event("SharesRevealed", body, where="")
            reveals[ord(event.client_id) - ord("a") + 1] = wire.answer_from(bytes.fromhex(event.content)).shares
    factors = weights(chosen := sorted(reveals)[:3])
    seeds = [combined(factors, [reveals[place][of] for place in chosen]) for of in range(4)]
    shares = [share.to_bytes(33) for each in reveals.values() for share in each]
    return {form for secret in (*seeds, *shares) for form in forms(secret)}


def files_with(folder, secrets):
    """Return the files below a folder that contain one of these secrets."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path for path in files if (content := path.read_bytes()) and any(secret in content for secret in secrets)}


def test_ranks_open_the_sum_together(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(**SECURE, rounds=2, coordinator__aggregators=2)
        for site in "abcd":
            it.agent(site)
        assert it.wait_for_end() == 0
        assert [record.phase for record in it.rounds()] == ["committed"] * 2
        out = it.folder / "model.safetensors"
        said("model", "export", "--run", "trouble-1", "--out", out, "--state", it.state)
        np.testing.assert_allclose(read(out)["w"], np.full(50_000, 2, np.float32), rtol=1e-6)
