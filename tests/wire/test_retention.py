"""The files on disk after a run's end, and those that must be there before; found by a hostile review."""

import asyncio
import sqlite3
import time

import pytest

from atoll.protocol.vocabulary import RunState
from atoll.server.files import incoming
from atoll.server.files.incoming import SMALL_BYTES
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.members.member import Profile
from atoll.server.process import host
from atoll.server.required.keep import Keep
from atoll.server.rounds.events import ClientJoined, CohortDrawn, RoundDue, RunStarted, Update, UpdateReceived
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from tests.wire.live_coordinator import Live, running, settings
from tests.wire.test_review import until
from tests.wire.test_round import committed, live, report

OVER = {"round__cohort_size": 1, "round__over_selection": 2.0, "round__min_available": 2}


def left(state):
    """Rows of updates, and files of updates and uploads."""
    with sqlite3.connect(f"file:{state}/state.db?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT count(*) FROM updates").fetchone()[0]
    return rows, sorted(path.parent.name for path in state.glob("runs/*/[ui]*/*.bin"))


def test_a_round_that_opens_in_the_event_of_another_s_end_keeps_its_updates():
    policy = StragglerPolicy(cohort_size=2, quorum=2, late="next_round", deadline=10.0)
    machine = RunMachine(RunRules(policy, rounds=5))
    machine.receive(RunStarted("0" * 64), 0.0)
    machine.receive(RoundDue(), 0.0)
    for client in "ab":
        machine.receive(ClientJoined(client, "s", Profile(0, "")), 1.0)
    machine.receive(CohortDrawn(1, ("a", "b")), 1.0)
    machine.receive(UpdateReceived(Update("a", 1, 0, "d" * 64, 5, 1.0)), 2.0)
    machine.receive(RoundDue(), 11.0)  # a stale one, which wakes the machine to the passed deadline
    assert machine.round is not None
    assert machine.ledger.carried == {}
    assert Keep.after(9, machine, policy).updates == {"d" * 64}


@live
async def test_a_pause_of_before_a_stop_opens_no_round_after_the_resume(tmp_path):
    async with running(tmp_path / "state", rounds=5, pause=1.0) as it, it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a), report(b))
        await committed(it, 1)
        await asyncio.sleep(0.6)
        await it.coordinator.stop_run(it.run.run_id, "enough")
        stopped_at = it.run._clock.now()
        await it.coordinator.resume_run(it.run.run_id)
        await until(lambda: it.run.machine.round is not None)
        assert it.run.machine.round.record.opened_at >= stopped_at + 1.0, "the first pause was over earlier"


@pytest.mark.parametrize("small_bytes", [0, SMALL_BYTES])
@live
async def test_updates_that_wait_when_the_run_is_stopped_go(tmp_path, monkeypatch, small_bytes):
    monkeypatch.setattr(incoming, "SMALL_BYTES", small_bytes)
    late = {"rounds": 5, "pause": 30.0, "round__late": "next_round", **OVER}
    async with running(tmp_path / "state", **late) as it, it.client("a") as a, it.client("b") as b:
        manifest, data = await b.train(await b.next("invite"))
        assert (await report(a))[1].accepted
        await committed(it, 1)
        assert (await b.upload(manifest, data)).detail == "late"
        assert left(tmp_path / "state")[0] >= 1
        await it.coordinator.stop_run(it.run.run_id, "enough")
        await until(lambda: left(tmp_path / "state") == (0, []))


@pytest.mark.parametrize("late", ["discard", "next_round"])
@live
async def test_parts_of_updates_go_with_the_run(tmp_path, monkeypatch, late):
    monkeypatch.setattr(incoming, "SMALL_BYTES", 0)
    rules = {"rounds": 1, "round__late": late, **OVER}
    async with running(tmp_path / "state", **rules) as it, it.client("a") as a, it.client("b") as b:
        manifest, data = await b.train(await b.next("invite"))
        assert await b.upload(manifest, data, cut_at=8, chunk=8) is None
        assert left(tmp_path / "state") == (0, ["incoming"])
        assert (await report(a))[1].accepted
        await a.next("run_ended")
        await until(lambda: left(tmp_path / "state") == (0, []))


@live
async def test_a_coordinator_that_ends_with_its_run_leaves_no_garbage(tmp_path):
    await run_to_its_end(tmp_path / "state")
    assert left(tmp_path / "state") == (0, [])


async def run_to_its_end(state, spoil=lambda it: None):
    config = settings(state, rounds=3, round__cohort_size=1)
    ready = asyncio.get_running_loop().create_future()
    process = asyncio.ensure_future(
        host(config.coordinator, config.run, on_ready=lambda c, a: ready.set_result(Live(c, a)))
    )
    it = await ready
    spoil(it)
    async with it.client("a") as a:
        for _ in range(3):
            assert (await report(a))[1].accepted
        await a.next("run_ended")
    await process


@live
async def test_what_a_crash_left_of_an_ended_run_goes_at_the_next_start(tmp_path):
    state = tmp_path / "state"
    await run_to_its_end(state)
    with sqlite3.connect(state / "state.db") as connection:
        connection.execute("INSERT INTO updates VALUES ('tiny-1', ?, '{}', x'00')", ["a" * 64])
    (state / "runs/tiny-1/updates" / f"{'b' * 64}.bin").write_bytes(b"x")
    assert left(state) == (1, ["updates"])
    async with running(state, rounds=3, round__cohort_size=1) as it:
        assert it.coordinator.state_of("tiny-1") is RunState.FINISHED
        await until(lambda: left(state) == (0, []))


@live
async def test_garbage_is_not_collected_after_the_directory_was_let_go(tmp_path):
    log = []

    def spoil(it):
        store = it.run.reducer.store
        collect = store.collect_garbage

        def slow(*args, **options):
            log.append("begins")
            time.sleep(0.5)
            log.append("ends")
            return collect(*args, **options)

        store.collect_garbage = slow

    await run_to_its_end(tmp_path / "state", spoil)
    with StateDirectory.open(tmp_path / "state"):
        assert log.count("begins") == log.count("ends") >= 1


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: bytes(len(data))])
@live
async def test_a_kept_file_that_lost_its_bytes_is_sent_again(tmp_path, monkeypatch, change):
    monkeypatch.setattr(incoming, "SMALL_BYTES", 0)
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        manifest, data = await a.train(await a.next("invite"))
        it.run.reducer.store.update_path(manifest.digest).write_bytes(change(data))
        a.resumed_at = []
        assert (await a.upload(manifest, data)).accepted
        assert a.resumed_at[0] == 0
