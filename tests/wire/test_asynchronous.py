"""Asynchronous runs over real gRPC, in a stated order of arrival, against the papers' formulas in float64."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from atoll.tensors.safetensors_file import read
from tests.wire.live_coordinator import running
from tests.wire.test_review import until
from tests.wire.test_round import committed, live

FEDBUFF = {"round__mode": "fedbuff", "round__buffer_size": 2, "round__concurrency": 3}
FEDASYNC = {"round__mode": "fedasync", "round__alpha": 0.6, "round__concurrency": 3}
RULES = {"round__cohort_size": 2, "rounds": 20}


@asynccontextmanager
async def asynchronous(tmp_path, rules, names="abc"):
    """A run and its clients, each with its first invitation."""
    async with AsyncExitStack() as stack:
        it = await stack.enter_async_context(running(tmp_path / "state", **(RULES | rules)))
        clients = {name: await stack.enter_async_context(it.client(name)) for name in names}
        yield it, {name: Site(client, await client.next("invite")) for name, client in clients.items()}


class Site:
    """A client that trains from its last invitation."""

    def __init__(self, client, invite):
        self.client, self.invite = client, invite

    async def report(self, value, **claims):
        """Hand in an update of all `value`; it must be accepted."""
        verdict = await self.hand_in(value, **claims)
        assert verdict.accepted, verdict

    async def hand_in(self, value, **claims):
        manifest, data = await self.client.train(self.invite, value=value, **claims)
        return await self.client.upload(manifest, data)

    async def invited(self, version):
        """The next invitation, which is for this version."""
        self.invite = await self.client.next("invite")
        assert self.invite.base_version == version, (self.client.name, self.invite.base_version)


def model(it, version):
    return read(it.run.reducer.store.version_path(version))


def values(it, *versions):
    return [model(it, version)["w"][0].item() for version in versions]


async def buffered(it, sites):
    """Three commits of FedBuff; `c` is slow, and trains on while the others' updates are committed."""
    a, b, c = (sites[name] for name in "abc")
    await a.report(1.0, num_examples=1000)
    await b.report(2.0, num_examples=1)
    await committed(it, 1)
    await asyncio.gather(a.invited(1), b.invited(1))
    await a.report(4.0)
    await c.report(8.0)
    await committed(it, 2)
    await asyncio.gather(a.invited(2), c.invited(2))
    await b.report(-3.0)
    await a.report(0.5)
    await committed(it, 3)


def discounted(staleness, exponent=0.5):
    return (1 + staleness) ** -exponent


@live
async def test_fedbuff_adds_the_discounted_updates_over_their_number(tmp_path):
    async with asynchronous(tmp_path, FEDBUFF) as (it, sites):
        await buffered(it, sites)
        one = (1.0 + 2.0) / 2  # uniform, whatever the clients say of their data
        two = one + (4.0 + discounted(1) * 8.0) / 2  # divided by K, not by the sum of the discounts
        three = two + (discounted(1) * -3.0 + 0.5) / 2
        assert values(it, 1, 2, 3) == pytest.approx([one, two, three], rel=1e-6)
        rows = {(r.client_id, r.round_id): (r.staleness, r.scale) for r in it.run.machine.ledger.past[2].buffer}
        assert rows == {("a", 2): (0, 1.0), ("c", 1): (1, pytest.approx(2**-0.5))}
        assert it.run.machine.ledger.past[1].clients["c"].used_in == 2


@live
async def test_fedbuff_goes_on_after_a_restart_with_the_same_bits(tmp_path):
    async with asynchronous(tmp_path / "whole", FEDBUFF) as (it, sites):
        await buffered(it, sites)
        whole = [model(it, version) for version in (1, 2, 3)]
    state = tmp_path / "halves"
    async with asynchronous(state, FEDBUFF) as (it, sites):
        await sites["a"].report(1.0)
        await sites["b"].report(2.0)
        await committed(it, 1)
        await asyncio.gather(sites["a"].invited(1), sites["b"].invited(1))
        await sites["a"].report(4.0)
    async with asynchronous(state, FEDBUFF, names="bc") as (it, sites):
        assert {n: s.invite.base_version for n, s in sites.items()} == {"b": 1, "c": 0}, "they go on where they were"
        async with it.client("a"):
            await sites["c"].report(8.0)
            await committed(it, 2)
            np.testing.assert_array_equal(model(it, 2)["w"], whole[1]["w"])
            np.testing.assert_array_equal(model(it, 2)["count"], whole[1]["count"])


def mixed(model, alpha, staleness, base, update):
    """Xie et al., Algorithm 1."""
    share = alpha * discounted(staleness)
    return (1 - share) * model + share * (base + update)


@live
async def test_fedasync_mixes_each_client_s_model_from_the_version_that_it_trained_on(tmp_path):
    async with asynchronous(tmp_path, FEDASYNC) as (it, sites):
        a, b, c = (sites[name] for name in "abc")
        x = [0.0]
        await a.report(2.0)
        x.append(mixed(x[-1], 0.6, 0, x[0], 2.0))
        await committed(it, 1)
        await a.invited(1)
        await b.report(4.0)
        x.append(mixed(x[-1], 0.6, 1, x[0], 4.0))
        await committed(it, 2)
        await c.report(-6.0)
        x.append(mixed(x[-1], 0.6, 2, x[0], -6.0))
        await committed(it, 3)
        await a.report(1.0)
        x.append(mixed(x[-1], 0.6, 2, x[1], 1.0))
        await committed(it, 4)
        assert values(it, 1, 2, 3, 4) == pytest.approx(x[1:], rel=1e-6)
        assert model(it, 4)["count"] == 2 + 4 - 6 + 1, "integers follow their updates"


@live
async def test_fedbuff_of_everyone_at_one_speed_is_fedavg_with_uniform_weights(tmp_path):
    three = [0.1, -0.7, 3.3]

    async def models(folder, rules):
        async with asynchronous(tmp_path / folder, rules) as (it, sites):
            for version in (1, 2):
                for site, value in zip(sites.values(), three, strict=True):
                    await site.report(value * version)
                await committed(it, version)
                if version == 1:
                    await asyncio.gather(*(site.invited(1) for site in sites.values()))
            return [model(it, version) for version in (1, 2)]

    fedbuff = await models("fedbuff", FEDBUFF | {"round__buffer_size": 3})
    fedavg = await models("fedavg", {"round__cohort_size": 3})
    for ours, theirs in zip(fedbuff, fedavg, strict=True):
        np.testing.assert_array_equal(ours["w"], theirs["w"])
        np.testing.assert_array_equal(ours["count"], theirs["count"])


@live
async def test_fedbuff_of_one_undiscounted_is_fedasync_of_updates(tmp_path):
    rules = FEDBUFF | {"round__buffer_size": 1, "round__staleness": "constant", "round__concurrency": 2}
    async with asynchronous(tmp_path, rules, names="ab") as (it, sites):
        await sites["a"].report(2.5)
        await committed(it, 1)
        await sites["b"].report(0.25)
        await committed(it, 2)
        assert values(it, 1, 2) == [2.5, 2.75]
    async with asynchronous(tmp_path / "async", FEDASYNC | {"round__alpha": 1.0}, names="a") as (it, sites):
        await sites["a"].report(2.5)
        await committed(it, 1)
        await sites["a"].invited(1)
        await sites["a"].report(0.25)
        await committed(it, 2)
        assert values(it, 1, 2) == [2.5, 2.75], "alone and with alpha 1 it is local training"


@live
async def test_an_update_that_became_too_stale_is_told_so_before_its_bytes_are_sent(tmp_path):
    rules = FEDASYNC | {"round__max_staleness": 1, "coordinator__keep_versions": 1}
    async with asynchronous(tmp_path, rules, names="ab") as (it, sites):
        a, b = sites["a"], sites["b"]
        manifest, data = await b.client.train(b.invite)
        for version in (1, 2):
            await a.report(1.0)
            await committed(it, version)
            await a.invited(version)
        release = await b.client.next("release")
        assert (release.reason, release.submit) == ("too_stale", False)
        verdict = await b.client.upload(manifest, data)
        assert (verdict.accepted, verdict.reason) == (False, "too_stale")
        assert verdict.detail == "2 versions old, max_staleness is 1"
        assert getattr(b.client, "resumed_at", []) == [], "not one byte was asked for"
        row = it.run.machine.ledger.past[1].clients["b"]
        assert (row.fate, row.reason) == ("late", "too_stale")


@live
async def test_versions_that_a_stale_update_may_name_stay_on_disk(tmp_path):
    rules = FEDASYNC | {"round__max_staleness": 3, "coordinator__keep_versions": 1}
    async with asynchronous(tmp_path, rules, names="ab") as (it, sites):
        for version in range(1, 7):
            await sites["a"].report(1.0)
            await committed(it, version)
            await sites["a"].invited(version)
        await until(lambda: it.run.reducer.store.versions() == [0, 3, 4, 5, 6])


@live
async def test_a_client_that_is_out_of_its_time_is_replaced_and_may_hand_in_what_it_has(tmp_path):
    rules = FEDBUFF | {"round__concurrency": 1, "round__deadline": 0.6}
    async with running(tmp_path / "state", **(RULES | rules)) as it:
        async with it.client("a") as client, it.client("b") as other:
            a = Site(client, await client.next("invite"))
            release = await client.next("release")
            assert (release.reason, release.submit) == ("out_of_time", True)
            b = Site(other, await other.next("invite"))
            await b.report(1.0)
            await a.report(3.0, work=0.5)
            await committed(it, 1)
            assert values(it, 1) == [2.0]


@live
async def test_stopping_a_run_makes_its_last_buffer_a_version_when_it_has_the_quorum(tmp_path):
    async with asynchronous(tmp_path, FEDBUFF | {"round__quorum": 1}) as (it, sites):
        await sites["a"].report(5.0)
        await it.coordinator.stop_run(it.run.run_id, "enough")
        ended = await sites["b"].client.next("run_ended")
        assert ended.state == "stopped"
        assert values(it, 1) == [5.0]
        assert it.run.machine.ledger.past[1].close_reason == "flushed"


@live
async def test_stopping_a_run_below_the_quorum_says_what_became_of_its_updates(tmp_path):
    async with asynchronous(tmp_path, FEDBUFF) as (it, sites):
        await sites["a"].report(5.0)
        await it.coordinator.stop_run(it.run.run_id, "enough")
        row = it.run.machine.ledger.past[1].clients["a"]
        assert (row.fate, row.used_in) == ("reported", None)
        assert row.unused_because == "the run was stopped below the quorum"
