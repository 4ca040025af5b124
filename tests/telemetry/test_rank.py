"""The readings of an aggregation rank."""

import asyncio
from pathlib import Path

import grpc

from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import aggregator
from atoll.server.identity.authority import Authority
from atoll.server.ranks.rank import Rank, RankPlace
from atoll.telemetry.instruments import INSTRUMENTS, Process, Reading, bounded
from atoll.telemetry.process import read_process
from atoll.telemetry.rank import RankReadings


def test_a_rank_reads_each_metric_that_the_list_says_it_has(tmp_path: Path) -> None:
    authority = Authority.open_or_create(tmp_path / "authority", "test", 1e6)
    authority.credential(aggregator(0)).store(tmp_path / "identity")
    keeper = Keeper(tmp_path / "identity")

    async def read() -> Reading:
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            rank = Rank(RankPlace(0, 1, "lo"), tmp_path, channel)
            assert rank.status().status.certificate_until == 0
            rank.keeper = keeper
            assert rank.status().status.certificate_until == keeper.current.leaf.expires_at
            readings = RankReadings(rank, keeper)
            return bounded({**readings.read(), **readings.read_elsewhere(), **read_process()})

    found = asyncio.run(read())
    assert set(found) == {each.name for each in INSTRUMENTS if Process.RANK in each.processes}
    ((of, expiry),) = found["atoll.certificate.expiry_time"]
    assert of == {"atoll.identity.name": keeper.identity.uri}
    assert expiry == keeper.current.leaf.expires_at
