"""The user's own sampler, and ours, as a coordinator uses them."""

import asyncio

from atoll.protocol import atoll_pb2 as pb
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live

OWN = """
def last(candidates, count, rng):
    return [c.client_id for c in candidates[-count:]]

def broken(candidates, count, rng):
    raise ValueError("no moon tonight")

def greedy(candidates, count, rng):
    return ["nobody"]
"""


async def invited(it, tmp_path, names="abcd"):
    """Return the cohort of round 1 when these clients are connected."""
    clients = []
    for name in names:
        context = it.client(name, session=name)
        clients.append((context, await context.__aenter__()))
    while it.run.machine.round is None or it.run.machine.round.phase == "selecting":
        await asyncio.sleep(0.01)
    cohort = sorted(it.run.machine.round.record.clients)
    for context, _ in clients:
        await context.__aexit__(None, None, None)
    return cohort


def own_sampler(tmp_path, name):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return f"{path}:{name}"


@live
async def test_users_own_sampler_chooses_the_cohort(tmp_path):
    settings = {"cohort__sampler": own_sampler(tmp_path, "last"), "round__min_available": 4}
    async with running(tmp_path / "state", **settings) as it:
        assert await invited(it, tmp_path) == ["c", "d"]


@live
async def test_sampler_that_raises_or_names_a_stranger_costs_the_round_with_its_words(tmp_path):
    for name, words in (("broken", "no moon tonight"), ("greedy", "nobody")):
        settings = {"cohort__sampler": own_sampler(tmp_path, name), "round__retry": 0}
        async with running(tmp_path / name, **settings) as it, it.client("a") as a, it.client("b"):
            ended = await a.next("run_ended")
            assert ended.state == "failed"
            assert "sampler_failed" in ended.cause
            assert words in ended.cause


@live
async def test_seed_and_population_alone_decide_the_cohort_also_after_a_restart(tmp_path):
    cohorts = []
    for run, names in enumerate(("abcde", "edcba")):
        async with running(tmp_path / str(run), round__min_available=5, seed=11) as it:
            cohorts.append(await invited(it, tmp_path, names))
    async with running(tmp_path / "again", round__min_available=5, seed=11) as it:
        async with it.client("a"), it.client("b"):
            pass
    async with running(tmp_path / "again", round__min_available=5, seed=11) as it:
        cohorts.append(await invited(it, tmp_path, "cabed"))
    assert cohorts[0] == cohorts[1] == cohorts[2]
    async with running(tmp_path / "other", round__min_available=5, seed=12) as it:
        other = await invited(it, tmp_path, "abcde")
    assert len(other) == 2


@live
async def test_losses_that_clients_tell_are_remembered_also_after_a_restart(tmp_path):
    choice = {"cohort__sampler": "power_of_choice", "cohort__candidates": 9}
    settings = {**choice, "round__cohort_size": 3, "round__quorum": 3, "round__min_available": 3, "rounds": 9}
    losses = {"a": 1.0, "b": 3.0, "c": 2.0}
    async with running(tmp_path / "state", **settings) as it:
        async with it.client("a") as a, it.client("b") as b, it.client("c") as c:
            for client in (a, b, c):
                manifest, data = await client.train(await client.next("invite"))
                told = {"loss": pb.Statistics(values=[10 * losses[client.name], 10.0])}
                assert (await client.upload(manifest, data, statistics=told)).accepted
            await committed(it, 1)
        members = it.run.machine.ledger.membership.members
        assert {name: members[name].loss for name in losses} == losses
    async with running(tmp_path / "state", **settings) as it:
        found = it.run.machine.ledger.membership.members
        assert {name: found[name].loss for name in losses} == losses
        assert {member.times_chosen for member in found.values()} <= {1, 2}
