"""A name that two processes use at once: one keeps its place, both sides report it, and every round stays right."""

import re
import shutil
import signal
import time

import numpy as np
import pytest

from atoll.protocol.identity.names import Identity, Role
from benchmarks.members import equip
from tests.federation.processes import federation
from tests.federation.test_federation import model
from tests.federation.test_ranks import rows_of

ADDRESS = r"127\.0\.0\.1:\d+"
FAST = {"coordinator__lease": 10.0, "round__cohort_size": 3, "round__quorum": 3, "round__deadline": 100}
TWICE = re.compile(rf"client a is used twice: the process at {ADDRESS} has the place, and the one at {ADDRESS} asks")
TOLD = re.compile(f"the coordinator says: two agents use this site's name: {TWICE.pattern}")
TAKEN = re.compile(rf"another agent uses this site's name: .*{ADDRESS}.*; trying again in")


def count(pattern, text):
    return len(re.findall(pattern, text))


def clients(it):
    return {row["client"]: row for row in it.show("client", "list")}


def used_twice(it):
    """Start two agents of one name, each in a folder of its own, until the coordinator reports them."""
    it.agent("a")
    it.wait_for(lambda: "connected to" in it.log("a"))
    it.agent("a", name="double")
    it.wait_for(lambda: TWICE.search(it.log("coordinator")))


def each_counted_once(it, version):
    """Every round has one update of each site, and the model is their mean: one more in each round."""
    for record in it.rounds():
        assert {c: r.used_in for c, r in record.clients.items()} == dict.fromkeys("abc", record.round_id)
    np.testing.assert_array_equal(model(it, version), np.full(50_000, version, np.float32))


def test_a_second_agent_of_a_name_is_refused_and_both_addresses_are_told(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(rounds=3, **FAST)
        begun = time.monotonic()
        used_twice(it)
        it.wait_for(lambda: TAKEN.search(it.log("double")))
        it.wait_for(lambda: TOLD.search(it.log("a")))
        assert clients(it)["a"]["connected"]
        assert TWICE.search(clients(it)["a"]["name_conflict"])
        seen = it.show("run", "show", "trouble-1")
        assert TWICE.search(seen["waiting"])
        assert [row["name"] for row in seen["name_conflicts"]] == ["a"]
        it.agent("b")
        it.agent("c")
        assert it.wait_for_end() == 0
        each_counted_once(it, 3)
        assert 1 <= count(TWICE, it.log("coordinator")) <= 1 + (time.monotonic() - begun) // 60, "once in a minute"
        assert "another agent" not in it.log("a")
        assert "invited" not in it.log("double")


@pytest.mark.long
def test_of_two_copies_of_one_folder_the_newer_keeps_the_place_and_no_update_is_lost(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(rounds=2, **FAST)
        it.agent("a", upload_limit=30_000)  # 200 kB: seven seconds
        it.wait_for(lambda: "connected to" in it.log("a"))
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        it.agent("b")
        it.agent("c")
        it.wait_for(lambda: "uploading" in it.log("a"))
        it.agent("a", name="copy", upload_limit=30_000)
        it.wait_for(lambda: TAKEN.search(it.log("a")))
        it.wait_for(lambda: TWICE.search(it.log("coordinator")))
        assert it.wait_for_end() == 0
        each_counted_once(it, 2)
        assert "another agent" not in it.log("copy")


def test_an_agent_that_restarts_has_its_place_at_once_and_is_no_second_one(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(rounds=1, coordinator__lease=600.0, round__cohort_size=3, round__quorum=3, round__deadline=100)
        it.agent("a")
        it.wait_for(lambda: "connected to" in it.log("a"))
        it.running["a"].send_signal(signal.SIGSTOP)  # its stream stays open, as after the loss of a machine
        shutil.copytree(tmp_path / "a", tmp_path / "next")  # the directory on the machine that takes over
        it.agent("a", name="next")
        it.wait_for(lambda: "connected to" in it.log("next"))  # long before the lease
        it.kill("a")
        assert "another agent" not in it.log("next")
        it.kill("next")
        it.agent("a", name="next")
        it.wait_for(lambda: it.log("next").count("connected to") == 2)
        it.agent("b")
        it.agent("c")
        assert it.wait_for_end() == 0
        each_counted_once(it, 1)
        assert "used twice" not in it.log("coordinator")
        assert "another agent" not in it.log("next")


def test_when_the_one_with_the_place_stops_the_other_one_has_it(tmp_path):
    with federation(tmp_path) as it:
        it.coordinator(rounds=1, **FAST)
        used_twice(it)
        it.running["a"].terminate()
        it.wait_for(lambda: "connected to" in it.log("double"))
        assert not clients(it)["a"]["name_conflict"]
        it.agent("b")
        it.agent("c")
        assert it.wait_for_end() == 0
        each_counted_once(it, 1)


# ---------------------------------------------------------------- aggregation ranks


def rank(it, name, *, number=0):
    equip(it.state, it.folder / name, Identity(Role.AGGREGATOR, str(number)))
    place = ("--coordinator", it.address, "--rank", number, "--of", 2, "--state", it.folder / name)
    return it.start(name, "aggregator", *place)


@pytest.mark.long
def test_a_second_process_of_a_rank_is_refused_and_no_update_is_lost(tmp_path):
    twice = re.compile(rf"rank 0 is used twice: the process at {ADDRESS} has the place, and the one at {ADDRESS} asks")
    with federation(tmp_path) as it:
        it.coordinator(
            rounds=2,
            coordinator__aggregators=2,
            coordinator__start_aggregators=False,
            evaluation__server_every=0,
            **FAST,
        )
        rank(it, "rank0")
        rank(it, "rank1", number=1)
        it.wait_for(lambda: it.log("coordinator").count("is connected, its data plane is") == 2)
        rank(it, "double")
        it.wait_for(lambda: re.search(rf"another process is rank 0: the process at {ADDRESS} has", it.log("double")))
        for site in "ab":
            it.agent(site)
        it.wait_for(lambda: twice.search(it.log("coordinator")))
        (first, _), _ = rows_of(it)
        assert twice.search(first.conflict)
        it.agent("c")
        assert it.wait_for_end() == 0
        for record in it.rounds():
            assert {c: r.used_in for c, r in record.clients.items()} == dict.fromkeys("abc", record.round_id)
        assert "is away" not in it.log("coordinator").split("the run is finished")[0]
        assert not list((it.folder / "double").glob("runs/*/updates/*"))
