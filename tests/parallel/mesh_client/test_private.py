"""Private steps of a mesh client: those of an agent with one process, with the noise of their place in the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.parallel.mesh_client.bench import MeshBench
from atoll.parallel.world import read_world
from atoll.task.errors import TaskBroken
from tests.parallel.mesh_client import clients, tasks
from tests.parallel.mesh_client.clients import in_one_process, on_a_mesh, plan_of, write_version
from tests.parallel.ranks import call_on_ranks

KEY = bytes(range(32)).hex()
TERMS = {
    "privacy.unit": "example",
    "privacy.sample_rate": 0.2,
    "privacy.clip_norm": 0.5,
    "privacy.noise_multiplier": 0.8,
    "privacy.epsilon": 50.0,
    "privacy.delta": 1e-4,
    "privacy.participations_max": 3,
}
FIELDS: dict[str, Any] = {"local": {**TERMS, "max_steps": 4}, "noise": KEY}


def close(one: dict[str, Any], other: dict[str, Any], within: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=0, atol=within, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dp_replicate": 2}, id="DDP"),
        pytest.param({"dp_shard": 2, "accumulate": 2}, id="FSDP"),
        pytest.param({"dp_shard": 2, "tp": 2}, id="FSDP and TP", marks=pytest.mark.long),
        pytest.param({"precision": "fp32"}, id="one rank"),
    ],
)
def test_it_sends_what_one_process_sends(options: dict[str, Any], tmp_path: Path) -> None:
    write_version(tmp_path)
    expected, update = in_one_process(tmp_path, **FIELDS)
    answer, of_mesh = on_a_mesh(tmp_path, options, **FIELDS)
    size = max(float(np.abs(value).max()) for value in update.values())
    close(of_mesh, update, 1e-5 * max(size, 1.0))
    same = ("num_examples", "work", "steps", "statistics")
    assert {name: answer[name] for name in same} == {name: expected[name] for name in same}
    assert answer["statistics"] == {}


def test_other_keys_give_other_noise(tmp_path: Path) -> None:
    write_version(tmp_path)
    found = [on_a_mesh(tmp_path, {"dp_shard": 2}, **FIELDS | {"noise": key})[1] for key in (KEY, KEY[::-1])]
    assert all(not np.array_equal(found[0][name], found[1][name]) for name in found[0])


def test_a_round_continues_on_another_mesh_with_its_samples_and_noise(tmp_path: Path) -> None:
    write_version(tmp_path)
    whole = on_a_mesh(tmp_path, {"dp_shard": 2}, **FIELDS)[1]
    kept = {"checkpoint": str(tmp_path / "kept"), "checkpoint_every": 2}
    request = clients.request_of(tmp_path, "mesh", **FIELDS, **kept)
    stopped = call_on_ranks(clients.told_on_a_rank, 2, "task", {"dp_shard": 2}, request, 2)
    assert {answer["steps"] for answer in stopped} == {2}
    answers = call_on_ranks(clients.counted_on_a_rank, 2, "task", {"dp_replicate": 2}, request)
    assert [steps for _, steps in answers] == [2, 2]  # those after the checkpoint
    again = clients.update_in(tmp_path / "mesh", answers[0][0]["parts"])
    close(again, whole, 1e-5 * max(float(np.abs(value).max()) for value in whole.values()))


def refused(options: dict[str, Any], request: dict[str, Any]) -> str:
    bench = MeshBench(tasks.task, {"site": "a"}, plan_of(options), read_world())
    with pytest.raises(TaskBroken) as caught:
        bench.train(request, lambda: False)
    return str(caught.value)


def test_a_pipeline_is_refused(tmp_path: Path) -> None:
    write_version(tmp_path)
    for said in call_on_ranks(refused, 2, {"pp": 2}, clients.request_of(tmp_path, "mesh", **FIELDS)):
        assert "a pipeline knows no norm of a whole gradient" in said
