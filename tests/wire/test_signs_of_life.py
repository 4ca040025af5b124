"""Bytes of a transfer as signs of life: a client that sends nothing else is not lost while they come."""

import asyncio
import logging

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import ClientId, Digest, Fate, LossReason, RoundId, RunId
from atoll.server.transfers.arrivals import Arrivals
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live

LEASE_S = 2.0
"""A busy machine may stop this process for longer than a shorter one."""


@live
async def test_a_client_is_not_lost_while_bytes_of_its_update_come_and_a_silent_one_is(tmp_path):
    async with (
        running(tmp_path / "state", round__quorum=1, coordinator__lease=LEASE_S) as it,
        it.client("slow") as slow,
        it.client("silent") as silent,
    ):
        invite = await slow.next("invite")
        await silent.next("invite")
        manifest, data = await slow.train(invite)
        call = slow.stub.Upload()
        await call.write(pb.UploadRequest(open=pb.UploadOpen(manifest=manifest.encode())))
        for position in range(len(data)):
            await asyncio.sleep(1.5 * LEASE_S / len(data))
            await call.write(pb.UploadRequest(chunk=pb.Chunk(position=position, data=data[position : position + 1])))
            if position == len(data) // 2:
                key = RunId(invite.run_id), RoundId(1), ClientId("slow")
                assert it.coordinator.arrivals.bytes_of(key)[1] == len(data)
        await committed(it, 1)
        membership, record = it.run.machine.ledger.membership, it.run.machine.record_of(RoundId(1))
        assert not membership.lost_because(ClientId("slow"))
        assert membership.lost_because(ClientId("silent")) == LossReason.LEASE_EXPIRED
        assert {c: row.fate for c, row in record.clients.items()} == {"silent": Fate.LOST, "slow": Fate.REPORTED}
        assert it.coordinator.arrivals.all() == {}


@live
async def test_a_download_that_goes_on_renews_the_lease_and_brings_back_no_lost_client(tmp_path):
    async with running(tmp_path / "state", coordinator__lease=LEASE_S) as it, it.client("a") as a:
        attendance = it.coordinator.attendance
        while "a" not in attendance.hub:
            await asyncio.sleep(0.01)
        for _ in range(15):
            it.coordinator.arrivals.sign(ClientId("a"))
            await asyncio.sleep(LEASE_S / 10)
        assert a.name in attendance.hub
        while "a" in attendance.hub:  # it says nothing any more
            await asyncio.sleep(0.05)
        it.coordinator.arrivals.sign(ClientId("a"))
        assert not attendance._leases.heard_at(ClientId("a"))


@live
async def test_the_log_has_one_line_of_each_client_that_leaves_is_silent_or_is_cut_off(tmp_path, caplog):
    caplog.set_level(logging.INFO, "atoll")
    async with running(tmp_path / "state", coordinator__lease=LEASE_S) as it:
        async with it.client("leaves") as leaves:
            await leaves.next("welcome")
            await leaves.control.write(pb.ClientMessage(goodbye=pb.Goodbye()))
            await leaves.control.done_writing()
            await leaves.ending
        async with it.client("silent") as silent:
            await silent.next("welcome")
            await silent.ending
        async with it.client("cut") as cut:
            await cut.next("welcome")
        while it.coordinator.attendance.hub:
            await asyncio.sleep(0.01)
    said = [line for line in caplog.messages if line.startswith(("leaves", "silent", "cut"))]
    assert said == [
        "leaves joined (1 connected)",
        "leaves has left: its agent ends",
        "silent joined (1 connected)",
        "silent has given no sign of life for 2 s: it is given up until it connects again",
        "cut joined (1 connected)",
        "cut disconnected (0 connected)",
    ]


def test_a_rank_reports_what_came_since_its_last_report_and_the_coordinator_adds_the_ranks():
    heard, key = [], (RunId("run-1"), RoundId(3), ClientId("site"))
    ranks, hub = [Arrivals(), Arrivals()], Arrivals(heard.append)
    ranks[0].came(key, Digest("d"), 100, place=0, num_bytes=10)
    ranks[0].came(key, Digest("d"), 100, place=1, num_bytes=20)
    ranks[1].came(key, Digest("d"), 100, place=2, num_bytes=5)
    ranks[1].sign(ClientId("other"))
    for number, rank in enumerate(ranks):
        hub.reported(number, rank.report())
        assert rank.report() == []
    assert (hub.bytes_of(key), sorted(heard)) == ((35, 100), ["other", "site", "site"])
    hub.came(key, Digest("e"), 90, place=0, num_bytes=1)
    assert hub.bytes_of(key) == (1, 90), "another update begins anew"
    hub.over(key, Digest("d"))
    assert hub.all() == {key: (1, 90)}
    hub.over(key, Digest("e"))
    assert hub.all() == {}
