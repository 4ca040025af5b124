"""Every field of the straggler policy over real gRPC, with the numbers worked out by hand."""

import asyncio
import time

import numpy as np
import pytest

from atoll.tensors.safetensors_file import read
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live, report


def model(it, version):
    return read(it.run.reducer.version(version).path)["w"].astype(np.float64)


@live
async def test_late_update_counts_in_the_next_round_discounted_by_its_staleness(tmp_path):
    settings = {
        "round__quorum": 1,
        "round__linger": 0,
        "round__late": "next_round",
        "round__staleness_exponent": 0.5,
    }
    async with running(tmp_path / "state", **settings) as it, it.client("a") as a, it.client("b") as b:
        manifest, data = await a.train(await a.next("invite"), value=8.0, num_examples=10)
        await report(b, 1.0, num_examples=10)
        await committed(it, 1)
        verdict = await a.upload(manifest, data)
        assert (verdict.accepted, verdict.detail) == (True, "late")
        await report(b, 2.0, num_examples=10)
        await committed(it, 2)
        discount = 2**-0.5
        expected = 1.0 + (10 * discount * 8.0 + 10 * 2.0) / (10 * discount + 10)
        np.testing.assert_allclose(model(it, 2), np.full(4, expected), rtol=1e-6)
        past = it.run.machine.ledger.past
        assert (past[1].clients["a"].fate, past[1].clients["a"].used_in) == ("carried", 2)


@live
async def test_late_update_beyond_max_staleness_is_too_stale(tmp_path):
    settings = {"round__quorum": 1, "round__linger": 0, "round__late": "next_round", "round__max_staleness": 0}
    async with running(tmp_path / "state", rounds=5, **settings) as it, it.client("a") as a, it.client("b") as b:
        manifest, data = await a.train(await a.next("invite"))
        await report(b)
        await committed(it, 1)
        verdict = await a.upload(manifest, data)
        assert (verdict.accepted, verdict.reason) == (False, "too_stale")


@pytest.mark.parametrize(("rule", "weight"), [("accept", 10), ("scaled", 10 * 0.25)])
def test_partial_work_counts_in_full_or_by_its_share(tmp_path, rule, weight):
    @live
    async def check(tmp_path):
        async with running(tmp_path / "state", round__partial_work=rule) as it:
            async with it.client("a") as a, it.client("b") as b:
                await asyncio.gather(report(a, 4.0, work=0.25), report(b, 1.0))
                await committed(it, 1)
                np.testing.assert_allclose(model(it, 1), np.full(4, (weight * 4 + 10 * 1) / (weight + 10)), rtol=1e-6)

    check(tmp_path)


@live
async def test_partial_work_is_refused_where_the_policy_says_so(tmp_path):
    async with running(tmp_path / "state", round__partial_work="refuse") as it:
        async with it.client("a") as a, it.client("b"):
            _, verdict = await report(a, work=0.5)
            assert (verdict.accepted, verdict.reason) == (False, "partial_work")


@live
async def test_linger_closes_the_round_some_time_after_the_quorum(tmp_path):
    async with running(tmp_path / "state", round__quorum=1, round__linger=0.3, round__deadline=60) as it:
        async with it.client("a") as a, it.client("b") as b:
            await report(a)
            release = await b.next("release")
            assert release.reason == "round_closed"
            await committed(it, 1)
            record = it.run.machine.ledger.past[1]
            assert record.close_reason == "linger_over"
            assert record.closed_at - record.clients["a"].fate_at >= 0.3


@live
async def test_upload_that_was_begun_before_the_deadline_has_the_grace_period_to_complete(tmp_path):
    settings = {"round__quorum": 1, "round__deadline": 2.0, "round__grace": BOUND_S}
    async with running(tmp_path / "state", **settings) as it, it.client("a") as a, it.client("b"):
        manifest, data = await a.train(await a.next("invite"))
        await a.upload(manifest, data, cut_at=8, chunk=8)
        await asyncio.sleep(2.2)  # counted from after the opening of the round
        assert it.run.machine.round.phase == "collecting"
        assert (await a.upload(manifest, data)).accepted
        await committed(it, 1)
        assert it.run.machine.ledger.past[1].close_reason == "deadline"


@live
async def test_adaptive_deadline_follows_the_measured_times(tmp_path):
    settings = {
        "round__deadline": "adaptive",
        "round__adaptive_margin": 2.0,
        "round__deadline_min": 0.5,
        "round__deadline_max": 300.0,
    }
    async with running(tmp_path / "state", **settings) as it, it.client("a") as a, it.client("b") as b:
        begun, invite = time.monotonic(), await a.next("invite")
        assert 200 < invite.time_left_s <= 300, "nothing is measured yet"
        for client, seconds in ((a, 10.0), (b, 20.0)):
            manifest, data = await client.train(invite if client is a else await b.next("invite"))
            assert (await client.upload(manifest, data, train_seconds=seconds, download_seconds=1.0)).accepted
        longest = time.monotonic() - begun
        second = await a.next("invite")
        assert second.round_id == 2
        record = it.run.machine.round.record
        assert 42.0 <= record.deadline - record.opened_at <= 42.0 + 2.0 * longest, "2.0 x (1 + 20 + its upload)"
        assert second.time_left_s <= record.deadline - record.opened_at


@live
async def test_open_round_is_extended_by_the_outage_up_to_outage_max(tmp_path):
    async with running(tmp_path / "state", round__outage_max=1.0, round__deadline=60) as it:
        async with it.client("a") as a, it.client("b"):
            await a.next("invite")
            deadline = it.run.machine.round.record.deadline
    await asyncio.sleep(1.5)
    async with running(tmp_path / "state") as it:
        record = it.run.machine.round.record
        assert record.outages[0].seconds >= 1.4
        assert record.outages[0].extended == 1.0
        assert record.deadline == pytest.approx(deadline + 1.0, rel=0, abs=1e-3)
