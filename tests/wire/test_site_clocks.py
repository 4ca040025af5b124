"""The clock of a site that is set while it is connected."""

import time

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live, report


@pytest.mark.parametrize("by", [3600.0, -3600.0])
def test_an_agent_whose_clock_jumps_is_told_and_its_round_waits_for_it(tmp_path, by):
    @live
    async def check(tmp_path):
        given = {"coordinator__insecure": False, "round__cohort_size": 1, "round__quorum": 1}
        async with running(tmp_path / "state", **given) as it:
            async with it.client("a", clock=time.time()) as a:
                await a.next("welcome")
                await a.next("invite")
                await a.control.write(pb.ClientMessage(heartbeat=pb.Heartbeat(clock=time.time() + 200.0)))
                await a.control.write(pb.ClientMessage(heartbeat=pb.Heartbeat(clock=time.time() + by)))
                code, detail = await a.ending
                side = "ahead of" if by > 0 else "behind"
                assert code is grpc.StatusCode.ABORTED
                assert f", 1 h 0 min {side} the coordinator's clock" in detail
            async with it.client("a", session="s2", clock=time.time() + by) as a:
                code, again = await a.ending
                assert code is grpc.StatusCode.FAILED_PRECONDITION
                assert f", 1 h 0 min {side} the coordinator's clock" in again
            async with it.client("a", session="s3", clock=time.time()) as a:
                assert (await report(a))[1].accepted
            await committed(it, 1)
            *_, first = it.run.machine.newest_first()
            assert (first.round_id, first.clients["a"].used_in) == (1, 1)

    check(tmp_path)
