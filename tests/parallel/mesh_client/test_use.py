"""The use of a mesh in one round: operations of the model, where it runs without memory, and the time of its steps."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.mesh_client import bench
from atoll.parallel.mesh_client.bench import MeshBench
from atoll.parallel.mesh_client.use import PeakMemory, RoundUse
from atoll.parallel.world import World
from tests.parallel.forked import run_ranks
from tests.parallel.mesh_client import tasks
from tests.parallel.mesh_client.clients import on_a_mesh, plan_of, write_version

MIB = 2**20


def use_of(task, inputs):
    now = [0.0]
    use = RoundUse(Ranks(), torch.device("cpu"), "fp32", lambda: now[0])
    use.begin()
    now[0] = 5.0
    use.begin_training()
    now[0] = 7.0
    use.end_training()
    now[0] = 9.0
    return use.of(task, inputs, 4, 32)


def test_the_operations_are_those_of_the_matrices_and_the_time_that_of_the_steps():
    layers = replace(tasks.task, model=lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2)))
    found = use_of(layers, lambda: torch.zeros(1, 8))
    first, second = 2 * 8 * 16, 2 * 16 * 2
    each = 2 * first + 3 * second  # the first layer's inputs need no gradient
    assert (found["num_ranks"], found["steps_per_s"], found["peak_flops"]) == (1, 2.0, 0.0)
    assert found["flops_per_s"] == pytest.approx(32 * each / 2.0)


class Picky(nn.Module):
    """A model whose code looks at values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs):
        return self.layer(inputs) if inputs.sum() > 0 else self.layer(-inputs)


def test_a_model_that_needs_values_has_no_known_operations():
    assert use_of(replace(tasks.task, model=Picky), lambda: torch.zeros(1, 8))["flops_per_s"] == 0.0
    assert use_of(tasks.task, lambda: torch.zeros(0))["flops_per_s"] == 0.0, "the model's own error"


@pytest.mark.real
def test_the_ranks_report_one_use(tmp_path):
    write_version(tmp_path)
    use = on_a_mesh(tmp_path, {"dp_shard": 2})[0]["mesh"]
    assert use["num_ranks"] == 2
    assert use["peak_bytes"] > 10**6
    assert use["steps_per_s"] > 0
    assert use["flops_per_s"] > 0


def peaks_around_a_block() -> list[int]:
    """The largest memory before a block of 64 MiB, after it is gone, and of the next round."""
    peak = PeakMemory(torch.device("cpu"))
    before = peak.num_bytes
    block = torch.ones(64 * MIB // 4)
    assert block.sum() > 0
    del block
    return [before, peak.num_bytes, PeakMemory(torch.device("cpu")).num_bytes]


@pytest.mark.real
def test_the_peak_is_seen_after_it_is_gone_and_forgotten_in_the_next_round():
    """In a process of its own, whose memory no other test has shaped."""
    ((before, largest, after),) = run_ranks(peaks_around_a_block, 1)
    assert before > MIB
    assert 60 * MIB < largest - before < 96 * MIB
    assert after < before + 32 * MIB


def test_without_proc_there_is_no_figure(tmp_path):
    assert PeakMemory(torch.device("cpu"), tmp_path / "none").num_bytes == 0


def test_a_mesh_repeats_itself_on_its_device_as_one_process_does(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "repeat_on", asked.append)
    MeshBench(tasks.task, {"site": "here"}, plan_of({}), World())
    assert asked == ["cpu"]
