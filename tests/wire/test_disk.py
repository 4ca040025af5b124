"""A full disk, two coordinators, damaged files: over real gRPC, with the real journal."""

import asyncio
import errno
import logging
from dataclasses import replace

import grpc
import pytest

from atoll.ground.durable import DiskFull
from atoll.server.errors import OperatorError, StateInUse
from atoll.server.hosting import run_driver
from atoll.server.required.losses import WAY_OUT
from tests.cli.invoking import refused
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live, report


async def limit_pages(it, extra):
    """Let state.db grow by `extra` pages of 4 KiB and no further: SQLite then reports what a full disk does."""

    def limit():
        with it.coordinator.state.database.transaction() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + extra}")

    await asyncio.get_running_loop().run_in_executor(it.coordinator._journal_thread, limit)


class Errors(logging.Handler):
    """Counts what the driver complains of."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


async def fill_journal(it):
    """Join under other names until an event no longer fits, and the coordinator says so."""
    await limit_pages(it, 0)
    errors = Errors()
    logging.getLogger("atoll.server.hosting.journaled_driver").addHandler(errors)
    try:
        for number in range(3000):
            async with it.client(f"filler{number}"):
                await asyncio.sleep(0)
            if number % 20 == 19:
                await asyncio.sleep(0.02)
            if errors.messages:
                assert "the run waits for space" in errors.messages[0]
                return
    finally:
        logging.getLogger("atoll.server.hosting.journaled_driver").removeHandler(errors)
    raise AssertionError("the journal never filled up")


@live
async def test_full_journal_keeps_everybody_waiting_and_loses_nothing(tmp_path):
    async with running(tmp_path / "state", coordinator__max_connections=5000, round__min_available=2) as it:
        async with it.client("a") as a, it.client("b") as b:
            invite = await a.next("invite")
            manifest, data = await a.train(invite)
            await fill_journal(it)
            upload = asyncio.ensure_future(a.upload(manifest, data))
            await asyncio.sleep(1.5)
            assert not upload.done(), "an update must not be acknowledged before it is in the journal"
            await limit_pages(it, 1_000_000)
            assert (await upload).accepted
            assert (await report(b))[1].accepted
            await committed(it, 1)


@live
async def test_update_that_does_not_fit_on_the_disk_is_to_be_tried_again(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        manifest, data = await a.train(await a.next("invite"))
        store = it.run.reducer.store
        disk, store._disk = store._disk, replace(store._disk, free_min=2**62)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await a.upload(manifest, data)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "does not fit" in error.value.details() or "stored" in error.value.details()
        store._disk = disk
        assert (await a.upload(manifest, data)).accepted


@live
async def test_aggregation_waits_for_space_and_keeps_every_update(tmp_path):
    from atoll.server.folding import reducer

    async with running(tmp_path / "state", rounds=1) as it, it.client("a") as a, it.client("b") as b:
        real, calls = reducer.fold, []

        def full_at_first(*args, **kwargs):
            calls.append(1)
            if len(calls) == 1:
                raise OSError(errno.ENOSPC, "no room")
            return real(*args, **kwargs)

        reducer.fold = full_at_first
        try:
            await asyncio.gather(report(a), report(b))
            await committed(it, 1)
        finally:
            reducer.fold = real
        assert len(calls) == 2
        assert it.run.machine.ledger.past[1].phase == "committed"


@live
async def test_second_coordinator_on_the_same_directory_is_refused_and_disturbs_nobody(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        with pytest.raises(StateInUse, match="in use by another process"):
            async with running(tmp_path / "state"):
                pass
        assert (await report(a))[1].accepted
        assert it.run.machine.round.record.num_reported == 1


@live
async def test_second_coordinator_on_the_same_port_is_refused(tmp_path):
    async with running(tmp_path / "one") as it:
        with pytest.raises(RuntimeError, match="cannot listen on"):
            async with running(tmp_path / "two", coordinator__listen=it.address):
                pass


@live
async def test_damaged_current_version_is_found_at_the_start_and_named(tmp_path):
    async with running(tmp_path / "state") as it:
        path = it.run.reducer.version(0).path
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(OperatorError, match=r"(?s)000000.safetensors is damaged \(tensor 'w'.*backup"):
        async with running(tmp_path / "state"):
            pass


@pytest.mark.parametrize("file", ["000001.manifest.json", "000001.safetensors"])
def test_files_of_another_moment_than_the_journal_are_an_operators_mistake(tmp_path, file):
    state = tmp_path / "state"
    one_round(state)
    gone = state / "runs" / "tiny-1" / "versions" / file
    gone.unlink()
    said = refused("coordinator", "--state", state, "--insecure", "--set", "coordinator.listen=127.0.0.1:0")
    assert said == [
        f"run tiny-1: {gone} is missing: it is the global model: the run fails; `atoll model export --version` still "
        "exports the others",
        WAY_OUT,
    ]


@live
async def one_round(state):
    async with running(state) as it, it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a), report(b))
        await committed(it, 1)


@live
async def test_the_watch_for_room_ends_with_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(run_driver, "DISK_LOOK_S", 0.02)
    async with running(tmp_path / "state") as it:
        run = it.run
        run.no_room(2**60, DiskFull("no room"))
        await it.coordinator.stop_run(run.run_id, "enough")
        seq = run._seq
        async with asyncio.timeout(BOUND_S):
            while run._is_watching_disk:
                await asyncio.sleep(0.01)
        assert run._seq == seq, "nothing is journaled behind the end"
