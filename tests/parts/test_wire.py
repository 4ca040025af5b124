"""Updates in parts over real gRPC, by a client of bare messages: each part on a stream of its own, one verdict."""

import asyncio
import hashlib
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import RejectReason
from atoll.server.backup.backup import back_up
from atoll.server.backup.restore import restore
from atoll.server.required.losses import losses_in
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.safetensors_file import read
from atoll.tensors.updates.reader import StoredUpdate
from benchmarks.dividing import KINDS, boxes_of, divide
from tests.client.fake_coordinator import until
from tests.wire.live_coordinator import running
from tests.wire.test_ranks import ONE, with_rank
from tests.wire.test_round import committed, live, report

ALONE = {"round__cohort_size": 1, "rounds": 2}


class Divided:
    """An update of a client, divided: its root, and of each part the manifest and the bytes."""

    def __init__(self, client, manifest, data, *, kind="rows", num_parts=2):
        self.client = client
        whole = StoredUpdate(client.name, manifest.pieces, data=data)
        parts = divide(whole, kind, num_parts)
        self.parts = [PartManifest(index, pieces) for index, (pieces, _) in enumerate(parts)]
        self.data = [raw for _, raw in parts]
        self.whole = manifest
        self.seal()

    def seal(self):
        self.root = replace(self.whole, pieces=(), parts=tuple(part.listed for part in self.parts))

    async def send(self, index, *, data=None, cut_at=None, root=None, stub=None):
        """Send one part: the last reply, or None when the stream was cut on purpose."""
        call = (stub or self.client.stub).Upload()
        opened = pb.UploadOpen(manifest=(root or self.root).encode(), part=self.parts[index].encode())
        await call.write(pb.UploadRequest(open=opened))
        raw = self.data[index] if data is None else data
        async for reply in call:
            if reply.WhichOneof("reply") != "position":
                return reply
            position = reply.position
            if cut_at is not None and position >= cut_at:
                call.cancel()
                return None
            if chunk := raw[position : cut_at if cut_at is not None else position + (1 << 20)]:
                await call.write(pb.UploadRequest(chunk=pb.Chunk(position=position, data=chunk)))
        raise AssertionError("no reply")


@asynccontextmanager
async def invited(it, name="a", *, kind="rows", num_parts=2, **claims):
    async with it.client(name) as client:
        invite = await client.next("invite")
        yield Divided(client, *await client.train(invite, **claims), kind=kind, num_parts=num_parts)


def files(state, folder):
    return sorted(path.name[65:] for path in (state / "runs" / "tiny-1" / folder).iterdir())


# ---------------------------------------------------------------- one update


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_in_parts_counts_once_and_as_the_whole_would(tmp_path, kind):
    @live
    async def check():
        async with running(tmp_path / "state", rounds=1) as it, it.client("plain") as plain:
            async with invited(it, kind=kind, num_parts=3, value=5.0, num_examples=10) as a:
                _, verdict = await report(plain, 1.0, num_examples=30)
                replies = [await a.send(index) for index in (2, 0, 1)]
                assert [reply.kept for reply in replies] == [True, True, False], replies
                assert verdict.accepted
                assert replies[-1].verdict.accepted
                assert (await a.send(1)).verdict.accepted, "any part gets the verdict of the update"
                await committed(it, 1)
                model = read(it.run.reducer.version(1).path)
                np.testing.assert_array_equal(model["w"], np.full(4, (30 * 1 + 10 * 5) / 40, np.float32))
                record = it.run.machine.record_of(1)
                assert record.num_in == 2
                assert record.clients["a"].digest == a.root.digest

    check()


@live
async def test_parts_come_at_the_same_time_and_exactly_one_of_them_ends_with_the_decision(tmp_path):
    async with running(tmp_path / "state", **ALONE) as it, invited(it, num_parts=4) as a:
        replies = await asyncio.gather(*map(a.send, range(4)))
        assert any(reply.verdict.accepted for reply in replies)
        assert all(reply.kept or reply.verdict.accepted for reply in replies)
        await committed(it, 1)
        assert it.run.machine.record_of(1).num_in == 1


@live
async def test_each_part_resumes_at_its_own_byte_also_after_a_restart(tmp_path):
    async with running(tmp_path / "state", **ALONE) as it, invited(it) as a:
        assert (await a.send(0)).kept
        assert await a.send(1, cut_at=4) is None
        await until(lambda: not it.coordinator.uploads.is_in_flight(a.root.run_id, a.root.digest))
    assert files(tmp_path / "state", "incoming") == ["0000.bin", "0000.json", "0001.bin"]
    async with running(tmp_path / "state", **ALONE) as it, it.client("a") as client:
        a.client = client
        await client.next("invite")
        assert (await a.send(0, data=b"not looked at")).kept
        a.data[1] = b"????" + a.data[1][4:]  # the bytes that are here are not asked for
        assert (await a.send(1)).verdict.accepted
        await committed(it, 1)
        np.testing.assert_array_equal(read(it.run.reducer.version(1).path)["w"], np.ones(4, np.float32))


@live
async def test_all_parts_kept_and_the_decision_lost_is_decided_by_whichever_part_comes_again(tmp_path, monkeypatch):
    from atoll.server.transfers.parts import Parts

    async with running(tmp_path / "state", **ALONE) as it, invited(it) as a:
        with monkeypatch.context() as patch:
            patch.setattr(Parts, "verdict", lambda *_: asyncio.sleep(0))
            assert [(await a.send(index)).kept for index in (0, 1)] == [True, True]
    async with running(tmp_path / "state", **ALONE) as it, it.client("a") as client:
        a.client = client
        await client.next("invite")
        assert (await a.send(0)).verdict.accepted
        await committed(it, 1)


# ---------------------------------------------------------------- faults


@live
async def test_a_damaged_part_is_asked_for_again_alone(tmp_path):
    async with running(tmp_path / "state", **ALONE) as it, invited(it) as a:
        assert (await a.send(0)).kept
        reply = await a.send(1, data=bytes(len(a.data[1])))
        assert (reply.verdict.reason, reply.verdict.resend) == (RejectReason.DIGEST_MISMATCH, True)
        assert (await a.send(0, data=b"")).kept, "nothing of it is asked for"
        assert (await a.send(1)).verdict.accepted


@live
async def test_findings_that_are_damaged_on_the_disk_cost_the_parts_and_not_the_update(tmp_path):
    state = tmp_path / "state"
    async with running(state, **ALONE) as it, invited(it) as a:
        assert (await a.send(0)).kept
        [findings] = (state / "runs" / "tiny-1" / "incoming").glob("*.0000.json")
        findings.write_text("{")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await a.send(1)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "try again"
        assert (await a.send(0)).kept
        assert (await a.send(1)).verdict.accepted


@live
async def test_one_part_that_is_not_finite_refuses_the_update(tmp_path):
    async with running(tmp_path / "state", **ALONE) as it, invited(it) as a:
        [piece] = a.parts[1].pieces
        a.data[1] = np.full(piece.lengths, np.nan, np.float32).tobytes()
        a.parts[1] = PartManifest(1, (replace(piece, sha256=hashlib.sha256(a.data[1]).hexdigest()),))
        a.seal()
        verdicts = [(await a.send(index)).verdict for index in (1, 0)]
        assert verdicts[0].reason == RejectReason.NOT_FINITE
        assert not verdicts[1].accepted
        assert it.run.machine.record_of(1).clients["a"].reason == RejectReason.NOT_FINITE


def overlap(a):
    a.parts[1] = PartManifest(1, a.parts[0].pieces[-1:])
    a.data[1] = a.data[0][-a.parts[1].num_bytes :]


def one_element_short(a):
    piece = a.parts[1].pieces[-1]
    assert piece.lengths == (2,)
    a.parts[1] = PartManifest(1, (*a.parts[1].pieces[:-1], replace(piece, lengths=(1,))))


def moved_outside(a):
    a.parts[1] = PartManifest(1, (replace(a.parts[1].pieces[-1], offsets=(3,)),))


def another_dtype(a):
    a.parts[1] = PartManifest(1, (replace(a.parts[1].pieces[-1], dtype="F16"),))


def strange(a):
    a.parts[1] = PartManifest(1, (Piece("v", "F32", (2,), (2,), "0" * 64),))


@pytest.mark.parametrize("spoil", [overlap, one_element_short, moved_outside, another_dtype, strange])
@pytest.mark.parametrize("on_rank", [False, True])
def test_parts_that_do_not_fit_the_model_are_refused_before_the_last_bytes(tmp_path, spoil, on_rank):
    @live
    async def check():
        settings = ALONE | (ONE if on_rank else {})
        async with running(tmp_path / "state", **settings) as it, place_of(it, tmp_path, on_rank) as place:
            async with place.client("a") as client:
                invite = await client.next("invite")
                a = Divided(client, *await client.train(invite))
                spoil(a)
                a.seal()
                assert (await a.send(0)).kept
                reply = await a.send(1, data=b"")  # no byte of it is sent
                assert reply.verdict.reason == RejectReason.WRONG_LAYOUT, reply
                assert it.run.machine.record_of(1).clients["a"].reason == RejectReason.WRONG_LAYOUT
                assert not (await a.send(0)).verdict.accepted

    check()


@asynccontextmanager
async def place_of(it, tmp_path, on_rank):
    if not on_rank:
        yield it
        return
    async with with_rank(it, tmp_path / "rank") as ranked:
        yield ranked


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda opened, a: opened.ClearField("part"), "part: none; allowed: one of the parts"),
        (lambda opened, a: setattr(opened, "part", a.parts[1].encode()[:-1]), "not JSON"),
        (
            lambda opened, a: setattr(opened, "manifest", a.whole.encode()),
            "allowed: none, because the manifest lists no",
        ),
        (lambda opened, a: setattr(opened, "part", replace(a.parts[0], index=1).encode()), "another digest"),
    ],
)
def test_a_part_that_is_not_of_its_root_is_refused_by_name(tmp_path, change, fault):
    @live
    async def check():
        async with running(tmp_path / "state", **ALONE) as it, invited(it) as a:
            opened = pb.UploadOpen(manifest=a.root.encode(), part=a.parts[0].encode())
            change(opened, a)
            call = a.client.stub.Upload()
            await call.write(pb.UploadRequest(open=opened))
            verdict = (await call.read()).verdict
            assert verdict.reason == RejectReason.BAD_MANIFEST
            assert fault in verdict.detail

    check()


@live
async def test_a_second_update_of_the_round_ends_every_stream_of_the_first(tmp_path):
    async with running(tmp_path / "state", **ALONE) as it, invited(it) as a:
        calls = []
        for part in a.parts:
            calls.append(a.client.stub.Upload())
            await calls[-1].write(pb.UploadRequest(open=pb.UploadOpen(manifest=a.root.encode(), part=part.encode())))
            assert (await calls[-1].read()).position == 0
        assert it.coordinator.uploads.is_in_flight(a.root.run_id, a.root.digest)
        other = Divided(a.client, replace(a.whole, num_examples=11), b"".join(a.data), num_parts=1)
        assert (await other.send(0)).verdict.accepted
        assert not it.coordinator.uploads.is_in_flight(a.root.run_id, a.root.digest)
        for call in calls:
            call.cancel()


# ---------------------------------------------------------------- room


@live
async def test_partial_uploads_are_counted_by_update_and_the_parts_of_the_oldest_go_together(tmp_path):
    state = tmp_path / "state"
    async with running(state, **ALONE) as it, invited(it, num_parts=4) as a:
        rivals = [Divided(a.client, replace(a.whole, num_examples=n), b"".join(a.data), num_parts=4) for n in (1, 2, 3)]
        for index in range(3):
            assert (await rivals[0].send(index)).kept
        assert len(files(state, "incoming")) == 6, "many parts of one update are one partial upload"
        assert (await rivals[1].send(0)).kept
        assert len(files(state, "incoming")) == 8
        assert (await rivals[2].send(0)).kept
        assert len(files(state, "incoming")) == 4, "the oldest has gone with all of its parts"


@live
async def test_room_is_kept_for_the_whole_of_an_update_that_has_begun(tmp_path):
    """Two updates in parts that do not fit beside each other must not both stop half-way."""
    state = tmp_path / "state"
    most = {"coordinator__incoming_max": 600}  # the model has 24 bytes; findings take some hundred
    async with running(state, **ALONE | most) as it, invited(it) as a:
        store = it.run.reducer.store
        with store.open_incoming("1" * 64, 10, part=0, whole_bytes=500):
            call = a.client.stub.Upload()
            big = pb.UploadOpen(manifest=a.root.encode(), part=a.parts[0].encode())
            await call.write(pb.UploadRequest(open=big))
            assert (await call.read()).position == 0
            with pytest.raises(OSError, match="allowed: 600"):
                store.open_incoming("2" * 64, 10, part=0, whole_bytes=200)
            with store.open_incoming("1" * 64, 490, part=1, whole_bytes=500):
                pass  # its room is reserved already


# ---------------------------------------------------------------- backup


@live
async def test_a_backup_has_every_part_and_names_what_is_missing_or_damaged(tmp_path):
    state = tmp_path / "state"
    async with running(state, rounds=2) as it, it.client("b"), invited(it, num_parts=3) as a:
        for index in range(3):
            reply = await a.send(index)
        assert reply.verdict.accepted
        back_up(state, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "new")
    assert losses_in(tmp_path / "new") == []
    updates = tmp_path / "new" / "runs" / "tiny-1" / "updates"
    assert files(tmp_path / "new", "updates") == [f"000{k}.{kind}" for k in range(3) for kind in ("bin", "json")]
    [data] = updates.glob("*.0001.bin")
    data.write_bytes(bytes(data.stat().st_size))
    [loss] = losses_in(tmp_path / "new")
    assert (loss.path, loss.fault) == (data, "is damaged (tensor 'w' does not have the SHA-256 of its manifest)")
    data.write_bytes(b"")
    [loss] = losses_in(tmp_path / "new")
    assert loss.fault.startswith("has 0 bytes, not ")
    assert loss.cost.startswith("it is the accepted update of a in round 1")
    [findings] = updates.glob("*.0002.json")
    findings.unlink()
    assert {loss.path: loss.fault for loss in losses_in(tmp_path / "new")}[findings] == "is missing"
    async with running(state, rounds=2) as it, it.client("b") as b:
        _, verdict = await report(b, 3.0)
        assert verdict.accepted
        await committed(it, 1)
        np.testing.assert_array_equal(read(it.run.reducer.version(1).path)["w"], np.full(4, 2.0, np.float32))
        await until(lambda: files(state, "updates") == [])  # every part goes when nothing needs it


# ---------------------------------------------------------------- the test's own client


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 6])
def test_the_boxes_of_the_parts_tile_every_tensor(kind, num_parts):
    for number, shape in enumerate([(), (3,), (0, 4), (5, 7), (2, 3, 9)]):
        counts = np.zeros(shape, int)
        for boxes in boxes_of(shape, kind, num_parts, number):
            for offsets, lengths in boxes:
                counts[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
        assert (counts == 1).all(), Tensor("w", "F32", shape)
