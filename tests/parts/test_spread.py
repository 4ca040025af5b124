"""The parts of an update at several aggregation ranks, over real gRPC: one update, and what is kept is never lost."""

import asyncio
import hashlib
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.dialer import InsecureDialer
from atoll.protocol.identity.names import aggregator
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import Digest, RejectReason
from atoll.server.hosting.retention import _Live
from atoll.server.journal.codec import decode_meta
from tests.client.fake_coordinator import until
from tests.parts.test_wire import Divided, moved_outside, one_element_short, overlap
from tests.wire.live_coordinator import running
from tests.wire.test_ranks import with_rank
from tests.wire.test_round import live

TWO = {"coordinator__aggregators": 2, "coordinator__start_aggregators": False}


class Spread(Divided):
    """An update of client a whose parts go to ranks."""

    def __init__(self, it, folder, ranks, stubs, client, manifest, data, **divided):
        super().__init__(client, manifest, data, **divided)
        self.it, self.folder, self.ranks, self.stubs = it, folder, ranks, stubs

    async def to(self, rank, index, **how):
        return await self.send(index, stub=self.stubs[rank], **how)

    def other(self, num_examples):
        """Another update of the same round, as of an agent that has trained again."""
        found = replace(self.whole, num_examples=num_examples)
        return Spread(self.it, self.folder, self.ranks, self.stubs, self.client, found, b"".join(self.data))

    def files(self, rank, folder="updates", digest=None):
        """The files of this update at a rank, or at the coordinator."""
        state = self.folder / ("state" if rank is None else f"rank{rank}")
        paths = (state / "runs" / "tiny-1" / folder).glob(f"{digest or self.root.digest}*")
        return sorted(path.name[65:] for path in paths)

    def received(self):
        return [ranked.rank.uploads.received_bytes for ranked in self.ranks]

    def accepted(self):
        record = self.it.run.machine.record_of(1)
        return record.num_in, record.clients["a"].digest


@asynccontextmanager
async def two_ranks(folder, **divided):
    """A coordinator, two ranks, and client a, whose update divides into parts. A second client never reports."""
    async with (
        running(folder / "state", **TWO) as it,
        with_rank(it, folder / "rank0", number=0, of=2) as first,
        with_rank(it, folder / "rank1", number=1, of=2) as second,
        InsecureDialer().channel(first.address, aggregator(0)) as channel0,
        InsecureDialer().channel(second.address, aggregator(1)) as channel1,
        it.client("b"),
        it.client("a", spreads_parts=True) as client,
    ):
        invite = await client.next("invite")
        assert invite.spreads
        stubs = rpc.Stub(channel0, "Aggregator"), rpc.Stub(channel1, "Aggregator")
        yield Spread(it, folder, (first, second), stubs, client, *await client.train(invite), **divided)


KEPT = ["0000.bin", "0000.json"]
ALSO_KEPT = ["0001.bin", "0001.json"]


# ---------------------------------------------------------------- one update


@live
async def test_an_update_is_accepted_once_when_all_parts_are_kept_wherever_they_are(tmp_path):
    async with two_ranks(tmp_path, num_parts=3) as a:
        assert (await a.to(1, 2)).kept
        assert (await a.to(0, 0)).kept
        assert a.accepted() == (0, None)
        assert (await a.to(0, 1)).verdict.accepted
        assert a.accepted() == (1, a.root.digest)
        assert (a.files(0), a.files(1)) == ([*KEPT, *ALSO_KEPT], ["0002.bin", "0002.json"])
        assert a.files(None, "incoming") == [], "the coordinator's notes are gone"
        meta = decode_meta(a.it.coordinator.journal.updates("tiny-1", [a.root.digest])[a.root.digest].meta, where="")
        assert meta.ranks == (0, 0, 1)
        assert (await a.to(1, 0)).verdict.accepted, "any part gets the verdict, at any rank, without bytes"
        assert sum(a.received()) == a.root.num_bytes
        assert not a.it.coordinator.ranks.parts.holds("tiny-1", a.root.digest)


@live
async def test_parts_that_come_at_the_same_time_are_decided_about_once(tmp_path):
    async with two_ranks(tmp_path, num_parts=4) as a:
        replies = await asyncio.gather(*(a.to(index % 2, index) for index in range(4)))
        assert any(reply.verdict.accepted for reply in replies)
        assert all(reply.kept or reply.verdict.accepted for reply in replies)
        assert a.accepted() == (1, a.root.digest)


@live
async def test_a_part_that_is_kept_is_not_asked_for_at_another_rank(tmp_path):
    """So a rank that dies after it has kept a part costs nothing: the part counts when it returns."""
    async with two_ranks(tmp_path) as a:
        assert (await a.to(0, 0)).kept
        before = a.received()
        assert (await a.to(1, 0, data=b"not looked at")).kept
        assert a.received() == before
        assert (await a.to(1, 1)).verdict.accepted


@live
async def test_a_part_that_moves_before_it_is_kept_counts_where_it_is_kept(tmp_path):
    async with two_ranks(tmp_path) as a:
        assert await a.to(0, 0, cut_at=4) is None
        assert (await a.to(1, 0)).kept
        assert (await a.to(0, 1)).verdict.accepted
        assert (a.files(0), a.files(1)) == (ALSO_KEPT, KEPT)


@live
async def test_a_coordinator_that_has_forgotten_what_is_kept_learns_it_without_bytes(tmp_path):
    """It died: the client opens every part again, and the ranks report what they have."""
    async with two_ranks(tmp_path) as a:
        assert (await a.to(0, 0)).kept
        parts = a.it.coordinator.ranks.parts
        assert parts.withdraw(a.root.run_id, a.root.digest)
        assert (await a.to(1, 1)).kept, "the first part is not known to be kept"
        assert (await a.to(0, 0, data=b"not looked at")).verdict.accepted
        assert a.accepted() == (1, a.root.digest)


@live
async def test_an_older_agent_is_told_nothing_and_sends_all_parts_to_its_rank(tmp_path):
    async with running(tmp_path / "state", **TWO) as it, it.client("b", spreads_parts=True) as new:
        async with it.client("a") as old:
            assert (await new.next("invite")).spreads
            assert not (await old.next("invite")).spreads
    async with running(tmp_path / "plain") as it, it.client("b", spreads_parts=True) as b, it.client("a"):
        assert not (await b.next("invite")).spreads, "without ranks there is nothing to spread over"


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("spoil", [overlap, one_element_short, moved_outside])
def test_parts_that_do_not_fit_together_are_refused_before_the_last_bytes(tmp_path, spoil):
    @live
    async def check():
        async with two_ranks(tmp_path) as a:
            spoil(a)
            a.seal()
            assert (await a.to(0, 0)).kept
            reply = await a.to(1, 1, data=b"")
            assert reply.verdict.reason == RejectReason.WRONG_LAYOUT, reply
            assert not (await a.to(0, 0)).verdict.accepted
            assert a.it.run.machine.record_of(1).clients["a"].reason == RejectReason.WRONG_LAYOUT
            assert a.accepted() == (0, None)

    check()


@live
async def test_one_part_that_is_not_finite_refuses_the_update_at_every_rank(tmp_path):
    async with two_ranks(tmp_path) as a:
        [piece] = a.parts[1].pieces
        a.data[1] = np.full(piece.lengths, np.nan, np.float32).tobytes()
        a.parts[1] = PartManifest(1, (replace(piece, sha256=hashlib.sha256(a.data[1]).hexdigest()),))
        a.seal()
        assert (await a.to(0, 0)).kept
        assert (await a.to(1, 1)).verdict.reason == RejectReason.NOT_FINITE
        assert (await a.to(0, 0)).verdict.reason == RejectReason.ALREADY_REPORTED
        assert a.accepted() == (0, None)


@live
async def test_a_damaged_part_is_asked_for_again_alone(tmp_path):
    async with two_ranks(tmp_path) as a:
        assert (await a.to(0, 0)).kept
        assert (await a.to(1, 1, data=bytes(len(a.data[1])))).verdict.resend
        assert (await a.to(0, 0, data=b"")).kept
        assert (await a.to(1, 1)).verdict.accepted


# ---------------------------------------------------------------- what is kept stays, or counts no more


@live
async def test_parts_that_make_room_for_newer_updates_count_as_kept_no_more(tmp_path):
    async with two_ranks(tmp_path) as a:
        assert (await a.to(0, 0)).kept
        for num_examples in (1, 2):  # the second one pushes the first update out
            assert (await a.other(num_examples).to(0, 0)).kept
        assert a.files(0) == []
        assert (await a.to(1, 1)).kept, "it is not whole: its first part is gone"
        assert (await a.to(0, 0)).verdict.accepted, "its bytes were wanted again"
        assert a.files(0) == KEPT


@live
async def test_an_accepted_update_is_never_pushed_out(tmp_path):
    """The rank that did not give the answer does not know that the update is accepted."""
    async with two_ranks(tmp_path) as a:
        assert (await a.to(0, 0)).kept
        assert (await a.to(1, 1)).verdict.accepted
        uploads = a.ranks[0].rank.uploads
        assert uploads._partial, "rank 0 has heard of no verdict"
        judge = a.ranks[0].rank._judge(a.root, pb.UploadOpen(), None)
        assert not await judge.withdraw(a.root.digest)
        assert await judge.withdraw(Digest("1" * 64)), "nobody knows it"
        assert a.files(0) == KEPT


@live
async def test_a_collection_spares_what_is_kept_and_takes_it_once_the_update_cannot_count(tmp_path):
    async with two_ranks(tmp_path) as a:
        assert (await a.to(0, 0)).kept
        collect = pb.Collect(run_id="tiny-1", current=0, keep_versions=1)
        run = a.it.run
        run.retention._live = _Live(run.retention._is_in_flight)  # as after the end of a round that needed nothing
        await a.ranks[0].rank.collect(collect)
        assert a.files(0) == KEPT
        opened = pb.UploadOpen(manifest=a.root.encode())
        await a.ranks[0].rank._judge(a.root, opened, None).refuse(RejectReason.NOT_FINITE, "another part")
        await a.ranks[0].rank.collect(collect)
        await until(lambda: a.files(0) == [])  # an order of the coordinator may have renamed it, and delete it now
        assert not a.it.coordinator.ranks.parts.holds("tiny-1", a.root.digest)


@live
async def test_findings_that_are_damaged_at_a_rank_cost_the_part_and_not_the_update(tmp_path):
    async with two_ranks(tmp_path) as a:
        assert (await a.to(0, 0)).kept
        [findings] = (tmp_path / "rank0").glob("runs/tiny-1/updates/*.0000.json")
        findings.write_text("{")
        a.it.coordinator.ranks.parts.withdraw(a.root.run_id, a.root.digest)  # as if it died: the rank reports again
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await a.to(0, 0)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "try again"
        assert (await a.to(0, 0)).kept
        assert (await a.to(1, 1)).verdict.accepted


@live
async def test_a_decision_goes_on_when_the_stream_that_asked_for_it_is_cut(tmp_path, monkeypatch):
    """Until it is on disk no part may be withdrawn: it may be accepted."""
    async with two_ranks(tmp_path) as a:
        assert (await a.to(0, 0)).kept
        parts, go_on, deciding = a.it.coordinator.ranks.parts, asyncio.Event(), asyncio.Event()
        judge_of = a.it.coordinator.judge

        def slow(*arguments):
            judge = judge_of(*arguments)

            class Slow(type(judge)):
                async def decide(self, kept):
                    deciding.set()
                    await go_on.wait()
                    return await super().decide(kept)

            return Slow(judge.run, judge.manifest, judge.update, judge.part)

        monkeypatch.setattr(a.it.coordinator, "judge", slow)
        last = asyncio.ensure_future(a.to(1, 1))
        await deciding.wait()
        last.cancel()
        await asyncio.sleep(0.1)
        assert not parts.withdraw(a.root.run_id, a.root.digest)
        go_on.set()
        await until(lambda: a.accepted() == (1, a.root.digest))
        await until(lambda: not parts.holds(a.root.run_id, a.root.digest))
