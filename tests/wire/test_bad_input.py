"""Client errors of all kinds, over real gRPC: a clear refusal, and nothing is lost."""

import json
import math
from dataclasses import replace

import grpc
import numpy as np
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.tensors.layout import Piece, pieces_in_order
from tests.wire.live_coordinator import running, update_of
from tests.wire.test_round import committed, live, report

DIGEST = "0" * 64


async def refused(tmp_path, make, **settings):
    """The verdict on what `make(invite, version)` returns, with proof that the round still commits without it."""
    async with running(tmp_path / "state", **({"round__quorum": 1} | settings)) as it:
        async with it.client("a") as a, it.client("b") as b:
            invite = await a.next("invite")
            version, _, _ = await a.download(invite)
            verdict = await a.upload(*make(invite, version))
            assert not verdict.accepted
            assert (await report(b, 3.0))[1].accepted
            await committed(it, 1)
            record = it.run.machine.ledger.past[1]
            assert it.run.reducer.store.disk_usage()["incoming"] == 0
            return verdict, record.clients["a"]


CLAIMS = {
    "no_examples": [{"num_examples": 0}, {"num_examples": -5}],
    "too_many_examples": [{"num_examples": 10**15}],
    "bad_work": [{"work": 0.0}, {"work": 1.5}, {"work": -0.1}],
    "wrong_base": [{"base_version": 7}, {"base_digest": DIGEST}],
}


@pytest.mark.parametrize(
    ("reason", "claims"), [(reason, claims) for reason, many in CLAIMS.items() for claims in many], ids=str
)
def test_claim_out_of_range_is_refused_by_name(tmp_path, reason, claims):
    @live
    async def check(tmp_path):
        verdict, client = await refused(tmp_path, lambda i, v: update_of(i, "a", v, **claims))
        assert verdict.reason == reason
        assert str(next(iter(claims.values())))[:20] in verdict.detail
        assert (client.fate, client.reason) == ("refused", reason)

    check(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_update_that_is_not_finite_is_refused_by_tensor(tmp_path, value):
    @live
    async def check(tmp_path):
        def poisoned(invite, version):
            manifest, data = update_of(invite, "a", version)
            poison = data[:8] + np.array([1, value, 1, 1], np.float32).tobytes()
            return rehashed(manifest, poison), poison

        verdict, client = await refused(tmp_path, poisoned)
        assert verdict.reason == "not_finite"
        assert "w: 1" in verdict.detail
        assert client.reason == "not_finite"

    check(tmp_path)


@live
async def test_update_whose_numbers_are_absurd_is_refused_before_it_can_fail_the_round(tmp_path):
    def absurd(invite, version):
        manifest, data = update_of(invite, "a", version)
        poison = data[:8] + np.array([1, 3e38, 1, 1], np.float32).tobytes()
        return rehashed(manifest, poison), poison

    verdict, client = await refused(tmp_path, absurd)
    assert verdict.reason == "not_finite"
    assert "beyond 1e+30 (w: 3e+38)" in verdict.detail
    assert client.fate == "refused"


def rehashed(manifest, data):
    """The manifest with the digests that these bytes have."""
    import hashlib

    pieces, position = [], 0
    for piece in manifest.pieces:
        part = data[position : position + piece.num_bytes]
        pieces.append(replace(piece, sha256=hashlib.sha256(part).hexdigest()))
        position += piece.num_bytes
    return replace(manifest, pieces=tuple(pieces))


def box(tensor, dtype, offset, length):
    return Piece(tensor, dtype, (offset,), (length,), DIGEST)


COUNT = Piece("count", "I64", (), (), DIGEST)
LAYOUTS = {
    "wrong shape": [COUNT, box("w", "F32", 0, 5)],
    "wrong dtype": [COUNT, Piece("w", "I32", (0,), (4,), DIGEST)],
    "wrong number of dimensions": [COUNT, Piece("w", "F32", (0, 0), (2, 2), DIGEST)],
    "unknown tensor": [COUNT, box("w", "F32", 0, 4), box("x", "F32", 0, 4)],
    "missing tensor": [COUNT],
    "missing piece": [COUNT, box("w", "F32", 0, 2)],
    "overlapping pieces": [COUNT, box("w", "F32", 0, 3), box("w", "F32", 2, 2)],
    "piece out of the tensor": [COUNT, box("w", "F32", 0, 2), box("w", "F32", 2, 3)],
    "empty piece": [COUNT, box("w", "F32", 0, 4), box("w", "F32", 4, 0)],
}


@pytest.mark.parametrize("pieces", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_manifest_with_a_wrong_layout_is_refused_before_its_bytes(tmp_path, pieces):
    @live
    async def check(tmp_path):
        def lie(invite, version):
            return replace(update_of(invite, "a", version)[0], pieces=pieces_in_order(pieces)), b""

        verdict, client = await refused(tmp_path, lie)
        assert verdict.reason == "wrong_layout", verdict
        assert "'w'" in verdict.detail or "'x'" in verdict.detail or "'count'" in verdict.detail
        assert client.reason == "wrong_layout"

    check(tmp_path)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{" * 100_000,
        b'{"format":"atoll/1","kind":"update"}',
        json.dumps({"work": float("nan")}).encode(),
        b"x" * 3_000_000,
    ],
    ids=["empty", "no text", "no object", "deep", "incomplete", "nan", "huge"],
)
def test_manifest_that_is_none_is_refused(tmp_path, manifest):
    @live
    async def check(tmp_path):
        async with running(tmp_path / "state") as it, it.client("a") as a:
            verdict = await a.upload(manifest, b"")
            assert (verdict.accepted, verdict.reason) == (False, "bad_manifest")
            assert verdict.detail

    check(tmp_path)


@live
async def test_damaged_bytes_are_asked_for_again_and_then_accepted(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        manifest, data = await a.train(await a.next("invite"))
        damaged = data[:-1] + b"\x55"
        verdict = await a.upload(manifest, damaged)
        assert (verdict.accepted, verdict.resend, verdict.reason) == (False, True, "digest_mismatch")
        assert "w" in verdict.detail
        assert (await a.upload(manifest, data)).accepted


@live
async def test_replayed_upload_of_an_earlier_round_gets_its_old_answer_and_counts_once(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b") as b:
        manifest, data = await a.train(await a.next("invite"))
        assert (await a.upload(manifest, data)).accepted
        await report(b)
        await committed(it, 1)
        assert (await a.upload(manifest, data)).accepted
        invite = await a.next("invite")
        assert invite.round_id == 2
        assert it.run.machine.round.record.num_reported == 0


@live
async def test_second_update_of_a_client_is_refused(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        invite = await a.next("invite")
        assert (await a.upload(*await a.train(invite, value=1.0))).accepted
        verdict = await a.upload(*await a.train(invite, value=2.0))
        assert (verdict.accepted, verdict.reason) == (False, "already_reported")


@live
async def test_upload_for_another_round_or_run_or_by_a_stranger_is_refused(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
        invite = await a.next("invite")
        seq = it.run._seq
        for claims, reason in [
            ({"round_id": 9}, "wrong_round"),
            ({"round_id": 0}, "wrong_round"),
            ({"run_id": "other"}, "run_ended"),
            ({"client_id": "mallory"}, "not_invited"),
        ]:
            verdict = await a.upload(*await a.train(invite, **claims))
            assert (verdict.accepted, verdict.reason) == (False, reason)
        assert it.run._seq == seq, "what changes nothing is not journaled"


@pytest.mark.parametrize(
    ("position", "size", "why"),
    [(0, 40, "too much"), (3, 4, "a gap"), (0, 0, "nothing")],
)
def test_chunk_that_does_not_continue_is_a_protocol_error(tmp_path, position, size, why):
    @live
    async def check(tmp_path):
        async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
            manifest, data = await a.train(await a.next("invite"))
            call = a.stub.Upload()
            await call.write(pb.UploadRequest(open=pb.UploadOpen(manifest=manifest.encode())))
            assert (await call.read()).position == 0
            await call.write(pb.UploadRequest(chunk=pb.Chunk(position=position, data=b"x" * size)))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT, why
            assert (await a.upload(manifest, data)).accepted, "nothing is lost"

    check(tmp_path)


@pytest.mark.parametrize("inline", [False, True], ids=["in a chunk", "with the manifest"])
@pytest.mark.parametrize("num_here", [1, 8, 23])
def test_a_client_that_begins_at_0_goes_on_behind_the_bytes_that_are_here(tmp_path, monkeypatch, num_here, inline):
    """Another process of its name has sent them, or it has lost its spool and has trained again."""
    monkeypatch.setattr("atoll.server.files.incoming.SMALL_BYTES", 0)

    @live
    async def check(tmp_path):
        async with running(tmp_path / "state", rounds=1) as it, it.client("a") as a, it.client("b"):
            manifest, data = await a.train(await a.next("invite"))
            assert len(data) == 24
            opened = pb.UploadOpen(manifest=manifest.encode())
            first = a.stub.Upload()
            await first.write(pb.UploadRequest(open=opened))
            assert (await first.read()).position == 0
            await first.write(pb.UploadRequest(chunk=pb.Chunk(position=0, data=data[:num_here])))
            assert (await first.read()).position == num_here
            call = a.stub.Upload()
            opened.data = data if inline else b""
            await call.write(pb.UploadRequest(open=opened))
            if not inline:
                await call.write(pb.UploadRequest(chunk=pb.Chunk(position=0, data=data)))
                assert (await call.read()).position == num_here
            assert (await call.read()).verdict.accepted

    check(tmp_path)


@pytest.mark.parametrize(
    "boxes",
    [
        [pb.Box(tensor="x", offsets=[0], lengths=[1])],
        [pb.Box(tensor="w", offsets=[0], lengths=[5])],
        [pb.Box(tensor="w", offsets=[0, 0], lengths=[1, 1])],
        [pb.Box(tensor="w", offsets=[2**63], lengths=[2**63])],
        [pb.Box(tensor="w", offsets=[0], lengths=[0])],
    ],
)
def test_download_of_a_box_that_is_not_there_is_a_protocol_error(tmp_path, boxes):
    @live
    async def check(tmp_path):
        async with running(tmp_path / "state") as it, it.client("a") as a, it.client("b"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await a.download(await a.next("invite"), boxes=boxes)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    check(tmp_path)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"protocol": 99}, grpc.StatusCode.FAILED_PRECONDITION),
        ({"session": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"label": "x" * 1000}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"tasks": ["t"] * 200}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=lambda value: str(value)[:30],
)
def test_hello_that_is_wrong_is_answered_with_a_status(tmp_path, hello, code):
    @live
    async def check(tmp_path):
        async with running(tmp_path / "state") as it, it.client("a", **hello) as a:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await a.control.read()
            assert error.value.code() is code
            assert len(it.coordinator.attendance.hub) == 0

    check(tmp_path)


@live
async def test_client_that_allows_another_task_only_is_not_invited_and_told_what_runs(tmp_path):
    async with running(tmp_path / "state", round__cohort_size=1) as it, it.client("a", tasks=["other:task"]) as a:
        welcome = await a.next("welcome")
        assert list(welcome.tasks) == ["four_numbers_task:task"]
        assert it.run.machine.ledger.membership.num_connected == 0
