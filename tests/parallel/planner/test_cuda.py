"""The planner's predictions against a GPU's own allocator. `make test-cuda` runs this."""

import pytest
import torch
import torch.distributed as dist

from atoll.parallel.engine.axes import Axes
from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.models.decoder import Decoder
from atoll.parallel.planner.candidate import Candidate
from atoll.parallel.planner.dry_run import _batch, _build, decoder_config
from atoll.parallel.planner.memory import memory
from atoll.parallel.planner.shape import ModelShape
from tests.parallel.forked import run_ranks

XL = ModelShape(layers=48, hidden=1536, heads=24, ffn=4096, vocab=50304, sequence=1024)
"""GPT-2's largest size, with a number of heads that tp divides."""


def candidate(**settings: object) -> Candidate:
    return Candidate(plan=Plan(mesh=Mesh(pp=4, dp_shard=4, tp=4), num_microbatches=8, **settings))  # type: ignore[arg-type]


def steps_alone(shape: ModelShape, candidate: Candidate, rank: int, device: str, *, number: int = 2) -> None:
    """Run real steps of one rank of any mesh, on a real device with real memory, and torch's fake network.

    Tensors from other ranks have undefined values: the arithmetic means nothing, the allocator's peak does. This
    process must have no process group, and the plan must shard the model (dp_shard, tp).
    """
    dist.init_process_group("fake", rank=rank, world_size=candidate.mesh.size)
    try:
        with torch.device("meta"):
            model = Decoder(decoder_config(shape))
        engine = _build(model, shape, candidate, Axes(candidate.mesh, torch.device(device).type), device)
        for part in engine.parts:
            part.to_empty(device=device)
        batch = _batch(shape, candidate).to(device)
        for _ in range(number):
            engine.step(batch, total=1, report=False)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda")
@pytest.mark.parametrize(
    "rank",
    [
        pytest.param(0, id="first stage"),
        pytest.param(21, id="middle stage"),
        pytest.param(63, id="last stage"),
    ],
)
def test_a_rank_of_64_takes_what_is_predicted(rank: int) -> None:
    plan = candidate(precision="bf16")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    steps_alone(XL, plan, rank, "cuda:0")
    assert torch.cuda.max_memory_allocated() == pytest.approx(memory(XL, plan, rank).total, rel=0.1)


def small_steps(rank: int) -> None:
    torch.distributed.destroy_process_group()  # of gloo, for a fake one
    small = ModelShape(layers=4, hidden=64, heads=4, ffn=96, vocab=128, sequence=32)
    steps_alone(small, candidate(), rank, "cpu")
    torch.distributed.init_process_group("fake", rank=0, world_size=1)  # to be left as it was found


@pytest.mark.real
@pytest.mark.parametrize("rank", [0, 21, 63])
def test_such_a_rank_takes_its_steps_on_a_cpu_too(rank: int) -> None:
    run_ranks(small_steps, 1, rank)
