"""The Horovod style against one process's plain loop, and the example under a real torchrun."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import examples.teaching.horovod as hvd
from tests.later import later
from tests.parallel.communication.learners import batches, make_net
from tests.parallel.forked import run_ranks
from tests.waiting import BOUND_S

horovod_style = later("examples.horovod_style")

ROOT = Path(__file__).parents[3]
STEPS = 8


def collectives() -> dict[str, Any]:
    hvd.init()  # the ranks have met: nothing
    here = float(hvd.rank())
    mine = torch.full((2, 3), here)
    uneven = hvd.allgather(torch.full((hvd.rank(), 2), here))
    sums = hvd.allreduce(torch.tensor([2**40 + hvd.rank()]), average=False)
    with pytest.raises(ValueError, match="int64 can only be summed"):
        hvd.allreduce(sums)
    with pytest.raises(ValueError, match="compression: must be one of none, fp16, bf16, got 'int8'"):
        hvd.allreduce(mine, compression="int8")
    return {
        "place": (hvd.rank(), hvd.local_rank(), hvd.size()),
        "mean": hvd.allreduce(mine).tolist(),
        "half": hvd.allreduce(mine + 1e-4, compression="fp16").tolist(),
        "sum": sums.tolist(),
        "gathered": uneven.tolist(),
        "scalars": hvd.allgather(torch.tensor(here)).tolist(),
        "from 2": hvd.broadcast(mine, root_rank=2).tolist(),
        "untouched": mine.tolist() == [[here] * 3] * 2,
    }


def test_collectives_take_and_give_tensors() -> None:
    for rank, found in enumerate(run_ranks(collectives, 3)):
        assert found["place"] == (rank, rank, 3)
        assert np.ravel(found["mean"]) == pytest.approx([1.0] * 6)
        assert np.ravel(found["half"]) == pytest.approx([1.0001] * 6, rel=2e-3)
        assert found["sum"] == [3 * 2**40 + 3]
        assert found["gathered"] == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert found["scalars"] == [0.0, 1.0, 2.0]
        assert found["from 2"] == [[2.0] * 3] * 2
        assert found["untouched"]


def resumed() -> dict[str, Any]:
    """Rank 1 has trained, has a schedule's rate and other weights; rank 0 has nothing."""
    model = make_net()
    model.append(nn.BatchNorm1d(10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9))
    if hvd.rank() == 1:
        for images, targets in batches(0, 1, steps=2, size=16):
            nn.functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.25
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    moments = {i: {k: v.numpy() for k, v in one.items()} for i, one in state["state"].items()}
    return {
        "model": {k: v.numpy() for k, v in model.state_dict().items()},
        "moments": moments,
        **state["param_groups"][0],
    }


def test_all_begin_as_the_root_is() -> None:
    zero, one = run_ranks(resumed, 2)
    assert one["model"]["3.num_batches_tracked"] == 2
    assert zero["lr"] == one["lr"] == 0.25
    assert zero["betas"] == (0.8, 0.9)
    assert zero["moments"][0]["step"] == 2
    np.testing.assert_equal(zero, one)


def clipped(parameters: Any) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.5)


def plain_loop(passes: int) -> list[np.ndarray[Any, Any]]:
    """One process: the union of the two ranks' examples, in `passes` parts whose gradients are summed."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    drawn = list(batches(0, 1, steps=STEPS * passes, size=32))
    for step in range(STEPS):
        optimizer.zero_grad()
        for images, targets in drawn[passes * step : passes * (step + 1)]:
            nn.functional.cross_entropy(model(images), targets).backward()
        clipped(model.parameters())
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def hvd_loop(passes: int, compression: str, op: str) -> list[np.ndarray[Any, Any]]:
    model = make_net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression, passes, op)
    drawn = list(batches(hvd.rank(), hvd.size(), steps=STEPS * passes, size=32))
    for step in range(STEPS):
        optimizer.zero_grad()
        for images, targets in drawn[passes * step : passes * (step + 1)]:
            loss = nn.functional.cross_entropy(model(images), targets)
            (loss if op == "average" else loss / hvd.size()).backward()
        optimizer.synchronize()
        clipped(model.parameters())
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def hvd_loops(settings: list[tuple[int, str, str]], bucket_bytes: int) -> list[list[np.ndarray[Any, Any]]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(hvd, "BUCKET_BYTES", bucket_bytes)
        return [hvd_loop(*setting) for setting in settings]


def test_a_wrapped_optimizer_trains_as_one_process_does() -> None:
    """The same holds in many buckets, with two passes in a step, as a sum, and in halves to their rounding."""
    settings = [(1, "none", "average"), (2, "none", "average"), (1, "none", "sum"), (1, "fp16", "average")]
    for found in run_ranks(hvd_loops, 2, settings, 2000):
        for (passes, compression, _), arrays in zip(settings, found, strict=True):
            for array, wanted in zip(arrays, plain_loop(passes), strict=True):
                np.testing.assert_allclose(array, wanted, atol=1e-6 if compression == "none" else 2e-3)


class TwoRoads(nn.Module):
    """A net in which rank 0 takes one road first, rank 1 the other; the third only rank 0 takes, the fourth no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.roads = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(4)])

    def forward(self) -> torch.Tensor:
        first, second = (0, 1) if hvd.rank() == 0 else (1, 0)
        walked = torch.tanh(self.roads[first]) * self.roads[second]
        return (walked + (self.roads[2] if hvd.rank() == 0 else 0)).sum()


def roads() -> list[float]:
    model = TwoRoads()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(hvd, "BUCKET_BYTES", 4)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    model().backward()
    optimizer.synchronize()
    return [road.grad.item() for road in model.roads if road.grad is not None]


def test_ranks_with_other_graphs_do_not_mix_their_gradients() -> None:
    """d/dx of tanh(x) y and of tanh(y) x at 1, and their mean."""
    tanh = float(np.tanh(1.0))
    mean = (tanh + 1 - tanh**2) / 2
    for found in run_ranks(roads, 2):
        assert found == pytest.approx([mean, mean, 0.5, 0.0])


def misuses() -> list[str]:
    model = make_net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())
    words = []
    for arguments in (
        (inner, named, "int8"),
        (inner, named, "none", 0),
        (inner, named, "none", 1, "max"),
        (inner, named[1:]),
    ):
        with pytest.raises(ValueError, match=":") as refused:
            hvd.DistributedOptimizer(*arguments)
        words.append(str(refused.value))
    hvd.DistributedOptimizer(inner, named)
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(RuntimeError) as twice:
        model(torch.ones(1, 64)).sum().backward()
    return [*words, str(twice.value)]


def test_misuse_is_named() -> None:
    compression, passes, op, nameless, twice = run_ranks(misuses, 1)[0]
    assert "got 'int8'" in compression
    assert "backward_passes_per_step: must be at least 1, got 0" in passes
    assert "op: must be one of average, sum, got 'max'" in op
    assert "1 of the optimizer's are missing, of shapes [(64, 64)]" in nameless
    assert "another backward pass before the step, backward_passes_per_step is 1" in twice


def test_a_process_alone_opens_and_closes_its_group() -> None:
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (0, 1, 0)
    hvd.shutdown()
    assert not dist.is_initialized()


LAST_WORDS = """
from pathlib import Path
import torch
import examples.teaching.horovod as hvd
hvd.init()
torch.optim.SGD([hvd.allreduce(torch.ones(2))], lr=0.1)
hvd.shutdown()
print(*(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc: make test there")
def test_no_thread_of_the_group_outlives_it() -> None:
    """One that waits for Python's lock when the interpreter ends aborts the process: seen in one of eight runs."""
    run = subprocess.run([sys.executable, "-c", LAST_WORDS], cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S)
    assert run.returncode == 0, run.stderr
    assert "python" in run.stdout
    assert "gloo" not in run.stdout


@pytest.mark.long
def test_the_example_is_as_good_under_torchrun_as_alone(tmp_path: Path) -> None:
    saved = tmp_path / "digits.safetensors"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = ["-m", "examples.horovod_style", "--epochs", "8", "--save", str(saved)]
    run = subprocess.run([*torchrun, *example], cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert run.returncode == 0, run.stderr
    hvd.init()
    try:
        model, alone = horovod_style.train(8)
    finally:
        hvd.shutdown()
    assert alone > 0.93
    assert run.stdout.strip() == f"accuracy {alone:.4f} after 8 epochs on 2 ranks"
    for name, tensor in load_file(saved).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=1e-4, rtol=0)
