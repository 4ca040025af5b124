"""The centralized training on a GPU: the losses of the CPU under every kind of plan. `make test-cuda` runs this."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.parallel.checkpoint.randomness import generator_state, restore_generators
from atoll.parallel.engine.plan import Plan
from atoll.parallel.trainer.logs import read_log
from atoll.task.randomness import generators_kept, seed_everything
from tests.parallel.mesh_client import tasks as decoders
from tests.parallel.trainer import tasks
from tests.parallel.trainer.training import CONFIG, model, run

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's compiler, when it imports itself
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # its advice
]

TWICE = replace(CONFIG, epochs=2)
PLANS = {
    "one process": Plan(),
    "accumulated": Plan(accumulate=2),
    "recomputed": Plan(recompute="full"),
    "recomputed selectively": Plan(recompute="selective"),
    "compiled": Plan(compile=True),
    "fsdp": Plan(zero=3),
    "fsdp, recomputed": Plan(zero=3, recompute="full"),
    "fsdp, offloaded": Plan(zero=3, offload=True),
}
"""Plans of one rank; those with `zero` have a process group of NCCL."""


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpu")
    run(folder, task=decoders.task, config=TWICE)
    return folder


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_the_losses_are_those_of_the_cpu(plan: Plan, on_the_cpu: Path, tmp_path: Path) -> None:
    result = run(tmp_path, task=decoders.task, config=TWICE, plan=plan, device="cuda")
    assert result.device == torch.cuda.get_device_name()
    assert tasks.losses(tmp_path) == pytest.approx(tasks.losses(on_the_cpu), rel=1e-5)
    expected = model(on_the_cpu)
    assert model(tmp_path).keys() == expected.keys()
    for name, value in model(tmp_path).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "plan", [Plan(precision="bf16"), Plan(zero=3, precision="bf16"), Plan(zero=3, precision="bf16", compile=True)]
)
def test_bf16_moves_float32_masters(plan: Plan, on_the_cpu: Path, tmp_path: Path) -> None:
    run(tmp_path, task=decoders.task, config=TWICE, plan=plan, device="cuda")
    found, expected = tasks.losses(tmp_path), tasks.losses(on_the_cpu)
    assert found != pytest.approx(expected, rel=1e-6)
    assert found == pytest.approx(expected, rel=0.02)
    stored = model(tmp_path)["layers.0.mlp.out.weight"]
    assert stored.dtype == torch.float32
    assert not stored.equal(stored.bfloat16().float())


@pytest.mark.parametrize("plan", [Plan(), Plan(zero=3)], ids=["one process", "fsdp"])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_an_interrupted_training_goes_on_as_if_nothing_had_been(
    plan: Plan, is_asynchronous: bool, tmp_path: Path
) -> None:
    """The dropout draws from the generator of the GPU, which a checkpoint stores."""
    options: dict[str, Any] = {
        "task": tasks.with_dropout,
        "plan": plan,
        "device": "cuda",
        "config": replace(CONFIG, checkpoint_every=4, asynchronous=is_asynchronous),
    }
    whole = run(tmp_path / "whole", **options)
    for stop in (5, 14):
        assert run(tmp_path / "parts", **options, stop_after=stop).steps == stop
    end = run(tmp_path / "parts", **options)
    assert tasks.losses(tmp_path / "parts") == tasks.losses(tmp_path / "whole")
    assert replace(end, seconds=0) == replace(whole, seconds=0)
    parts, expected = model(tmp_path / "parts"), model(tmp_path / "whole")
    assert all(value.equal(expected[name]) for name, value in parts.items())


def test_batches_of_worker_processes_reach_the_gpu(tmp_path: Path) -> None:
    for name, device, workers in (("cpu", "cpu", 0), ("gpu", "cuda", 2)):
        run(tmp_path / name, config=replace(CONFIG, workers=workers), device=device)
    assert tasks.losses(tmp_path / "gpu") == pytest.approx(tasks.losses(tmp_path / "cpu"), rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_and_utilization_are_those_of_the_gpu(precision: str, tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    run(tmp_path, task=decoders.task, plan=Plan(zero=3, precision=precision), device="cuda")
    last = list(read_log(tmp_path / "log.jsonl", "step").values())[-1]
    assert 0.9 * torch.cuda.max_memory_allocated() <= last["memory_bytes"] <= torch.cuda.max_memory_allocated()
    assert 0 < last["mfu"] < 1


def test_the_generator_of_the_gpu_is_kept_and_restored() -> None:
    def drawn() -> list[float]:
        found: list[float] = torch.rand(3, device="cuda").tolist()
        return found

    seed_everything(5)
    state = generator_state()
    first = drawn()
    restore_generators(state)
    with generators_kept():
        seed_everything(6)
        assert drawn() != first
    assert drawn() == first
