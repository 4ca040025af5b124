"""One aggregation rank over real gRPC, in this process: what it accepts, what it refuses, and what it never loses."""

import asyncio
import os
import shutil
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from atoll.ground.durable import DiskFull
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.dialer import InsecureDialer
from atoll.protocol.identity.membership import Membership
from atoll.protocol.identity.names import COORDINATOR
from atoll.protocol.identity.names import aggregator as aggregator_name
from atoll.protocol.manifest import parse_version
from atoll.protocol.vocabulary import Digest, RunId
from atoll.protocol.wire.channel import PROTOCOL
from atoll.server.config.process import AggregatorConfig
from atoll.server.ranks import gloo, process, rank_store
from atoll.server.ranks.rank import Rank, RankPlace
from atoll.server.transport.listener import InsecureListener
from atoll.tensors.safetensors_file import read
from tests.client.fake_coordinator import until
from tests.wire.live_coordinator import running, update_of
from tests.wire.test_round import committed, live, report

ONE = {"coordinator__aggregators": 1, "coordinator__start_aggregators": False}
NAMES = str(Path(__file__).parent / "tasks" / "long_names_task.py") + ":task"


class Ranked:
    """A rank in this process, and clients that go to it."""

    def __init__(self, it, rank, address):
        self.it, self.rank, self.address = it, rank, address

    @asynccontextmanager
    async def client(self, name, **hello):
        async with (
            self.it.client(name, **hello) as client,
            InsecureDialer().channel(self.address, aggregator_name(0)) as channel,
        ):
            stub, own = rpc.Stub(channel, "Aggregator"), client.stub
            client.stub = SimpleNamespace(GetManifest=own.GetManifest, Upload=stub.Upload, Download=stub.Download)
            yield client


@asynccontextmanager
async def with_rank(it, folder, *, number=0, of=1, **settings):
    folder.mkdir(exist_ok=True)
    config = AggregatorConfig(coordinator=it.address, insecure=True, rank=number, ranks=of, state=folder, **settings)
    async with InsecureDialer().channel(it.address, COORDINATOR) as channel:
        rank = Rank(RankPlace(number, of, "lo"), folder, channel)
        server, address = await process._listen(rank, config, InsecureListener())
        membership = Membership(config.coordinator, InsecureDialer(), None)
        serving = asyncio.ensure_future(process._keep_connected(rank, address, membership))
        try:
            yield Ranked(it, rank, address)
        finally:
            serving.cancel()
            rank.stop()
            await server.stop(0)


def everything_under(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


async def code_of(call, message):
    await call.write(message)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


@live
async def test_a_round_by_a_rank_commits_the_weighted_mean(tmp_path, monkeypatch):
    monkeypatch.setattr(gloo, "KEYS_MAX", 0)  # the ranks meet at another place in each round
    async with running(tmp_path / "state", rounds=2, **ONE) as it, with_rank(it, tmp_path / "rank") as ranked:
        async with ranked.client("a") as a, ranked.client("b") as b:
            first = ranked.rank.meeting_point.address
            (_, one), (_, two) = await asyncio.gather(report(a, 1.0, num_examples=30), report(b, 5.0, num_examples=10))
            assert one.accepted
            assert two.accepted
            await committed(it, 1)
            whole = await it.run.reducer.whole(1)
            np.testing.assert_array_equal(read(whole)["w"], np.full(4, (30 * 1 + 10 * 5) / 40, np.float32))
            assert it.coordinator.uploads.received_bytes == 0
            assert ranked.rank.uploads.received_bytes == 2 * (4 * 4 + 8)
            await asyncio.gather(report(a), report(b))
            await committed(it, 2)
            assert ranked.rank.meeting_point.address != first


@live
async def test_a_run_id_that_the_coordinator_does_not_know_makes_no_folder(tmp_path):
    outside = tmp_path / "outside"
    one = {"round__cohort_size": 1} | ONE
    async with running(tmp_path / "state", **one) as it, with_rank(it, tmp_path / "rank") as ranked:
        async with ranked.client("a") as a:
            invite = await a.next("invite")
            before = everything_under(tmp_path / "rank")
            for run_id in ("../../outside", str(outside), "tiny-7", "", ".", "..", "x" * 5000, "a\0b"):
                opened = pb.DownloadOpen(run_id=run_id, digest=invite.model_digest, credit=1 << 20)
                code = await code_of(a.stub.Download(), pb.DownloadRequest(open=opened))
                assert code is grpc.StatusCode.NOT_FOUND
                manifest, data = update_of(invite, "a", await it_manifest(a, invite), run_id=run_id)
                assert not (await a.upload(manifest, data)).accepted
            assert everything_under(tmp_path / "rank") == before
            assert "outside" not in os.listdir(tmp_path)


async def it_manifest(client, invite):
    reply = await client.stub.GetManifest(pb.ManifestRequest(run_id=invite.run_id, digest=invite.model_digest))
    return parse_version(reply.manifest)


@live
async def test_an_unknown_version_is_not_found_and_an_early_one_may_be_tried_again(tmp_path):
    async with with_rank(SimpleNamespace(address="127.0.0.1:1"), tmp_path / "alone") as ranked:
        async with grpc.aio.insecure_channel(ranked.address) as channel:
            opened = pb.DownloadRequest(open=pb.DownloadOpen(run_id="tiny-1", digest="0" * 64))
            assert await code_of(rpc.Stub(channel, "Aggregator").Download(), opened) is grpc.StatusCode.UNAVAILABLE
    async with running(tmp_path / "state", **ONE) as it, with_rank(it, tmp_path / "rank") as ranked:
        async with ranked.client("a") as a:
            opened = pb.DownloadRequest(open=pb.DownloadOpen(run_id="tiny-1", digest="0" * 64))
            assert await code_of(a.stub.Download(), opened) is grpc.StatusCode.NOT_FOUND


@live
async def test_a_version_is_fetched_once_also_when_the_first_who_asks_for_it_goes_away(tmp_path, monkeypatch):
    fetch, fetching, go_on = rank_store.fetch_into, [], asyncio.Event()

    async def fetch_later(*arguments):
        fetching.append(arguments)
        await go_on.wait()
        await fetch(*arguments)

    monkeypatch.setattr(rank_store, "fetch_into", fetch_later)
    async with running(tmp_path / "state", **ONE) as it, with_rank(it, tmp_path / "rank") as ranked:
        async with ranked.client("a") as a, ranked.client("b") as b:
            invite = await a.next("invite")
            opened = pb.DownloadRequest(
                open=pb.DownloadOpen(run_id=invite.run_id, digest=invite.model_digest, credit=1 << 20)
            )
            first = a.stub.Download()
            await first.write(opened)
            await until(lambda: fetching)
            first.cancel()
            second = asyncio.ensure_future(code_of(b.stub.Download(), opened))
            await asyncio.sleep(0.1)
            go_on.set()
            assert await second is None
            assert (len(fetching), ranked.rank.sent_bytes) == (1, 4 * 4 + 8)


@pytest.mark.parametrize("max_connections", [1, 5])
@live
async def test_a_rank_lets_in_three_connections_of_each_client_and_a_hundred(tmp_path, max_connections):
    async with with_rank(
        SimpleNamespace(address="127.0.0.1:1"), tmp_path / "alone", max_connections=max_connections
    ) as ranked:
        host, _, port = ranked.address.rpartition(":")
        expected = 3 * max_connections + 100
        streams = await asyncio.gather(*(asyncio.open_connection(host, port) for _ in range(expected + 10)))
        first_bytes = await asyncio.gather(*(reader.read(1) for reader, _ in streams), return_exceptions=True)
        for _, writer in streams:
            writer.close()
        assert sum(first == b"\0" for first in first_bytes) == expected, "a server's SETTINGS begin with a zero"


@live
async def test_an_update_with_the_longest_of_manifests_is_accepted_and_folded(tmp_path):
    settings = {"task": NAMES, "rounds": 1, "round__cohort_size": 1} | ONE
    async with running(tmp_path / "state", **settings) as it, with_rank(it, tmp_path / "rank") as ranked:
        async with ranked.client("a", tasks=("long_names_task:task",)) as a:
            _, verdict = await report(a, 1.0)
            assert verdict.accepted, verdict
            await committed(it, 1)
            model = read(await it.run.reducer.whole(1))
            assert len(model) == 3000
            assert all(value == 1 for value in model.values())


@pytest.mark.parametrize("address", ["10.0.0.1:7000", "unix:/tmp/x", "example.org:80", ""])
def test_a_rank_that_says_it_is_elsewhere_is_refused(tmp_path, address):
    @live
    async def check(tmp_path):
        async with (
            running(tmp_path / "state", **ONE) as it,
            grpc.aio.insecure_channel(it.address) as channel,
        ):
            hello = pb.RankHello(protocol=PROTOCOL, rank=0, num_ranks=1, address=address, store_address="127.0.0.1:1")
            code = await code_of(rpc.Stub(channel, "Aggregation").Serve(), pb.RankMessage(hello=hello))
            assert code is grpc.StatusCode.FAILED_PRECONDITION

    check(tmp_path)


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 2), (1, 1), (5, 1)])
def test_a_rank_that_is_none_of_them_is_refused(tmp_path, rank, num_ranks):
    @live
    async def check(tmp_path):
        async with running(tmp_path / "state", **ONE) as it, grpc.aio.insecure_channel(it.address) as channel:
            hello = pb.RankHello(protocol=PROTOCOL, rank=rank, num_ranks=num_ranks, address="127.0.0.1:7000")
            call = rpc.Stub(channel, "Aggregation").Serve()
            assert await code_of(call, pb.RankMessage(hello=hello)) is grpc.StatusCode.FAILED_PRECONDITION
            assert f"rank {rank} of {num_ranks}: this coordinator has 1 rank" in await call.details()

    check(tmp_path)


# ---------------------------------------------------------------- room


class Coordinator:
    """Says of every update that no decision needs it, and lets something happen meanwhile."""

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    async def FindUnused(self, request):
        await self.meanwhile()
        return pb.UnusedUpdates(digests=request.digests)


@pytest.fixture
def kept(tmp_path):
    """A rank that has an update and a part of one; and what is left when it has collected."""

    async def collect(meanwhile, **collect):
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            rank = Rank(RankPlace(0, 1, "lo"), tmp_path, channel)
            store = rank.run(RunId("r-1")).store
            store.update_path(UPDATE).write_bytes(b"u")
            store.incoming_path(PART).write_bytes(b"p")
            rank.aggregation = Coordinator(lambda: meanwhile(rank))
            await rank.collect(pb.Collect(run_id="r-1", current=0, keep_versions=1, **collect))
            return store.digests()

    return lambda meanwhile, **fields: asyncio.run(collect(meanwhile, **fields))


UPDATE, PART = Digest("a" * 64), Digest("b" * 64)


async def nothing(rank):
    pass


def test_what_nobody_needs_goes_and_a_part_that_may_go_on_stays(kept):
    assert kept(nothing) == {PART}


def test_a_part_goes_with_its_run(kept):
    assert kept(nothing, is_over=True) == set()


def test_a_part_of_an_older_base_goes(kept, tmp_path):
    base = tmp_path / "runs" / "r-1" / "versions" / "000003.safetensors"
    base.parent.mkdir(parents=True)
    base.write_bytes(b"")
    soon = time.time() + 60
    os.utime(base, (soon, soon))
    assert kept(nothing, oldest_base=3) == set()


@pytest.mark.parametrize("is_over_by_then", [True, False])
def test_an_update_that_is_accepted_after_the_coordinator_was_asked_stays(kept, is_over_by_then):
    async def upload(rank):
        upload = rank.uploads._marked_in_flight(RunId("r-1"), UPDATE)
        await upload.__aenter__()
        if is_over_by_then:
            await upload.__aexit__(None, None, None)

    assert UPDATE in kept(upload)


def test_a_rank_reports_what_does_not_fit_until_it_fits_or_its_run_is_deleted(tmp_path):
    async def reported():
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            rank = Rank(RankPlace(0, 1, "lo"), tmp_path, channel)
            for name, num_bytes in (("fits", 0), ("large", 2**60), ("deleted", 2**60)):
                rank.run(RunId(name))
                rank._no_room(RunId(name), num_bytes, DiskFull(f"{name} does not fit"))
            shutil.rmtree(tmp_path / "runs" / "deleted")
            return [[(each.run_id, each.detail) for each in rank.status().status.shortages] for _ in range(2)]

    assert asyncio.run(reported()) == [[("large", "large does not fit")]] * 2
