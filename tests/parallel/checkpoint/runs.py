"""A small model under several layouts, with gradients that its names alone decide: every layout takes the same step."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from atoll.parallel.checkpoint.checkpointer import Checkpointer

STAGES = (("embed", "up"), ("down", "norm", "out"))
"""The modules of each of two pipeline stages."""

TIED = {"out.weight": "embed.weight"}
TIED_NAMES = [["embed.weight", "out.weight"]]

Full = dict[str, np.ndarray[Any, Any]]
"""Whole tensors by name; arrays, since a tensor that a process hands on dies with it."""


class Tiny(nn.Module):
    """11 x 8 and 3-wide tensors: nothing of it divides evenly over four ranks."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 11, bias=False)
        self.head = nn.Linear(8, 3)
        if is_tied:
            self.out.weight = self.embed.weight


def build(layout: str, is_tied: bool = False) -> tuple[list[nn.Module], list[Optimizer]]:
    """This rank's parts and their optimizers under one of plain, ddp, fsdp, tp, stages."""
    model: Any = Tiny(is_tied)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    elif layout == "stages":
        model = _stage(model, world)
    optimizer = AdamW(_groups(model), lr=0.1, foreach=False if layout == "tp" else None)
    return [model], [optimizer]


def _stage(model: Tiny, world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "shard"))
    mine = STAGES[mesh.get_local_rank("pp")]
    model.out.weight = nn.Parameter(model.out.weight.detach().clone())  # a tie ends where a stage does
    for name, _ in list(model.named_children()):
        if name not in mine and not (name == "head" and "out" in mine):
            delattr(model, name)
    return fully_shard(model, mesh=mesh["shard"]) if world > 2 else model


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups without weight decay for one-dimensional parameters, as usual."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def plain_name(name: str) -> str:
    return name.removeprefix("module.")


def step(parts: list[nn.Module], optimizers: list[Optimizer], number: int, is_tied: bool = False) -> None:
    for part, optimizer in zip(parts, optimizers, strict=True):
        for name, parameter in part.named_parameters():
            parameter.grad = like(parameter, gradient(plain_name(name), parameter.shape, number, is_tied))
        optimizer.step()
        optimizer.zero_grad()


def gradient(name: str, shape: torch.Size, number: int, is_tied: bool) -> torch.Tensor:
    first = TIED.get(name, name) if is_tied else name
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{first} {number}".encode())))


def like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def everything(parts: list[nn.Module], optimizers: list[Optimizer]) -> Full:
    """Whole tensors of this rank's names: the model's, and what the optimizer keeps. A collective."""
    found = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        for name, tensor in part.state_dict(keep_vars=True).items():
            found[plain_name(name)] = whole(tensor)
            found |= {f"{plain_name(name)} {k}": whole(v) for k, v in optimizer.state.get(tensor, {}).items()}
    return found


def whole(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (
        (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()
    )
    return array


def save_after(folder: Path, layout: str, num_steps: int, asynchronous: bool = False, is_tied: bool = False) -> Any:
    """Train, save, and train on by one step; what there was at the save, and at the end."""
    parts, optimizers = build(layout, is_tied)
    for number in range(num_steps):
        step(parts, optimizers, number, is_tied)
    saved = everything(parts, optimizers)
    with Checkpointer(folder, asynchronous=asynchronous, tied=TIED_NAMES if is_tied else ()) as checkpointer:
        checkpointer.save(parts, optimizers, {"examples": 3 * num_steps}, num_steps)
        step(parts, optimizers, num_steps, is_tied)
    return saved, everything(parts, optimizers)


def load_and_step(folder: Path, layout: str, num_steps: int, is_tied: bool = False) -> Any:
    """Load the latest, and train on by one step; what there was after loading, and at the end."""
    parts, optimizers = build(layout, is_tied)
    with torch.no_grad():
        for part in parts:
            for tensor in [*part.parameters(), *(b for b in part.buffers() if b.is_floating_point())]:
                tensor.fill_(7.0)
    with Checkpointer(folder, tied=TIED_NAMES if is_tied else ()) as checkpointer:
        path = checkpointer.latest()
        assert path is not None
        restored = checkpointer.load(parts, optimizers, path)
    assert (restored.step, restored.extra) == (num_steps, {"examples": 3 * num_steps})
    loaded = everything(parts, optimizers)
    step(parts, optimizers, num_steps, is_tied)
    return loaded, everything(parts, optimizers)
