"""Files on which the journal relies and that are gone or damaged: what a start says, what `--accept-losses` does."""

import asyncio
import json
import shutil

import numpy as np
import pytest

from atoll.server.errors import OperatorError
from atoll.server.journal.placement import state_of_rank
from atoll.server.required.losses import WAY_OUT, losses_in
from atoll.server.views.history import History
from atoll.tensors.safetensors_file import read
from tests.cli.invoking import refused
from tests.parts.test_wire import invited
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_ranks import ONE, with_rank
from tests.wire.test_round import committed, live, report

WITHOUT_RETRY = {"round__retry": 0, "rounds": 2}


@pytest.fixture(autouse=True)
def large(monkeypatch):
    """Give each update a file of its own, as one of more than 16 KiB has."""
    monkeypatch.setattr("atoll.server.files.incoming.SMALL_BYTES", 0)


def updates(state):
    return sorted((state / "runs" / "tiny-1" / "updates").glob("*.bin"))


def version(state, name):
    return state / "runs" / "tiny-1" / "versions" / name


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


async def starts(state, **settings):
    async with running(state, **settings):
        pass


def audited(state):
    lines = [line for path in sorted((state / "audit").glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [found for line in lines if "loss.accept" in line for found in [json.loads(line)]]


@live
async def test_a_missing_update_is_told_before_anything_starts_and_ends_as_lost_when_that_is_accepted(tmp_path):
    state = tmp_path / "state"
    async with running(state, **WITHOUT_RETRY) as it, it.client("a") as a, it.client("b"):
        assert (await report(a))[1].accepted
    [file] = updates(state)
    file.unlink()
    with pytest.raises(OperatorError) as fault:
        await starts(state)
    assert str(fault.value).splitlines() == [
        f"run tiny-1: {file} is missing: it is the accepted update of a in round 1, which continues if its quorum "
        "allows",
        WAY_OUT,
    ]
    assert audited(state) == []
    async with running(state, accept_losses=True) as it, it.client("a") as a, it.client("b") as b:
        [found] = audited(state)
        assert found["object"] == f"tiny-1 {file.name}"
        await asyncio.gather(report(a, 1.0), report(b, 3.0))  # in the next round
        await committed(it, 1)
        np.testing.assert_array_equal(read(it.run.reducer.version(1).path)["w"], np.full(4, 2.0, np.float32))
    first, *_ = History(state).rounds("tiny-1")
    assert (first.abandon_reason, first.retry) == ("files_lost", 0)
    row = first.clients["a"]
    assert (row.fate, row.reason) == ("failed", "update_lost")
    assert f"{file.name} is missing" in row.unused_because
    await starts(state)  # and it is not told again


@live
async def test_a_client_that_still_has_the_lost_update_sends_it_again(tmp_path):
    state = tmp_path / "state"
    async with running(state, round__quorum=1, **WITHOUT_RETRY) as it, it.client("a") as a, it.client("b"):
        manifest, data = await a.train(await a.next("invite"), value=1.0)
        assert (await a.upload(manifest, data)).accepted
    updates(state)[0].unlink()
    async with running(state, accept_losses=True) as it, it.client("a") as a, it.client("b") as b:
        assert (await a.upload(manifest, data)).accepted
        assert (await report(b, 3.0))[1].accepted
        await committed(it, 1)
        np.testing.assert_array_equal(read(it.run.reducer.version(1).path)["w"], np.full(4, 2.0, np.float32))
    first, *_ = History(state).rounds("tiny-1")
    assert first.clients["a"].used_in == 1


@live
async def test_an_update_that_was_damaged_and_has_its_size_ends_alone_before_the_fold(tmp_path):
    state = tmp_path / "state"
    settings = WITHOUT_RETRY | {"round__quorum": 1}
    async with running(state, **settings) as it, it.client("a") as a, it.client("b"):
        assert (await report(a))[1].accepted
    damage(updates(state)[0])
    [loss] = losses_in(state)
    assert loss.fault == "is damaged (tensor 'w' does not have the SHA-256 of its manifest)"
    async with running(state) as it, it.client("b") as b:
        assert (await report(b, 5.0))[1].accepted
        await committed(it, 1)
        np.testing.assert_array_equal(read(it.run.reducer.version(1).path)["w"], np.full(4, 5.0, np.float32))
    first, *_ = History(state).rounds("tiny-1")
    assert (first.clients["a"].reason, first.clients["b"].used_in) == ("update_lost", 1)


@live
async def test_without_an_old_version_an_asynchronous_run_goes_on_and_tells_who_trains_from_it_to_stop(tmp_path):
    state, fedasync = tmp_path / "state", {"round__mode": "fedasync", "round__concurrency": 2, "rounds": 5}
    async with running(state, **fedasync) as it, it.client("a") as a:
        await report(a)
        await committed(it, 1)
        async with it.client("b") as b:
            assert (await b.next("invite")).base_version == 1
            await report(a)
            await committed(it, 2)
    gone = [version(state, f"000001.{kind}") for kind in ("manifest.json", "safetensors")]
    for path in gone:
        path.unlink()
    with pytest.raises(OperatorError, match=r"it is version 1: what was trained from it, or waits for its evaluation"):
        await starts(state, **fedasync)
    async with running(state, accept_losses=True, **fedasync) as it, it.client("b") as b:
        assert (await b.next("invite")).base_version == 2
        assert it.run.machine.ledger.lost == [1]


@live
async def one_round(state, **settings):
    async with running(state, **settings) as it, it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a), report(b))
        await committed(it, 1)


@pytest.mark.parametrize(
    "names",
    [
        ["000000.safetensors"],
        ["000001.safetensors"],
        ["000001.manifest.json", "000001.safetensors"],
        ["000001.momentum.safetensors", "000001.momentum.manifest.json"],
    ],
)
def test_a_run_without_its_model_is_told_with_all_that_is_missing_and_fails_when_that_is_accepted(tmp_path, names):
    state = tmp_path / "state"
    one_round(state, optimizer__name="fedavgm")
    for name in names:
        version(state, name).unlink()
    with pytest.raises(OperatorError) as fault:
        asyncio.run(starts(state))
    *lines, way_out = str(fault.value).splitlines()
    assert way_out == WAY_OUT
    for name in names:
        assert any(f"{version(state, name)} is missing: it is " in line and "the run fails" in line for line in lines)
    assert "the run fails" in refused("coordinator", "--state", state, "--insecure", "--check")[0]

    async def accepted():
        async with running(state, accept_losses=True, optimizer__name="fedavgm") as it:
            assert it.run.machine.ledger.state == "failed"
            assert f"{names[0]} is missing" in it.run.machine.ledger.cause
            with pytest.raises(OperatorError, match="put these files back"):
                await it.coordinator.resume_run("tiny-1")

    asyncio.run(asyncio.wait_for(accepted(), BOUND_S))
    asyncio.run(starts(state, optimizer__name="fedavgm"))


def test_a_damaged_slot_of_the_server_optimizer_and_a_cut_version_are_told(tmp_path):
    state = tmp_path / "state"
    one_round(state, optimizer__name="fedavgm")
    damage(version(state, "000001.momentum.safetensors"))
    with version(state, "000000.safetensors").open("r+b") as file:
        file.truncate(40)
    lines = refused("coordinator", "--state", state, "--insecure", "--set", "coordinator.listen=127.0.0.1:0")
    assert "000000.safetensors is damaged (" in lines[0]
    assert "000001.momentum.safetensors is damaged (tensor " in lines[1]


def test_a_version_of_another_moment_is_told_by_its_manifest(tmp_path):
    state = tmp_path / "state"
    one_round(state)
    shutil.copy(version(state, "000000.manifest.json"), version(state, "000001.manifest.json"))
    lines = refused("coordinator", "--state", state, "--insecure", "--set", "coordinator.listen=127.0.0.1:0")
    assert "000001.manifest.json is not the manifest of version 1 in the journal: it is the global model" in lines[0]


@live
async def test_a_cut_update_is_told_by_its_size(tmp_path):
    state = tmp_path / "state"
    async with running(state, **WITHOUT_RETRY) as it, it.client("a") as a, it.client("b"):
        assert (await report(a))[1].accepted
    [file] = updates(state)
    whole = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(whole - 1)
    with pytest.raises(OperatorError, match=f"has {whole - 1} bytes, not {whole}: it is the accepted update of a"):
        await starts(state)


@live
async def test_a_missing_part_is_told_also_at_an_aggregation_rank_of_this_machine(tmp_path):
    state = tmp_path / "state"
    async with running(state, **WITHOUT_RETRY) as it, it.client("b"), invited(it, num_parts=2) as a:
        replies = [await a.send(index) for index in range(2)]
        assert replies[-1].verdict.accepted
    [gone] = (state / "runs" / "tiny-1" / "updates").glob("*.0001.bin")
    gone.unlink()
    with pytest.raises(OperatorError, match=rf"{gone} is missing: it is the accepted update of a in round 1"):
        await starts(state)


@live
async def test_an_update_that_is_missing_at_a_rank_in_the_directory_is_told(tmp_path):
    state = tmp_path / "state"
    folder = state_of_rank(state, 0, 1)
    async with running(state, **ONE, **WITHOUT_RETRY) as it:
        folder.parent.mkdir(parents=True, exist_ok=True)
        async with with_rank(it, folder) as at_rank, at_rank.client("a") as a, at_rank.client("b"):
            assert (await report(a))[1].accepted
    [gone] = (folder / "runs" / "tiny-1" / "updates").glob("*.bin")
    gone.unlink()
    with pytest.raises(OperatorError, match=rf"{gone} is missing: it is the accepted update of a in round 1"):
        await starts(state, **ONE)


@live
async def test_an_update_that_is_gone_at_a_rank_at_its_fold_ends_alone(tmp_path):
    state, folder = tmp_path / "state", tmp_path / "rank"
    async with running(state, **ONE, **WITHOUT_RETRY, round__quorum=1) as it, with_rank(it, folder) as at_rank:
        async with at_rank.client("a") as a, at_rank.client("b") as b:
            assert (await report(a))[1].accepted
            [gone] = (folder / "runs" / "tiny-1" / "updates").glob("*.bin")
            gone.unlink()
            assert (await report(b, 5.0))[1].accepted
            await committed(it, 1)
    first, *_ = History(state).rounds("tiny-1")
    assert (first.clients["a"].reason, first.clients["b"].used_in) == ("update_lost", 1)
    assert f"rank 0: UpdateDamaged: {gone}" in first.clients["a"].detail


def test_an_ended_run_lacks_files_and_stops_nothing(tmp_path, caplog):
    state = tmp_path / "state"
    one_round(state, rounds=1)
    version(state, "000001.safetensors").unlink()
    [loss] = losses_in(state)
    assert loss.cost == "the run is finished, and can be neither resumed nor exported from it"
    asyncio.run(starts(state))
    assert "000001.safetensors is missing" in caplog.text


def test_what_is_whole_has_no_losses_while_its_coordinator_runs(tmp_path):
    @live
    async def check():
        async with running(tmp_path / "state", rounds=9) as it, it.client("a") as a, it.client("b") as b:
            for number in range(4):
                await asyncio.gather(report(a), report(b))
                await committed(it, number + 1)
                assert losses_in(tmp_path / "state") == []

    check()
