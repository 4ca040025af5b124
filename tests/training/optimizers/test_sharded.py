"""The layer-wise optimizers on sharded models: equal to one process, with one exchange of norms per step and axis."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from atoll.parallel.engine.forked import RankFailed
from atoll.training.optimizers.lamb import LAMB
from atoll.training.optimizers.larc import LARC
from atoll.training.optimizers.lars import LARS
from atoll.training.optimizers.make import make_optimizer
from atoll.training.optimizers.norms import norms, total_norm
from atoll.training.optimizers.novograd import NovoGrad
from atoll.training.optimizers.options import OptimizerConfig
from tests.parallel.ranks import call_on_ranks

Arrays = dict[str, np.ndarray[Any, Any]]

KINDS: dict[str, Any] = {"lars": LARS, "larc": LARC, "lamb": LAMB, "novograd": NovoGrad}
BATCH, STEPS = 8, 3


class Net(nn.Module):
    """Layers whose rows do not divide by the ranks, a norm, and a layer that tensor parallelism leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.relu(self.first(inputs)))
        outputs: torch.Tensor = self.last(self.norm(hidden))
        return outputs


def fresh() -> Net:
    torch.manual_seed(1)
    return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def gradients(model: nn.Module, step: int, rank: int = 0, num_ranks: int = 1) -> None:
    """The gradient of the mean over the whole batch, from this rank's share of it."""
    model.zero_grad()
    inputs, targets = (tensor.chunk(num_ranks)[rank] for tensor in batch(step))
    nn.functional.mse_loss(model(inputs), targets).backward()


def alone(kind: str) -> Arrays:
    model = fresh()
    optimizer = KINDS[kind](model.parameters(), 0.1, weight_decay=0.01)
    for step in range(STEPS):
        gradients(model, step)
        optimizer.step()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def whole(model: nn.Module) -> Arrays:
    """The gathered weights; as arrays, because a process that ends takes its shared tensors with it."""
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: tensor.numpy() for name, tensor in gathered.items()}


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model.get_submodule("first"), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def exchanges(mode: CommDebugMode) -> int:
    return int(sum(mode.get_comm_counts().values()))


def train_fsdp(kind: str) -> tuple[Arrays, int]:
    """The trained weights, and how many collectives the last optimizer step had."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = sharded(fresh(), mesh)
    optimizer = KINDS[kind](model.parameters(), 0.1, weight_decay=0.01)
    counted = CommDebugMode()
    for step in range(STEPS):
        gradients(model, step, dist.get_rank(), dist.get_world_size())
        counted = CommDebugMode()
        with counted:
            optimizer.step()
    return whole(model), exchanges(counted)


def train_all_fsdp() -> dict[str, tuple[Arrays, int]]:
    return {kind: train_fsdp(kind) for kind in KINDS}


def test_two_fsdp_ranks_equal_one_process_with_one_exchange_per_step() -> None:
    for results in call_on_ranks(train_all_fsdp, 2):
        for kind, (weights, count) in results.items():
            assert count == 1, kind
            for name, array in alone(kind).items():
                np.testing.assert_allclose(weights[name], array, rtol=1e-6, atol=1e-6, err_msg=f"{kind}: {name}")


def train_2d() -> dict[str, tuple[Arrays, int, list[float], list[float]]]:
    """Return for each optimizer: weights, exchanges, the norms of the parameters by us, and of the gathered tensors."""
    results = {}
    for kind in KINDS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        model = sharded(parallelize_module(fresh(), mesh["tp"], plan), mesh["dp_shard"])
        optimizer = KINDS[kind](model.parameters(), 0.1, weight_decay=0.01)
        counted = CommDebugMode()
        for step in range(STEPS):
            gradients(model, step, mesh.get_local_rank("dp_shard"), 2)
            counted = CommDebugMode()
            with counted:
                optimizer.step()
        parameters = list(model.parameters())
        gathered = [p.detach().full_tensor() if isinstance(p, DTensor) else p for p in parameters]
        by_hand = [float(tensor.double().norm()) for tensor in gathered]
        results[kind] = (whole(model), exchanges(counted), norms(parameters).tolist(), by_hand)
    return results


def test_four_ranks_of_fsdp_and_tensor_parallelism_equal_one_process() -> None:
    for results in call_on_ranks(train_2d, 4):
        for kind, (weights, count, ours, by_hand) in results.items():
            assert count == 2, kind  # one for each of the two axes
            assert ours == pytest.approx(by_hand, rel=1e-6)
            for name, array in alone(kind).items():
                np.testing.assert_allclose(weights[name], array, rtol=1e-6, atol=2e-6, err_msg=f"{kind}: {name}")


def placements() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    generator = torch.Generator().manual_seed(dist.get_rank())
    replicated = distribute_tensor(torch.full((3, 3), 2.0), mesh, [Replicate()])
    odd = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    tiny = distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)])  # rank 1 holds nothing
    plain = torch.full((4,), 3.0)
    counted = CommDebugMode()
    with counted:
        together = norms([plain, replicated, odd, tiny]).tolist()
    unshared = CommDebugMode()
    with unshared:
        norms([plain, replicated])
    unfinished = DTensor.from_local(torch.randn(2, 2, generator=generator), mesh, [Partial()])
    try:
        norms([plain, unfinished])
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {"norms": together, "count": exchanges(counted), "unshared": exchanges(unshared), "refused": refused}


def test_only_what_is_cut_is_summed_over_the_ranks() -> None:
    for result in call_on_ranks(placements, 2):
        assert result["norms"] == pytest.approx([6.0, 6.0, 30.0**0.5, 2.0**0.5])
        assert (result["count"], result["unshared"]) == (1, 0)
        assert "tensor 1 has no norm yet" in result["refused"]
        assert "axis 0" in result["refused"]


def train_sequence_parallel(kind: str) -> tuple[list[bool], Arrays]:
    """Tensor parallelism without FSDP: the norm's gradient is a sum over the ranks that is still to be made."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {
        "first": ColwiseParallel(),
        "second": RowwiseParallel(output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),
        "last": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    model = parallelize_module(fresh(), mesh, plan)
    optimizer = KINDS[kind](model.parameters(), 0.1, weight_decay=0.01)
    seen: list[bool] = []
    for step in range(STEPS):
        gradients(model, step)
        gradient = model.get_parameter("norm.weight").grad
        seen = [placement.is_partial() for placement in gradient.placements] if isinstance(gradient, DTensor) else []
        optimizer.step()
    return seen, whole(model)


def test_a_gradient_that_is_still_to_be_summed_is_summed_first() -> None:
    for seen, weights in call_on_ranks(train_sequence_parallel, 2, "lars"):
        assert seen == [True]
        for name, array in alone("lars").items():
            np.testing.assert_allclose(weights[name], array, rtol=1e-6, atol=1e-6, err_msg=name)


def resume(kind: str) -> tuple[bool, Arrays, Arrays]:
    """Train with and without a stop in between, where model and optimizer go through their state dicts."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = sharded(fresh(), mesh)
        return model, KINDS[kind](model.parameters(), 0.1, weight_decay=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            gradients(model, step, dist.get_rank(), 2)
            optimizer.step()

    straight, optimizer = make()
    train(straight, optimizer, range(4))
    before, optimizer = make()
    train(before, optimizer, range(2))
    saved = get_optimizer_state_dict(before, optimizer, options=options)
    is_cut = all(
        isinstance(value, DTensor)
        for name, value in saved.items()
        if name.startswith("state.") and name.endswith(("buffer", "exp_avg"))
    )
    after, optimizer = make()
    set_model_state_dict(after, get_model_state_dict(before))
    set_optimizer_state_dict(after, optimizer, saved, options=options)
    train(after, optimizer, range(2, 4))
    return is_cut, whole(straight), whole(after)


def resume_all() -> dict[str, tuple[bool, Arrays, Arrays]]:
    return {kind: resume(kind) for kind in KINDS}


def test_sharded_state_goes_through_a_checkpoint_and_carries_on_exactly() -> None:
    for results in call_on_ranks(resume_all, 2):
        for kind, (is_cut, straight, resumed) in results.items():
            assert is_cut, kind
            for name, array in straight.items():
                assert np.array_equal(array, resumed[name]), f"{kind}: {name}"


def train_mixed() -> dict[str, Arrays]:
    """Tensor parallelism that leaves some layers plain, which torch's own loop over all tensors at once refuses."""
    results = {}
    for name in ("adamw", "lamb"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = parallelize_module(fresh(), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        optimizer = make_optimizer(OptimizerConfig(name=name, lr=0.01), model.named_parameters())
        for step in range(STEPS):
            gradients(model, step)
            optimizer.step()
        results[name] = whole(model)
    return results


def test_plain_and_sharded_parameters_may_be_mixed() -> None:
    expected = {}
    for name in ("adamw", "lamb"):
        model = fresh()
        optimizer = make_optimizer(OptimizerConfig(name=name, lr=0.01), model.named_parameters())
        for step in range(STEPS):
            gradients(model, step)
            optimizer.step()
        expected[name] = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    for results in call_on_ranks(train_mixed, 2):
        for name, weights in results.items():
            for key, array in expected[name].items():
                np.testing.assert_allclose(weights[key], array, rtol=1e-5, atol=1e-5, err_msg=f"{name}: {key}")


def noise_pair(num_ranks: int) -> tuple[float, float]:
    """|G|² of the first half of a batch and of all of it, read off the gradients between two micro-batches."""
    rank, model = (dist.get_rank(), fresh()) if num_ranks > 1 else (0, fresh())
    if num_ranks > 1:
        sharded(model, init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp_shard",)))
    squares = []
    for inputs, targets in zip(*(tensor.chunk(2) for tensor in batch(0)), strict=True):
        share = nn.functional.mse_loss(model(inputs.chunk(num_ranks)[rank]), targets.chunk(num_ranks)[rank])
        (share / 2).backward()  # each micro-batch is half of the batch
        squares.append(float(total_norm([p.grad for p in model.parameters() if p.grad is not None])) ** 2)
    return squares[0] * 2**2, squares[1]


def test_both_norms_of_the_noise_scale_can_be_read_from_a_sharded_model() -> None:
    small, big = noise_pair(1)
    assert small != pytest.approx(big, rel=0.01)
    for found in call_on_ranks(noise_pair, 2, 2):
        assert found == pytest.approx((small, big), rel=1e-5)


def miscount() -> None:
    if dist.get_rank() == 0:
        norms([distribute_tensor(torch.ones(2), init_device_mesh("cpu", (3,)), [Shard(0)])])


def test_a_mesh_larger_than_the_world_is_no_hang() -> None:
    with pytest.raises(RankFailed, match="3"):
        call_on_ranks(miscount, 2, timeout_s=30.0)
