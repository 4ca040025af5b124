"""The notices of an agent: for each condition one sentence with what is wrong, where, and what to do; no data."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.client import notices
from atoll.client.config import AgentConfig
from atoll.client.notices import AgentWatch
from atoll.protocol.notices.book import Book
from atoll.protocol.notices.notice import Condition
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.vocabulary import RunId
from tests.client.fake_coordinator import Instant, agent, lagoon, live, until
from tests.protocol.notices.receivers import http_server

NOW, DAY = 1_800_000_000.0, 86400.0


def watch(tmp_path, **config):
    leaf = SimpleNamespace(issued_at=NOW - 10 * DAY, expires_at=NOW + 20 * DAY)
    it = AgentWatch(
        AgentConfig(site="north", notify=NotifyConfig(**config)),
        SimpleNamespace(path=tmp_path),
        SimpleNamespace(awaiting={}, damage=""),
        SimpleNamespace(current=object(), why="", is_refused_for_clock=False),
        SimpleNamespace(current=SimpleNamespace(leaf=leaf)),
        "fl.example.org:7070",
    )
    it.leaf = leaf
    return it


def look(it, now=NOW):
    found = asyncio.run(it.look(Book(), now))
    return {each.condition: each.sentence for each in found}


def test_an_agent_that_lacks_nothing_has_no_notice(tmp_path):
    assert look(watch(tmp_path, disk=0)) == {}


def test_a_coordinator_that_is_away_is_told_with_the_reason(tmp_path):
    it = watch(tmp_path, disk=0, away=600)
    it._connection.current, it._connection.why = None, "UNAVAILABLE: connection refused"
    [notice] = asyncio.run(it.look(Book(begun={"away fl.example.org:7070": NOW - 60}), NOW))
    assert notice.hold == 600
    assert "the coordinator at fl.example.org:7070 is away since 2027-01-15 07:59:00 UTC" in notice.sentence
    assert "(UNAVAILABLE: connection refused): check the network" in notice.sentence


def test_a_refusal_for_the_clock_is_told_in_the_words_of_the_log(tmp_path):
    it = watch(tmp_path, disk=0)
    it._connection.current, it._connection.is_refused_for_clock = None, True
    it._connection.why = "the clock of site north shows ..."
    assert look(it)[Condition.CLOCK] == "the clock of site north shows ..."


def test_an_approval_is_told_in_the_words_of_the_log(tmp_path):
    it = watch(tmp_path, disk=0)
    it._gate.awaiting["digits-1"] = "run digits-1 waits for approval: `atoll site approve digits-1`"
    assert look(it)[Condition.APPROVAL] == "run digits-1 waits for approval: `atoll site approve digits-1`"


def test_a_disk_below_its_limit_is_told(tmp_path):
    assert f"the disk of {tmp_path} has " in look(watch(tmp_path, disk=2**59))[Condition.DISK]


def test_a_certificate_that_ends_is_told_in_the_last_quarter_of_its_life(tmp_path):
    it = watch(tmp_path, disk=0)
    assert look(it, NOW + 12 * DAY) == {}
    assert "ends at 2027-02-04" in look(it, NOW + 13 * DAY)[Condition.CERTIFICATE]
    assert "has ended at 2027-02-04" in look(it, NOW + 21 * DAY)[Condition.CERTIFICATE]


def test_a_broken_chain_of_the_sites_log_is_told(tmp_path):
    it = watch(tmp_path, disk=0)
    it._gate.damage = "decisions/audit-0.jsonl was changed"
    assert look(it)[Condition.AUDIT] == "decisions/audit-0.jsonl was changed"


def test_a_jump_of_the_clock_is_told(tmp_path, monkeypatch):
    it = watch(tmp_path, disk=0)
    monkeypatch.setattr(notices, "_offset", lambda: it._offset + 3600)
    look(it)
    [event] = it.notices._events
    assert "this machine's clock was set forward by 1 h 0 min" in event.sentence


@pytest.mark.parametrize(
    ("state", "condition"),
    [("failed", Condition.RUN_FAILED), ("stopped", Condition.RUN_STOPPED), ("finished", Condition.RUN_FINISHED)],
)
def test_the_end_of_a_run_is_told(tmp_path, state, condition):
    it = watch(tmp_path)
    it._gate.awaiting["digits-1"] = "abc"
    it.run_ended(RunId("digits-1"), state)
    [event] = it.notices._events
    assert event.condition is condition
    assert f"run digits-1 of the coordinator at fl.example.org:7070 is {state}" in event.sentence
    assert it._gate.awaiting == {}


def test_a_state_of_a_later_version_is_no_notice(tmp_path):
    it = watch(tmp_path)
    it.run_ended(RunId("digits-1"), "dissolved")
    assert it.notices._events == []


@live
async def test_an_agent_tells_the_end_of_a_run_once_also_when_it_hears_it_again_after_a_restart(tmp_path, monkeypatch):
    from atoll.protocol import atoll_pb2 as pb

    monkeypatch.delenv("http_proxy", raising=False)
    with http_server() as server:
        config = NotifyConfig(url=server.url, disk=0)
        for _ in range(2):
            async with lagoon() as coordinator, agent(coordinator, tmp_path, Instant(), notify=config):
                await coordinator.connected()
                await until(lambda it=coordinator: it.pushes is not None)
                ended = pb.RunEnded(run_id="run-1", state="finished", cause="loss 0.25 has not improved")
                await coordinator.push(run_ended=ended)
                await until(lambda: server.bodies)
        [message] = server.bodies
    assert (message["condition"], message["subject"], message["site"]) == ("run_finished", "run-1", "north")
    assert "0.25" not in str(message)
