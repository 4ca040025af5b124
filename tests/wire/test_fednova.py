"""FedNova in a real coordinator: what clients claim of their steps decides how far the model moves."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.protocol.settings import ConfigError
from atoll.server.errors import OperatorError
from atoll.tensors.safetensors_file import read
from tests.wire.live_coordinator import running
from tests.wire.test_round import committed, live

TASK = str(Path(__file__).parents[1] / "federation" / "quadratics_task.py") + ":task"
NOVA = {"task": TASK, "rounds": 2, "aggregation__algorithm": "fednova"}
TASKS = {"tasks": ("quadratics_task:task",)}


async def send(client, value, **claims):
    invite = await client.next("invite")
    assert invite.algorithm == "fednova"
    manifest, data = await client.train(invite, value=value, **claims)
    return await client.upload(manifest, data)


@live
async def test_trained_floats_are_normalized_and_buffers_are_not(tmp_path):
    async with running(tmp_path / "state", **NOVA) as it:
        async with it.client("a", **TASKS) as a, it.client("b", **TASKS) as b:
            claims = {"normalizer": 2.0, "effective_steps": 4.0}, {"normalizer": 8.0, "effective_steps": 10.0}
            answers = await asyncio.gather(
                send(a, 1.0, num_examples=30, **claims[0]), send(b, 4.0, num_examples=10, **claims[1])
            )
            assert all(verdict.accepted for verdict in answers)
            await committed(it, 1)
        model = read(it.run.reducer.store.version_path(1))
    tau = (3 * 4 + 1 * 10) / 4
    assert model["x"] == pytest.approx([10 + tau * (3 * (1 / 2) + 1 * (4 / 8)) / 4], rel=1e-6)
    assert model["seen"] == pytest.approx([(3 * 1 + 1 * 4) / 4])
    assert model["count"] == 2  # 1.75, rounded


@pytest.mark.parametrize("claim", [{"normalizer": 0.5}, {"normalizer": 2e9}, {"effective_steps": 0.0}])
@live
async def test_a_claim_out_of_range_is_refused_by_name(tmp_path, claim):
    async with running(tmp_path / "state", **NOVA) as it, it.client("a", **TASKS) as a, it.client("b", **TASKS):
        verdict = await send(a, 1.0, **claim)
        assert (verdict.accepted, verdict.reason) == (False, "bad_manifest")
        assert next(iter(claim)) in verdict.detail
        assert "a float in 1..1e+09" in verdict.detail


@live
async def test_ones_that_are_written_out_are_not_canonical(tmp_path):
    async with running(tmp_path / "state", **NOVA) as it, it.client("a", **TASKS) as a, it.client("b", **TASKS):
        manifest, data = await a.train(await a.next("invite"))
        document = json.loads(manifest.encode()) | {"normalizer": 1.0}
        verdict = await a.upload(json.dumps(document, sort_keys=True, separators=(",", ":")).encode(), data)
        assert (verdict.accepted, verdict.reason) == (False, "bad_manifest")
        assert "not canonical" in verdict.detail
        assert (await a.upload(replace(manifest, normalizer=1.0), data)).accepted


@live
async def test_a_task_without_the_training_loop_is_refused_before_the_run_begins(tmp_path):
    with pytest.raises((OperatorError, ConfigError), match=r"fednova.*a custom training"):
        async with running(tmp_path / "state", aggregation__algorithm="fednova"):
            raise AssertionError("it began")
