"""Limits on a real socket: too much is refused by name, and who is refused too often loses the line."""

import asyncio
from contextlib import suppress

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.wire.channel import MESSAGE_BYTES_MAX, MIB
from atoll.protocol.wire.stream import first_status
from atoll.server.errors import OperatorError
from atoll.server.transport.limits import STRIKES_MAX
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_round import live


async def ended(call):
    """Status and text of a call, when it has ended."""
    async with asyncio.timeout(BOUND_S):
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code(), await call.details()


@live
async def test_more_calls_than_a_caller_may_have_open_are_refused(tmp_path):
    async with running(tmp_path, coordinator__calls_per_client=4) as it, it.client("a") as a:
        await a.next("welcome")
        waiting = [a.stub.Upload() for _ in range(3)]
        for call in waiting:
            await call.wait_for_connection()
        code, detail = await ended_or_open(a)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4 open calls" in detail
        assert "allowed: 4 at once" in detail
        waiting.pop().cancel()
        for _ in range(100):  # the coordinator hears of the end a moment later
            code, detail = await ended_or_open(a)
            if code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                break
        assert code is grpc.StatusCode.INVALID_ARGUMENT, "one has ended, and another may begin"
        for call in waiting:
            call.cancel()


async def ended_or_open(client):
    call = client.stub.Upload()
    status = first_status(call)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(pb.UploadRequest(chunk=pb.Chunk()))
    await ended(call)
    return await status


@live
async def test_a_connection_that_brings_little_but_refusals_is_ended(tmp_path):
    async with running(tmp_path) as it, it.client("honest") as honest, it.client("mallory") as mallory:
        await honest.next("welcome")
        await mallory.next("welcome")
        for _ in range(STRIKES_MAX + 1):
            code, _ = await ended_or_open(mallory)
            assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE)
        code, _ = await ended(mallory.control)
        assert code is grpc.StatusCode.UNAVAILABLE, "its control stream is gone with the connection"
        code, _ = await ended_or_open(honest)
        assert code is grpc.StatusCode.INVALID_ARGUMENT, "others are not touched"
        assert not honest.control.done()


@live
async def test_compressed_messages_are_refused_before_they_are_inflated(tmp_path):
    async with running(tmp_path) as it:
        async with grpc.aio.insecure_channel(it.address) as channel:
            opened = pb.ManifestRequest(run_id="x" * 10_000)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await rpc.Stub(channel, "Coordinator").GetManifest(opened, compression=grpc.Compression.Gzip)
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "'gzip' is disabled" in error.value.details()


@live
async def test_a_message_that_is_too_large_is_refused_with_the_limit(tmp_path):
    async with running(tmp_path) as it:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(it.address, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await rpc.Stub(channel, "Coordinator").GetManifest(pb.ManifestRequest(run_id="x" * 5_000_000))
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(MESSAGE_BYTES_MAX) in error.value.details()


@live
async def test_an_upload_below_the_floor_is_ended_and_goes_on_later(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.server.transfers.timeouts.FLOOR_S", 1.0)
    monkeypatch.setattr("atoll.server.files.incoming.SMALL_BYTES", 0)
    async with running(tmp_path, coordinator__upload_floor=2**30) as it, it.client("a") as a, it.client("b"):
        manifest, data = await a.train(await a.next("invite"))
        call = a.stub.Upload()
        await call.write(pb.UploadRequest(open=pb.UploadOpen(manifest=manifest.encode())))
        await call.write(pb.UploadRequest(chunk=pb.Chunk(position=0, data=data[:5])))
        code, detail = await ended(call)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "fewer than 1.07374e+09 bytes a second arrived" in detail
        it.coordinator.uploads._floor = 0
        verdict = await a.upload(manifest, data)
        assert verdict.accepted
        assert a.resumed_at[0] == 5


@live
async def test_uploads_that_are_under_way_share_what_may_be_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.server.files.incoming.SMALL_BYTES", 0)
    monkeypatch.setattr("atoll.protocol.wire.upload_window.UPLOADS_BYTES", 3 * MIB)
    async with running(tmp_path) as it, it.client("a") as a, it.client("b") as b:
        calls, told = [], []
        for client in (a, b):
            manifest, data = await client.train(await client.next("invite"))
            calls.append(client.stub.Upload())
            await calls[-1].write(pb.UploadRequest(open=pb.UploadOpen(manifest=manifest.encode())))
            told.append((await calls[-1].read()).window)
        assert told == [3 * MIB, 3 * MIB // 2]
        await calls[0].write(pb.UploadRequest(chunk=pb.Chunk(position=0, data=data[:5])))
        confirmed = await calls[0].read()
        assert (confirmed.position, confirmed.window) == (5, 3 * MIB // 2)
        calls[1].cancel()


@live
async def test_a_client_that_begins_many_uploads_keeps_two(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.server.files.incoming.SMALL_BYTES", 0)
    async with running(tmp_path) as it, it.client("a") as a, it.client("b"):
        invite = await a.next("invite")
        version, _, _ = await a.download(invite)
        for value in range(6):
            manifest, data = await a.train(invite, value=float(value))
            assert await a.upload(manifest, data, cut_at=3, chunk=3) is None
        store = it.run.reducer.store
        async with asyncio.timeout(BOUND_S):
            while len(store.digests()) > 2:
                await asyncio.sleep(0.01)
        verdict = await a.upload(manifest, data)
        assert verdict.accepted
        assert version.num_bytes == len(data)
        assert list(it.coordinator.uploads._partial.values()) != [[manifest.digest]]


async def begun(client, manifest):
    """An upload that is let in, as soon as what was promised to one that has just been cut is free again."""
    while True:
        call = client.stub.Upload()
        await call.write(pb.UploadRequest(open=pb.UploadOpen(manifest=manifest.encode())))
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            await asyncio.sleep(0.01)
        else:
            return call


@live
async def test_a_run_whose_updates_exceed_the_quota_is_refused(tmp_path):
    fault = "incoming_max is 23: an update of this model has 24 bytes; allowed: 0 .no limit., or at least this number"
    with pytest.raises(OperatorError, match=fault):
        async with running(tmp_path, coordinator__incoming_max=23):
            pass


@live
async def test_uploads_that_are_not_accepted_have_a_quota(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.server.files.incoming.SMALL_BYTES", 0)
    async with running(tmp_path, coordinator__incoming_max=30) as it, it.client("a") as a, it.client("b") as b:
        one, data = await a.train(await a.next("invite"))
        other, _ = await b.train(await b.next("invite"))
        assert await a.upload(one, data, cut_at=3, chunk=3) is None  # 24 bytes: 3 are here
        call = await begun(b, other)
        third = a.stub.Upload()
        await third.write(pb.UploadRequest(open=pb.UploadOpen(manifest=one.encode())))
        code, detail = await ended(third)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "allowed: 30 (incoming_max)" in detail
        assert str(tmp_path) not in detail
        call.cancel()
