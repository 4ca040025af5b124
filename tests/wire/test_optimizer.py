"""A server optimizer in a real coordinator: its moments survive a restart, and their damage is found."""

import asyncio

import numpy as np
import pytest

from atoll.aggregation.optimizers import FedAdam, FedAvgM
from atoll.server.errors import OperatorError
from atoll.tensors.safetensors_file import read
from tests.waiting import BOUND_S
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live, report

MOMENTUM = {"rounds": 4, "optimizer__name": "fedavgm", "optimizer__lr": 0.5, "optimizer__momentum": 0.8}


async def one_round(it, value, version):
    async with it.client("a") as a, it.client("b") as b:
        await asyncio.gather(report(a, value), report(b, value))
        await committed(it, version)


def expected(optimizer, values):
    state = {slot: np.full(4, optimizer.init(slot)) for slot in optimizer.slots}
    model = np.zeros(4)
    for value in values:
        model = optimizer.apply(model, np.full(4, value), state).astype(np.float32).astype(np.float64)
        state = {slot: moment.astype(np.float32).astype(np.float64) for slot, moment in state.items()}
    return model.astype(np.float32)


@live
async def test_momentum_goes_on_after_a_restart(tmp_path):
    async with running(tmp_path / "state", **MOMENTUM) as it:
        await one_round(it, 3.0, 1)
    async with running(tmp_path / "state", **MOMENTUM) as it:
        await one_round(it, -1.0, 2)
        await one_round(it, 2.0, 3)
        store = it.run.reducer.store
        assert np.array_equal(read(store.version_path(3))["w"], expected(FedAvgM(0.5, 0.8), [3.0, -1.0, 2.0]))


@live
async def test_adam_has_two_moments_beside_each_version_and_they_go_with_it(tmp_path):
    rules = {"rounds": 4, "optimizer__name": "fedadam", "optimizer__lr": 0.1, "coordinator__keep_versions": 2}
    async with running(tmp_path / "state", **rules) as it:
        for number, value in enumerate([1.0, 2.0, -1.0], start=1):
            await one_round(it, value, number)
        store = it.run.reducer.store
        assert np.array_equal(read(store.version_path(3))["w"], expected(FedAdam(lr=0.1), [1.0, 2.0, -1.0]))
        async with asyncio.timeout(BOUND_S):
            while store.version_path(1).exists() or store.version_path(1, "first_moment").exists():
                await asyncio.sleep(0.05)
        folder = store.version_path(3).parent
        names = {path.name.split(".", 1)[1] for path in folder.iterdir() if path.name.startswith("000003")}
        moments = {f"{slot}.{end}" for slot in FedAdam().slots for end in ("safetensors", "manifest.json")}
        assert names == {"safetensors", "manifest.json"} | moments


@live
async def test_damaged_moments_are_found_at_the_start_and_named(tmp_path):
    async with running(tmp_path / "state", **MOMENTUM) as it:
        await one_round(it, 3.0, 1)
        path = it.run.reducer.store.version_path(1, "momentum")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(OperatorError, match=r"000001\.momentum\.safetensors is damaged \(tensor 'w'"):
        async with running(tmp_path / "state", **MOMENTUM):
            pass
