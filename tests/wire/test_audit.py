"""The audit log of a coordinator on a real socket: who did what is all there, and strangers add little."""

import asyncio
import hashlib
import sys

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.audit.chain import Checkpoint
from atoll.protocol.wire.channel import client_options
from atoll.server.audit.budget import BURST
from atoll.server.audit.reading import Source, events_of, verify
from atoll.server.services.reading_service import READINGS_MAX
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_round import live, report


def events(state, action):
    return [line.event for line in events_of(Source.of_state(state)) if line.event.action == action]


@live
async def test_a_run_is_told_from_its_beginning_to_its_end(tmp_path):
    async with running(tmp_path, rounds=1) as it, it.client("a") as a, it.client("b") as b:
        (one, _), (other, _) = await asyncio.gather(report(a), report(b))
        await a.next("run_ended")
        record = it.run.machine.record_of(one.round_id)
        used = sorted(client.digest for client in record.clients.values())
        run_id = it.run.run_id
    said = {line.event.action: line.event for line in events_of(Source.of_state(tmp_path))}
    assert said["run.add"].object == said["run.end"].object == run_id
    assert said["run.end"].outcome == "finished: 1 round is committed"
    commit = said["round.commit"]
    assert (commit.object, commit.outcome) == (f"{run_id} round 1", "version 1 of 2 updates")
    assert commit.digests["model"] == record.model_digest
    assert commit.digests["updates"] == hashlib.sha256("".join(f"{d}\n" for d in used).encode()).hexdigest()
    assert {event.actor for event in events(tmp_path, "client.join")} == {"a", "b"}
    assert said["client.leave"].role == "client"
    assert (said["coordinator.start"].outcome, said["coordinator.stop"].outcome) == ("ok", "ok")
    found = verify(Source.of_state(tmp_path))
    assert (found.faults, found.unsigned) == ([], 0)
    assert other.run_id == run_id


@live
async def test_a_reading_that_was_broken_off_is_no_success(tmp_path, monkeypatch):
    code = "import sys; sys.stdin.readline(); sys.stdout.buffer.write(b'0 50000000\\n' + bytes(50_000_000))"
    monkeypatch.setattr("atoll.server.views.view_process.COMMAND", (sys.executable, "-c", code))
    async with running(tmp_path) as it:
        async with grpc.aio.insecure_channel(it.admin_address, options=client_options()) as channel:
            admin, request = rpc.Stub(channel, "Admin"), pb.LookRequest(view="run", run_id=it.run.run_id)
            assert sum([len(reply.json) async for reply in admin.Look(request)]) == 50_000_000
            broken = [admin.Look(request) for _ in range(READINGS_MAX)]
            for call in broken:
                await call.read()
            with pytest.raises(grpc.aio.AioRpcError, match="has 4 readings open already"):
                await admin.Look(request).read()
            for call in broken:
                call.cancel()
            async with asyncio.timeout(BOUND_S):
                while len(outcomes := [event.outcome for event in events(tmp_path, "call")]) < 2 + READINGS_MAX:
                    await asyncio.sleep(0.05)
                    it.coordinator.audit.flush()
        # each is recorded when the server has ended it, the refused one perhaps after those that were broken off
        codes = sorted(outcome.partition(":")[0] for outcome in outcomes)
        assert codes == sorted(["OK", "RESOURCE_EXHAUSTED", *["CANCELLED"] * READINGS_MAX])


@live
async def test_admin_calls_are_there_with_their_caller_and_outcome(tmp_path):
    async with running(tmp_path) as it:
        async with grpc.aio.insecure_channel(it.admin_address, options=client_options()) as channel:
            admin = rpc.Stub(channel, "Admin")
            await admin.StopRun(pb.StopRunRequest(run_id=it.run.run_id, reason="enough"))
            with pytest.raises(grpc.aio.AioRpcError):
                await admin.StopRun(pb.StopRunRequest(run_id="nobody"))
            with pytest.raises(grpc.aio.AioRpcError):
                await admin.StartRun(pb.StartRunRequest(config_toml="secret = 'hunter2'"))
        async with asyncio.timeout(BOUND_S):  # a call is recorded when the server has ended it
            while len(recorded := events(tmp_path, "call")) < 3:
                await asyncio.sleep(0.05)
                it.coordinator.audit.flush()
        stopped, unknown, bad = recorded
        assert stopped.object == f"/atoll.v1.Admin/StopRun {it.run.run_id}"
        assert (stopped.outcome, stopped.actor, stopped.role) == ("OK", "ipv4:127.0.0.1", "anonymous")
        assert unknown.outcome.startswith("NOT_FOUND: there is no run 'nobody'")
        assert bad.outcome.startswith("INVALID_ARGUMENT")
        (stop,) = events(tmp_path, "run.stop")
        assert (stop.actor, stop.outcome) == ("ipv4:127.0.0.1", "enough"), "the caller's name reaches what he does"


@live
async def test_refused_calls_are_there_and_soon_only_counted(tmp_path):
    async with running(tmp_path) as it:
        async with grpc.aio.insecure_channel(it.address, options=client_options()) as channel:
            for _ in range(BURST + 5):
                call = rpc.Stub(channel, "Coordinator").Upload()
                await call.write(pb.UploadRequest(chunk=pb.Chunk(position=0, data=b"x")))
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            gone = pb.ManifestRequest(run_id="nobody", digest="ab")
            with pytest.raises(grpc.aio.AioRpcError):
                await rpc.Stub(channel, "Coordinator").GetManifest(gone)
    refused = events(tmp_path, "call.refuse")
    assert len(refused) == BURST
    assert refused[0].outcome == "INVALID_ARGUMENT: the first message must be UploadOpen"
    assert refused[0].object == "/atoll.v1.Coordinator/Upload"
    (withheld,) = events(tmp_path, "audit.withheld")
    assert withheld.object == "5 lines"


@live
async def test_the_log_goes_on_in_the_next_process(tmp_path):
    for _ in range(2):
        async with running(tmp_path) as it:
            run_id = it.run.run_id
    assert len(events(tmp_path, "coordinator.start")) == 2
    (recovered,) = events(tmp_path, "run.recover")
    assert recovered.object == run_id
    assert recovered.outcome.startswith(("version 0", "round 1")), "whichever the first process had come to"
    assert verify(Source.of_state(tmp_path)).faults == []


@live
async def test_every_invitation_tells_the_newest_checkpoint(tmp_path):
    async with running(tmp_path, rounds=2) as it:
        it.coordinator.audit.flush()
        async with it.client("a") as a, it.client("b"):
            welcome, invite = await a.next("welcome"), await a.next("invite")
            known = [Checkpoint.parse(text) for text in (welcome.audit_checkpoint, invite.audit_checkpoint)]
    assert verify(Source.of_state(tmp_path), known).faults == []
    path = next((tmp_path / "audit").glob("audit-*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: known[0].seq]))
    assert len(verify(Source.of_state(tmp_path), known).faults) == len(known), "the end was cut off"
