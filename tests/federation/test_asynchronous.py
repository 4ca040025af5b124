"""Asynchronous runs as a user runs them: fast and slow sites, kill -9, and the model worked out from the records."""

import numpy as np
import pytest

from atoll.tensors.safetensors_file import read
from tests.federation.processes import federation
from tests.waiting import BOUND_S

SLOW = {"TROUBLE_SLEEP": "1.5"}
NUM_ROUNDS = 30
"""Two sites of 0.3 s make at most ten of them while the slow one trains once; the others leave time for the kill."""
FEDBUFF = {"round__mode": "fedbuff", "round__buffer_size": 2, "round__concurrency": 3}
FEDASYNC = {"round__mode": "fedasync", "round__alpha": 0.5, "round__concurrency": 3}


def model(it, version):
    return read(it.state / "runs" / "trouble-1" / "versions" / f"{version:06d}.safetensors")["w"]


def worked_out(records, mode):
    """The models in float64, every update being all ones: from who was in each buffer, by the papers' formulas."""
    x = [0.0]
    for record in (r for r in records if r.phase == "committed"):
        assert record.version == len(x)
        if mode == "fedbuff":
            steps = [(1 + row.staleness) ** -0.5 for row in record.buffer]
            x.append(x[-1] + sum(steps) / len(steps))
        else:
            [row] = record.buffer
            share = 0.5 * (1 + row.staleness) ** -0.5
            x.append((1 - share) * x[-1] + share * (x[-1 - row.staleness] + 1.0))
    return x


def counted(records):
    """(client, version that it trained from) of every update in a model."""
    return [
        (row.client_id, r.base_version - row.staleness) for r in records if r.phase == "committed" for row in r.buffer
    ]


def in_mid_run(it):
    """A version is there, and the slow site still trains from an older one."""
    records = it.rounds()
    slow = [r.round_id for r in records for c, row in r.clients.items() if c == "c" and row.fate == "waiting"]
    return len(records) > 2 and records[-1].phase == "collecting" and bool(slow) and slow[0] < records[-1].round_id


@pytest.mark.parametrize(("mode", "settings"), [("fedbuff", FEDBUFF), ("fedasync", FEDASYNC)])
def test_slow_site_s_updates_count_discounted_and_a_killed_coordinator_goes_on(tmp_path, mode, settings):
    with federation(tmp_path) as it:
        rules = {"rounds": NUM_ROUNDS, "round__max_staleness": 50, **settings}
        it.coordinator(**rules)
        it.agent("c", environment=SLOW)
        it.wait_for(lambda: "c joined" in it.log("coordinator") or None)  # it is to finish before the others have
        it.agent("a", environment={"TROUBLE_SLEEP": "0.3"})
        it.agent("b", environment={"TROUBLE_SLEEP": "0.3"})
        it.wait_for(lambda: in_mid_run(it) or None)
        it.kill("coordinator")
        before = it.rounds()
        it.coordinator(**rules)
        assert it.wait_for_end() == 0
        records = it.rounds()
        assert [r.version for r in records if r.phase == "committed"] == list(range(1, NUM_ROUNDS + 1))
        for old, new in zip(before, records, strict=False):
            kept = {c: row.digest for c, row in old.clients.items() if row.digest}
            assert {c: new.clients[c].digest for c in kept} == kept, "what was accepted before is there"
        slow = [row for r in records for row in r.buffer if row.client_id == "c"]
        assert any(row.staleness > 0 for row in slow)
        assert len(set(counted(records))) == len(counted(records)), "at most once for a client and version"
        expected = worked_out(records, mode)
        for version in range(1, NUM_ROUNDS + 1):
            if (it.state / "runs" / "trouble-1" / "versions" / f"{version:06d}.safetensors").exists():
                np.testing.assert_allclose(model(it, version), np.full(50_000, expected[version]), rtol=1e-6)
        shown = it.show("round", "list")
        assert sum(row["num_examples"] for row in shown) == 10 * len(counted(records))
        assert it.log("c").count("trained 10 examples") >= len(slow)


MORE_STEPS = ("aggregate.mid_fold", "aggregate.after_fold", "snapshot.before")
STEPS = ["publish.before", *(pytest.param(step, marks=pytest.mark.long) for step in MORE_STEPS)]


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_of_a_commit_loses_and_doubles_nothing(tmp_path, step):
    with federation(tmp_path) as it:
        rules = {"rounds": 4, **FEDASYNC}
        crashing = it.coordinator(environment={"ATOLL_CRASH_AT": f"{step}:2"}, **rules)
        for site in "ab":
            it.agent(site)
        assert crashing.wait(BOUND_S) != 0
        it.coordinator(**rules)
        assert it.wait_for_end() == 0
        records = it.rounds()
        assert len(set(counted(records))) == len(counted(records)) == 4
        expected = worked_out(records, "fedasync")
        np.testing.assert_allclose(model(it, 4), np.full(50_000, expected[4]), rtol=1e-6)
