"""A name that two processes use at once, as clients of bare messages see it; older ones send no ids."""

import asyncio

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from tests.wire.live_coordinator import running
from tests.wire.test_round import live, report

FIRST, SECOND = {"process": "p1", "folder": "f1"}, {"process": "p2", "folder": "f2"}
RESTART = {"process": "p2", "folder": "f1"}


@live
async def test_a_second_process_is_refused_with_the_address_of_the_first(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a", **FIRST) as a:
        await a.next("welcome")
        async with it.client("a", session="s2", **SECOND) as second:
            code, detail = await second.ending
            assert code is grpc.StatusCode.ALREADY_EXISTS
            assert "the process at 127.0.0.1:" in detail
            assert "has the place of client a and keeps it" in detail
        async with it.client("b"):
            _, verdict = await report(a)
            assert verdict.accepted


@pytest.mark.parametrize(
    ("older", "newer"),
    [(FIRST, FIRST), (FIRST, RESTART), ({}, {}), ({}, FIRST), (FIRST, {})],
    ids=["its own newer stream", "a restart", "older programs", "an older one first", "an older one last"],
)
def test_a_newer_stream_has_the_place_and_the_replaced_one_learns_its_address(tmp_path, older, newer):
    @live
    async def check(tmp_path):
        async with running(tmp_path / "state") as it, it.client("a", **older) as first:
            await first.next("welcome")
            async with it.client("a", session="s2", **newer) as a, it.client("b"):
                await a.next("welcome")
                code, detail = await first.ending
                assert code is grpc.StatusCode.ABORTED
                assert "replaced by a newer connection of a, from 127.0.0.1:" in detail, (
                    "older agents look for replaced"
                )
                assert (await report(a))[1].accepted

    check(tmp_path)


@live
async def test_ids_of_any_length_are_no_names(tmp_path):
    async with running(tmp_path / "state") as it, it.client("a", process="x" * 1000) as a:
        assert (await a.ending).code is grpc.StatusCode.INVALID_ARGUMENT


@live
async def test_the_process_with_the_place_is_told_of_the_other_one_if_its_agent_logs_notices(tmp_path):
    for takes_notices in (False, True):
        async with running(tmp_path / f"state{takes_notices}") as it:
            async with it.client("a", takes_notices=takes_notices, **FIRST) as a, it.client("b"):
                await a.next("welcome")
                for _ in range(2):
                    async with it.client("a", session="s2", **SECOND) as second:
                        await second.ending
                    await a.control.write(pb.ClientMessage(heartbeat=pb.Heartbeat()))
                    await asyncio.sleep(0.1)
                if takes_notices:
                    notice = await a.next("notice")
                    assert notice.text.startswith(
                        "two agents use this site's name: client a is used twice: the process"
                    )
                else:
                    await report(a)
