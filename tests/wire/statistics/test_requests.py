"""Requests for statistics at a real coordinator, with clients of bare messages."""

import asyncio
import json
from contextlib import AsyncExitStack

import grpc
import pytest

from atoll.ground.strict_json import read_object
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.site_statistics import encode
from atoll.server.config.privacy import PrivacyConfig, without_statistics
from atoll.server.config.secure import NO_LAYOUT, WITHOUT_CERTIFICATES
from atoll.server.statistics.collection import SILENT
from atoll.training.statistics.parts import Histogram, SiteStatistics, count
from tests.wire.live_coordinator import running
from tests.wire.test_round import live
from tests.wire.test_runs import toml

ANSWER = SiteStatistics(
    {("train", "examples", ""): count(30), ("train", "labels", "target"): Histogram({"0": 10, "1": 20})}
)


def asking(admin, deadline_s=30.0, *overrides):
    request = pb.CollectStatisticsRequest(config_toml=toml("tiny"), overrides=overrides, deadline_s=deadline_s)
    return asyncio.ensure_future(admin.CollectStatistics(request))


PRIVACY = ("epsilon=8.0", "delta=1e-5", "clip_norm=1.0")


async def give(client, asked, data=None, **fields):
    fields = {"leave": "per_site"} | fields
    answer = pb.GiveStatistics(run_id=asked.run_id, number=asked.number, statistics=data or b"", **fields)
    await client.control.write(pb.ClientMessage(give_statistics=answer))


async def result(admin, number=0):
    parts = [part.json async for part in admin.Look(pb.LookRequest(view="statistics", number=number))]
    return json.loads(b"".join(parts))


@live
async def test_each_way_in_which_a_site_may_answer_is_in_the_result(tmp_path):
    names = ("good", "only_sums", "refuses", "broken", "leaves", "silent", "old")
    async with running(tmp_path / "state") as it, it.admin() as admin, AsyncExitStack() as stack:
        clients = {}
        for name in names:
            hello = {"software": "atoll 0.0.9"} if name == "old" else {"gives_statistics": True}
            clients[name] = await stack.enter_async_context(it.client(name, **hello))
            await clients[name].next("welcome")
        call = asking(admin, 4.0)
        asked = {name: await clients[name].next("ask_statistics") for name in names if name != "old"}
        one = asked["good"]
        assert (one.run_id, one.number, one.task, one.local) == (
            "tiny-statistics",
            1,
            "four_numbers_task:task",
            "{}",
        )
        assert 0 < one.time_left_s <= 4
        await give(clients["good"], one, encode(ANSWER))
        await give(clients["only_sums"], one, encode(ANSWER), leave="merged")
        await give(clients["refuses"], one, error="policy_refused: statistics: no", reason="policy_refused")
        await give(clients["broken"], one, b'{"parts": []}')
        await clients["leaves"].control.write(pb.ClientMessage(goodbye=pb.Goodbye()))
        assert (await call).number == 1
        found = await result(admin)
    assert found["answered"] == ["good", "only_sums"]
    assert found["refused"] == {
        "broken": "its answer is not valid: statistics: key 'withheld' is missing",
        "leaves": "lost: left",
        "old": "its agent cannot give statistics: update it (atoll 0.0.9)",
        "refuses": "policy_refused: statistics: no",
        "silent": SILENT,
    }
    assert found["merged"]["train"]["examples"] == 60
    assert found["sites"] == {}, "of two sites, one in sums alone"
    audit = "".join(path.read_text() for path in (tmp_path / "state" / "audit").glob("audit-*.jsonl"))
    assert '"action":"statistics.collect"' in audit
    assert "2 of 7 sites answered" in audit


@live
async def test_a_site_that_comes_back_is_asked_again_and_answers_count_once(tmp_path):
    async with running(tmp_path / "state") as it, it.admin() as admin, it.client("a", gives_statistics=True) as a:
        await a.next("welcome")
        call = asking(admin)
        await a.next("ask_statistics")
        async with it.client("a", session="s2", gives_statistics=True) as again:
            asked = await again.next("ask_statistics")
            await give(again, asked, encode(ANSWER))
            assert (await call).number == 1
            await give(again, asked, encode(ANSWER))  # nobody waits for it
            call = asking(admin)
            assert (await again.next("ask_statistics")).number == 2
            await give(again, asked, encode(ANSWER))  # of the first request
            await give(again, pb.AskStatistics(run_id=asked.run_id, number=2), error="no")
            assert (await call).number == 2
        assert (await result(admin, 1))["merged"]["train"]["examples"] == 30
        assert (await result(admin, 2))["refused"] == {"a": "no"}


@live
async def test_a_request_goes_on_without_its_caller_and_numbers_go_on_after_a_restart(tmp_path):
    state = tmp_path / "state"
    async with running(state) as it, it.admin() as admin, it.client("a", gives_statistics=True) as a:
        await a.next("welcome")
        call = asking(admin)
        asked = await a.next("ask_statistics")
        call.cancel()
        await give(a, asked, encode(ANSWER))
        while not (state / "statistics" / "000001.json").exists():
            await asyncio.sleep(0.05)
        assert (await result(admin))["number"] == 1
    async with running(state) as it, it.admin() as admin, it.client("a", gives_statistics=True) as a:
        await a.next("welcome")
        call = asking(admin)
        await give(a, await a.next("ask_statistics"), encode(ANSWER))
        assert (await call).number == 2


@live
async def test_what_is_impossible_is_refused_before_a_site_is_asked(tmp_path):
    async def refused(*overrides, deadline_s=5.0):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking(admin, deadline_s, *overrides)
        return caught.value.details()

    async with running(tmp_path / "state") as it, it.admin() as admin:
        assert "no connected agent allows the task 'four_numbers_task:task' (0 agents connected" in await refused()
        async with it.client("a", software="atoll 0.0.9") as a:
            await a.next("welcome")
            assert "can give statistics: update a (atoll 0.0.9)" in await refused()
            async with it.client("b", gives_statistics=True) as b:
                await b.next("welcome")
                assert "task.nope: unknown key" in await refused("task.nope=1")
                assert "quorum 9 is more than cohort_size" in await refused("round.quorum=9")
                assert "deadline 0 s; allowed" in await refused(deadline_s=0.0)
                secure = ("round.cohort_size=3", "secure.clip_norm=1.0", "secure.examples_max=9")
                assert await refused(*secure) == NO_LAYOUT
                assert await refused(*secure, "secure.statistics.labels.target=4") == WITHOUT_CERTIFICATES
                private = ('aggregation.weighting="uniform"', *(f"privacy.{key}" for key in PRIVACY))
                assert (await refused(*private)).startswith("privacy: the run would have [privacy], and statistics")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await result(admin)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_an_answer_is_canonical_json():
    assert read_object(encode(ANSWER), num_bytes_max=1000).keys() == {"parts", "withheld"}


@live
async def test_the_task_of_a_private_run_has_no_statistics_even_of_a_plan_without_privacy(tmp_path):
    async with running(tmp_path / "state") as it, it.admin() as admin, it.client("a", gives_statistics=True) as a:
        await a.next("welcome")
        privacy = PrivacyConfig(epsilon=8.0, delta=1e-5, clip_norm=1.0)  # the task has whole numbers: not by its TOML
        it.run.config = it.run.config.model_copy(update={"privacy": privacy})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking(admin)
        assert caught.value.details() == without_statistics("four_numbers_task:task", "tiny-1")
        await it.coordinator.stop_run("tiny-1", "enough")
        with pytest.raises(grpc.aio.AioRpcError, match="run tiny-1 of 'four_numbers_task:task' is private"):
            await asking(admin)
