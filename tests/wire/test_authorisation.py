"""The calls that each role may make, against a real coordinator and a real rank."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.dialer import MutualDialer
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.membership import Membership
from atoll.protocol.identity.names import COORDINATOR, Identity, Role, aggregator
from atoll.protocol.identity.renewal import MembershipEnded
from atoll.protocol.wire.stream import Stream, StreamBroken
from atoll.server.config.process import AggregatorConfig
from atoll.server.ranks import process as aggregators
from atoll.server.ranks.rank import Rank, RankPlace
from atoll.server.transport.listener import MutualListener
from benchmarks.members import equip
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running, update_of
from tests.wire.test_ranks import ONE, it_manifest, with_rank
from tests.wire.test_round import committed, live, report


async def refused(answer):
    """The status of a call that fails."""
    try:
        await answer
    except StreamBroken as error:
        return error.code, error.detail
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    raise AssertionError("it was not refused")


@live
async def test_a_rank_is_told_of_its_own_updates_alone_and_gives_reasons_that_there_are(tmp_path):
    async with running(tmp_path / "state", **ONE) as it, with_rank(it, tmp_path / "rank") as ranked:
        async with (
            ranked.client("a") as a,
            ranked.client("b") as b,
            grpc.aio.insecure_channel(it.address) as channel,
        ):
            invite, _ = await report(a)
            aggregation, digests = rpc.Stub(channel, "Aggregation"), [bytes.fromhex(d) for d in _accepted(it, invite)]

            async def told(rank, digests):
                request = pb.UpdatesRequest(run_id=invite.run_id, digests=digests, rank=rank)
                return [update.digest async for update in aggregation.GetUpdates(request)]

            assert await told(0, digests) == digests
            code, detail = await refused(told(1, digests))
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert detail.endswith("is not at rank 1, which asks")
            assert (await refused(told(0, [bytes(32)])))[0] is grpc.StatusCode.NOT_FOUND
            update = update_of(invite, "b", await it_manifest(b, invite))
            opened = pb.UploadOpen(manifest=update[0].encode())
            code, detail = await refused(
                aggregation.SubmitUpdate(iter([pb.SubmittedUpdate(opened=opened, reason="because")]))
            )
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert detail.startswith("reason 'because'; allowed: wrong_round, ")
            assert (await b.upload(*update)).accepted
            await committed(it, 1)


def _accepted(it, invite):
    clients = it.run.machine.record_of(invite.round_id).clients
    return [client.digest for client in clients.values() if client.digest]


@live
async def test_a_rank_that_asks_about_nobody_is_told_so(tmp_path):
    async with running(tmp_path / "state", **ONE) as it, grpc.aio.insecure_channel(it.address) as channel:
        request = pb.AdmitRequest(callers=[pb.Caller(role="client", name="../x")])
        code, detail = await refused(rpc.Stub(channel, "Aggregation").Admit(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "'../x'" in detail


# ---------------------------------------------------------------- with certificates

SECURE = {"coordinator__insecure": False}


@asynccontextmanager
async def with_secure_rank(it, folder):
    """The address of rank 0."""
    folder.mkdir(exist_ok=True)
    keeper = Keeper(equip(it.coordinator.config.state, folder, aggregator(0)))
    config = AggregatorConfig(coordinator=it.address, rank=0, ranks=1, state=folder)
    async with MutualDialer(keeper).channel(it.address, COORDINATOR) as channel:
        rank = Rank(RankPlace(0, 1, "lo"), folder, channel)
        server, address = await aggregators._listen(rank, config, MutualListener(keeper))
        serving = asyncio.ensure_future(
            aggregators._keep_connected(rank, address, Membership(it.address, MutualDialer(keeper), keeper))
        )
        try:
            yield address
        finally:
            serving.cancel()
            rank.stop()
            await server.stop(0)


def to_rank(it, address, name):
    return it.dialer(Identity(Role.CLIENT, name)).channel(address, aggregator(0))


async def fetched(stub, invite):
    """Return the number of bytes that come of the invitation's version."""
    stream = Stream(stub.Download)
    opened = pb.DownloadOpen(run_id=invite.run_id, digest=invite.model_digest, credit=1 << 20)
    await stream.write(pb.DownloadRequest(open=opened))
    num_bytes = 0
    while (reply := await stream.read()) is not None:
        num_bytes += len(reply.data)
    return num_bytes


async def sent(stub, update):
    """The verdict on a small update."""
    stream = Stream(stub.Upload)
    await stream.write(pb.UploadRequest(open=pb.UploadOpen(manifest=update[0].encode(), data=update[1])))
    while not (reply := await stream.read()).HasField("verdict"):
        pass
    return reply.verdict


@live
async def test_a_rank_serves_members_of_the_run_alone_and_no_longer_than_they_are(tmp_path):
    one = {"round__cohort_size": 1} | ONE | SECURE
    async with running(tmp_path / "state", **one) as it, with_secure_rank(it, tmp_path / "rank") as address:
        async with it.client("a") as a, to_rank(it, address, "a") as own, to_rank(it, address, "b") as other:
            invite = await a.next("invite")
            own, other = rpc.Stub(own, "Aggregator"), rpc.Stub(other, "Aggregator")
            update = update_of(invite, "a", await it_manifest(a, invite))
            assert await fetched(own, invite) == 4 * 4 + 8
            assert await refused(fetched(other, invite)) == (
                grpc.StatusCode.PERMISSION_DENIED,
                "client b has not joined run 'tiny-1'",
            )
            assert (await refused(sent(other, update)))[0] is grpc.StatusCode.PERMISSION_DENIED
            assert (await sent(own, update)).accepted
            waiting = own.Download()  # for credit that never comes
            opened = pb.DownloadOpen(run_id=invite.run_id, digest=invite.model_digest)
            await waiting.write(pb.DownloadRequest(open=opened))
            assert (await waiting.read()).total_bytes == 4 * 4 + 8
            async with it.admin() as admin, asyncio.timeout(BOUND_S):
                await admin.Revoke(pb.RevokeRequest(role="client", name="a"))
                assert (await refused(waiting.read()))[0] is grpc.StatusCode.UNAUTHENTICATED
                assert (await refused(fetched(own, invite)))[0] is grpc.StatusCode.UNAUTHENTICATED


@live
async def test_a_rank_that_is_revoked_ends_instead_of_dialling_for_ever(tmp_path):
    async with running(tmp_path / "state", **(ONE | SECURE)) as it:
        keeper = Keeper(equip(it.coordinator.config.state, tmp_path / "rank", aggregator(0)))
        async with MutualDialer(keeper).channel(it.address, COORDINATOR) as channel:
            rank = Rank(RankPlace(0, 1, "lo"), tmp_path / "rank", channel)
            membership = Membership(it.address, MutualDialer(keeper), keeper)
            serving = asyncio.ensure_future(aggregators._keep_connected(rank, "127.0.0.1:1", membership))
            while not any(row.address for row in it.coordinator.ranks.rows()):
                await asyncio.sleep(0.02)
            async with it.admin() as admin, asyncio.timeout(BOUND_S):
                await admin.Revoke(pb.RevokeRequest(role="aggregator", name="0"))
                with pytest.raises(MembershipEnded, match="aggregator 0 is revoked: this rank ends; it needs a new"):
                    await serving
            rank.stop()


@live
async def test_a_rank_that_cannot_ask_serves_nobody_it_does_not_know(tmp_path):
    async with running(tmp_path / "state", **(ONE | SECURE)) as it:
        async with with_secure_rank(it, tmp_path / "rank") as address, it.client("a") as a:
            await a.next("welcome")
            invite = pb.Invite(run_id="tiny-1", model_digest="0" * 64)
            async with to_rank(it, address, "a") as channel:
                await it.ports.clients.stop(0)
                code, detail = await refused(fetched(rpc.Stub(channel, "Aggregator"), invite))
                assert code is grpc.StatusCode.UNAVAILABLE
                assert "cannot be asked about it now" in detail
