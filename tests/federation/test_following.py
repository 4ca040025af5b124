"""Followers in processes of their own, beside a coordinator that is killed in the middle of a round and comes back."""

import json
import os
import signal
import subprocess

import pytest

from atoll.server.journal.holder import running_coordinator
from benchmarks.processes import free_address
from tests.cli.invoking import said
from tests.federation.processes import ATOLL, federation

ROUNDS = 3


def printed(it, name):
    """Return the objects that a follower has printed; its notes about waits are no objects."""
    return [json.loads(line) for line in it.log(name).splitlines() if line.startswith("{")]


def kill_in_round_2(it, settings):
    it.wait_for(lambda: (record := it.open_round()) is not None and record.round_id == 2 and record.num_reported >= 1)
    it.wait_for(lambda: "round 2: a reported" in it.log("coordinator"))  # a line follows its entry in the journal
    it.kill("coordinator")
    for name in ("run", "round"):
        it.wait_for(lambda name=name: "no coordinator runs this run" in it.log(name))
    it.coordinator(**settings)


@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True)
def test_followers_of_a_killed_coordinator_miss_nothing_and_repeat_nothing(tmp_path, database_url):
    with federation(tmp_path) as it:
        settings = {"rounds": ROUNDS, "round__cohort_size": 2, "round__quorum": 2}
        if database_url:
            settings["coordinator__database"] = database_url
        it.coordinator(**settings)
        it.wait_for(lambda: has_run(it))
        show = ("show", "--state", it.state, "--follow")
        it.start("run", "run", *show, "trouble-1", "--after", 0, "--json")
        it.start("lines", "run", *show, "trouble-1", "--after", 0)
        it.start("round", "round", *show, 2)
        it.agent("a")
        it.agent("slow")
        kill_in_round_2(it, settings)
        for name in ("coordinator", "run", "lines", "round"):
            assert it.wait_for_end(name) == 0, it.log(name)

        items = printed(it, "run")
        events = [item for item in items if item["kind"] == "event"]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert not [item for item in items if item["kind"] == "jumped"]
        ended = [record for event in events for record in event["records"]]
        assert [record["round_id"] for record in ended] == list(range(1, ROUNDS + 1)), "each ends exactly once"
        for record in ended:
            shown = it.show("round", "show", record["round_id"])
            assert record == {key: shown[key] for key in record}
        assert events[-1]["run"]["state"] == "finished"

        told = [line.split(" ", 2)[2] for line in it.log("coordinator").splitlines() if " trouble-1: " in line]
        followed = [line.split(" ", 2)[2] for line in it.log("lines").splitlines() if " trouble-1: " in line]
        assert followed == told
        sentences = it.show("round", "show", 2)["sentences"]
        assert set(sentences) <= set(it.log("round").splitlines())


def has_run(it):
    try:
        return bool(it.history().runs())
    except OSError:
        return False


@pytest.mark.long
def test_a_follower_elsewhere_goes_on_after_its_last_entry_when_the_coordinator_is_back(tmp_path):
    with federation(tmp_path) as it:
        settings = {
            "rounds": ROUNDS,
            "round__cohort_size": 2,
            "coordinator__admin": free_address(),
        }
        it.coordinator(stay=True, **settings)
        it.wait_for(lambda: running_coordinator(it.state))
        hugo = {"ATOLL_IDENTITY": str(tmp_path / "hugo")}
        code = said("client", "invite", "hugo", "--role", "auditor", "--state", it.state).strip()
        subprocess.run([ATOLL, "join", code], env={**os.environ, **hugo}, check=True)
        show = ("run", "show", "trouble-1", "--state", tmp_path / "nowhere", "--follow", "--after", 0, "--json")
        it.start("hugo", *show, **hugo)
        it.agent("a")
        it.agent("slow")
        it.wait_for(lambda: any(item.get("event") == "UpdateReceived" for item in printed(it, "hugo")))
        it.kill("coordinator")
        it.wait_for(lambda: any(item["kind"] == "waiting" for item in printed(it, "hugo")))
        it.coordinator(stay=True, **settings)
        assert it.wait_for_end("hugo") == 0, it.log("hugo")
        events = [item for item in printed(it, "hugo") if item["kind"] == "event"]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        ended = [record["round_id"] for event in events for record in event["records"]]
        assert ended == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_follower_ends_with_a_signal_and_one_line(tmp_path, number):
    with federation(tmp_path) as it:
        coordinator = it.coordinator()
        it.wait_for(lambda: has_run(it))
        it.start("run", "run", "show", "trouble-1", "--state", it.state, "--follow")
        it.wait_for(lambda: "round 1 waits for clients" in it.log("run"))
        it.running["run"].send_signal(number)
        assert it.running["run"].wait() == 130
        assert it.log("run").splitlines()[-1] == f"atoll: stopped by {number.name}"
        assert coordinator.poll() is None
