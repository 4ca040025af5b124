"""The agent and the aggregation ranks: uploads to its own rank, downloads from all, and the change to another rank."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from atoll.client.wire import ranks as ranks_module
from atoll.client.wire.ranks import PATIENCE_S, Ranks
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.dialer import InsecureDialer
from atoll.protocol.wire import channel as limits
from atoll.protocol.wire.channel import server_options
from atoll.protocol.wire.stream import StreamBroken
from atoll.tensors.ownership import owned_pieces
from tests.client.fake_coordinator import MIB, Instant, Lagoon, Version, agent, lagoon, live, model, until

SIZES = {"large": 3 * MIB, "small": 5}
"""Elements of a float32 tensor: three pieces of 4 MiB and one more."""


@asynccontextmanager
async def rank(version):
    """A rank that has all of a version, and accepts every update."""
    servicer, server = Lagoon(), grpc.aio.server(options=server_options())
    rpc.add_servicer(servicer, server, "Aggregator")
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    servicer.server = server
    servicer.add(version)
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(0)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(ranks_module, "PATIENCE_S", 0.4)


def welcome(coordinator, *addresses):
    coordinator.welcome.ranks.CopyFrom(pb.Ranks(addresses=addresses))


@live
async def test_parts_come_from_their_ranks_and_the_update_goes_to_the_invitations(tmp_path):
    version = Version(model(**SIZES))
    async with lagoon() as coordinator, rank(version) as first, rank(version) as second:
        coordinator.add(version)
        welcome(coordinator, first.address, second.address)
        runner = Instant({name: np.ones(size, np.float32) for name, size in SIZES.items()})
        async with agent(coordinator, tmp_path / "a", runner):
            await coordinator.invite(version, rank=1)
            await second.accepted.wait()
        for number, servicer in enumerate((first, second)):
            own = owned_pieces(version.manifest.pieces, number, 2)
            asked = [(box.tensor, tuple(box.offsets)) for box in servicer.opened[0].boxes]
            assert asked == [(piece.tensor, piece.offsets) for piece in own]
            assert asked
        assert first.sent_bytes + second.sent_bytes == version.manifest.num_bytes
        assert (first.received_bytes, coordinator.received_bytes) == (0, 0)
        assert second.received_bytes == version.manifest.num_bytes
        assert coordinator.calls["Download"] == coordinator.calls["Upload"] == 0


async def uploaded(tmp_path, *, gone, back=False):
    """Return the calls of `Upload` at ranks 0 and 1 for an update of rank 0, which may be `gone` when it is made."""
    version, heard, update = Version(model(w=8)), [], Ranks.update
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Ranks, "update", lambda self, new: (heard.append(list(new)), update(self, new)))
        return await _uploaded(tmp_path, version, heard, gone=gone, back=back)


async def _uploaded(tmp_path, version, heard, *, gone, back):
    async with lagoon() as coordinator, rank(version) as first, rank(version) as second:
        coordinator.add(version)
        welcome(coordinator, first.address, second.address)
        runner = Instant({"w": np.ones(8, np.float32)})
        runner.go.clear()
        async with agent(coordinator, tmp_path / "a", runner):
            await coordinator.invite(version)
            await runner.begun.wait()
            if gone == "said":
                await coordinator.push(ranks=pb.Ranks(addresses=["", second.address]))
                await until(lambda: heard[-1] == ["", second.address])  # before the update is made
            else:
                first.upload_status = grpc.StatusCode.UNAVAILABLE, "it is not reached"
            runner.go.set()
            if back:
                await coordinator.push(ranks=pb.Ranks(addresses=[first.address, second.address]))
            await until(lambda: first.accepted.is_set() or second.accepted.is_set())
        return first.accepted.is_set(), second.accepted.is_set()


@pytest.mark.parametrize("gone", ["said", "silently"])
def test_an_update_whose_rank_stays_away_goes_to_another(tmp_path, impatient, gone):
    @live
    async def check():
        assert await uploaded(tmp_path, gone=gone) == (False, True)

    check()


@live
async def test_an_update_waits_for_a_rank_that_comes_back(tmp_path):
    assert await uploaded(tmp_path, gone="said", back=True) == (True, False)


async def stub_of(ranks, rank):
    async with ranks.connection(rank).calls() as stub:
        return stub


@live
async def test_connections_outlive_the_coordinators_absence_and_end_with_their_address():
    ranks = Ranks(InsecureDialer(), asyncio.ensure_future)
    ranks.update(["127.0.0.1:1", "127.0.0.1:2"])
    first, second = await stub_of(ranks, 0), await stub_of(ranks, 1)
    ranks.update(["", ""])  # a coordinator that has just started knows none of them
    assert ranks.num_ranks == 2
    with pytest.raises(StreamBroken, match="aggregation rank 0 is away"):
        ranks.connection(0)
    ranks.update(["127.0.0.1:1", "127.0.0.1:3"])
    assert await stub_of(ranks, 0) is first
    assert await stub_of(ranks, 1) is not second
    await ranks.close()


@live
async def test_a_rank_that_is_away_is_not_dialled(monkeypatch):
    monkeypatch.setattr(limits, "CONNECTION_AGE_S", 0.1)
    dialled = []

    async def listen(reader, writer):
        dialled.append(writer)
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    ranks = Ranks(InsecureDialer(), asyncio.ensure_future)
    ranks.update([address])
    ranks.connection(0)
    await until(lambda: len(dialled) >= 1)
    ranks.update([""])
    await asyncio.sleep(0.5)  # what has begun is over
    before = len(dialled)
    await asyncio.sleep(1.0)
    assert len(dialled) == before
    ranks.update([address])
    await until(lambda: len(dialled) > before)
    await ranks.close()
    server.close()


@live
async def test_a_rank_that_is_said_to_be_elsewhere_is_not_dialled():
    ranks = Ranks(InsecureDialer(), asyncio.ensure_future)
    ranks.update(["10.0.0.1:80", "unix:/tmp/socket", "127.0.0.1:7"])
    for number in (0, 1):
        with pytest.raises(StreamBroken, match="is away"):
            ranks.connection(number)
    ranks.connection(2)
    await ranks.close()


@pytest.mark.parametrize(
    ("waited", "chosen"), [(0.0, 1), (0.9, 1), (1.0, 2), (2.1, 0), (3.5, 1)], ids=lambda value: str(value)
)
def test_each_turn_of_patience_is_another_rank(waited, chosen):
    @live
    async def check():
        ranks = Ranks(InsecureDialer(), asyncio.ensure_future)
        ranks.update([f"127.0.0.1:{port}" for port in (1, 2, 3)])
        assert ranks.rank_for_update(1, waited * PATIENCE_S) == chosen
        await ranks.close()

    check()
