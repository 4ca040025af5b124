"""The stream of a run over real gRPC: live, from an entry on, bounded for each caller, and refused with a reason."""

import asyncio
import json
import os
import sys

import grpc
import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.server.following.follow_process import PART_BYTES, Followers
from atoll.server.services.reading_service import ENTRY_MAX, FOLLOWED_MAX
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live, report

ENDLESS = "while True: sys.stdout.buffer.write(bytes(100_000))"


class Stream:
    """The items of one call, object by object."""

    def __init__(self, call):
        self.call, self._rest = call, b""

    async def __aiter__(self):
        async for reply in self.call:
            *lines, self._rest = (self._rest + reply.lines).split(b"\n")
            for line in lines:
                yield json.loads(line)

    async def until(self, is_last):
        """The items up to the first that is the last wanted."""
        found = []
        async with asyncio.timeout(BOUND_S):
            async for item in self:
                found.append(item)
                if is_last(item):
                    return found
        return found


def follow(admin, run="", after=None):
    return Stream(admin.Follow(pb.FollowRequest(run_id=run, after=after)))


def seqs(items):
    return [item["seq"] for item in items if item["kind"] == "event"]


async def code_of(stream):
    try:
        await stream.until(lambda _: True)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return None


@pytest.mark.usefixtures("cold_start")
@live
async def test_a_run_is_followed_live_and_from_where_a_broken_call_stopped(tmp_path):
    async with running(tmp_path / "state", rounds=2) as it, it.admin() as admin:
        async with it.client("a") as a, it.client("b") as b:
            stream = follow(admin)
            began = await stream.until(lambda item: item["kind"] == "began")
            assert began[-1]["run"]["run"] == it.run.run_id
            await asyncio.gather(report(a), report(b))
            await committed(it, 1)
            first = await stream.until(lambda item: "round 1: committed as version 1" in item.get("lines", ()))
            stream.call.cancel()
            place = first[-1]["seq"]
            assert [record["phase"] for record in first[-1]["records"]] == ["committed"]
            await asyncio.gather(report(a), report(b))
            rest = await follow(admin, it.run.run_id, place).until(lambda _: False)
            assert (rest[0]["kind"], rest[0]["seq"]) == ("began", place)
            assert seqs(rest) == list(range(place + 1, place + 1 + len(seqs(rest))))
            assert rest[-1]["run"]["state"] == "finished"
            whole = await follow(admin, it.run.run_id, 0).until(lambda _: False)
            assert seqs(whole) == list(range(1, seqs(rest)[-1] + 1))


@live
async def test_the_followed_runs_of_a_caller_are_few_and_a_stalled_one_costs_one_part(tmp_path, monkeypatch):
    command = (sys.executable, "-c", f"import sys\n{ENDLESS}")
    monkeypatch.setattr("atoll.server.following.follow_process.COMMAND", command)
    async with running(tmp_path / "state") as it, it.admin() as admin:
        request = pb.FollowRequest()
        calls = [admin.Follow(request) for _ in range(FOLLOWED_MAX)]
        for call in calls:
            assert len((await call.read()).lines) <= PART_BYTES
        with pytest.raises(grpc.aio.AioRpcError, match="has 2 followed runs open already: let one of them end"):
            await admin.Follow(request).read()
        assert await admin.Look(pb.LookRequest(view="runs")).read() is not None, "other readings have their own places"
        for call in calls:
            call.cancel()
        async with asyncio.timeout(BOUND_S):
            while True:
                again = admin.Follow(request)
                try:
                    await again.read()
                    break
                except grpc.aio.AioRpcError:  # the server has not noticed the end of the others yet
                    await asyncio.sleep(0.05)
        again.cancel()


@live
async def test_what_cannot_be_followed_is_refused_with_the_reason(tmp_path):
    async with running(tmp_path / "state") as it, it.admin() as admin:
        code, why = await code_of(follow(admin, "gone"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert why == f"there is no run 'gone' (known: {it.run.run_id})"
        code, why = await code_of(follow(admin, "x" * 300))
        assert (code, why) == (grpc.StatusCode.INVALID_ARGUMENT, "run_id has 300 characters; allowed: at most 200")
        code, why = await code_of(follow(admin, "", ENTRY_MAX + 1))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert why == f"after {ENTRY_MAX + 1}; allowed: at most {ENTRY_MAX}"


@live
async def test_a_follower_s_process_ends_with_its_reader(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    code = f"import os, sys, time; open({str(pid)!r}, 'w').write(str(os.getpid())); print('{{}}', flush=True)"
    command = (sys.executable, "-c", f"{code}; time.sleep(600)")
    monkeypatch.setattr("atoll.server.following.follow_process.COMMAND", command)
    items = Followers(tmp_path).follow("", None)
    text = b""
    while text != b"{}\n":
        text += await anext(items)
    await items.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
