"""What a real coordinator and a real rank let whom do."""

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from tests.wire.live import running, update_of
from tests.wire.test_ranks import ONE, it_manifest, with_rank
from tests.wire.test_round import committed, live, report


async def refused(answer):
    """The status of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value.code(), caught.value.details()


@live
async def test_a_rank_is_told_of_its_own_updates_alone_and_gives_reasons_that_there_are(tmp_path):
    async with running(tmp_path / "state", **ONE) as it, with_rank(it, tmp_path / "rank") as ranked:
        async with (
            ranked.client("a") as a,
            ranked.client("b") as b,
            grpc.aio.insecure_channel(it.address) as channel,
        ):
            invite, _ = await report(a)
            aggregation, digests = rpc.AggregationStub(channel), [bytes.fromhex(d) for d in _accepted(it, invite)]

            async def told(rank, digests):
                request = pb.UpdatesRequest(run_id=invite.run_id, digests=digests, rank=rank)
                return [update.digest async for update in aggregation.GetUpdates(request)]

            assert await told(0, digests) == digests
            code, detail = await refused(told(1, digests))
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert detail.endswith("does not lie at rank 1, which asks")
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
        code, detail = await refused(rpc.AggregationStub(channel).Admit(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "'../x'" in detail
