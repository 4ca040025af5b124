"""Which process this is among how many: the one place that reads what a launcher says of it."""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Its default arguments keep the group that there is when it is first imported, which making an optimizer does: then
# gloo's threads outlive the group, and now and then abort the process when the interpreter ends.
import torch.distributed.nn.functional

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""What `torchrun` sets. Without all three this process is alone."""

MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
"""The same three as Open MPI's `mpirun` calls them."""

TIMEOUT_S = 300.0
"""How long a collective may wait for the slowest rank; models are built and compiled before the first."""


@dataclass(frozen=True, slots=True)
class World:
    """The process's place among the ranks of one run."""

    rank: int = 0
    """0 .. size - 1."""

    local_rank: int = 0
    """0 .. ranks on this machine - 1; the index of the rank's GPU."""

    size: int = 1
    """Ranks on all machines."""

    def __post_init__(self) -> None:
        if not (self.size >= 1 and 0 <= self.rank < self.size and 0 <= self.local_rank <= self.rank):
            raise ValueError(
                f"RANK must be in 0..WORLD_SIZE - 1 and LOCAL_RANK in 0..RANK, "
                f"got RANK={self.rank}, LOCAL_RANK={self.local_rank}, WORLD_SIZE={self.size}"
            )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self.rank == 0

    def device(self, kind: str) -> torch.device:
        """This rank's device of a kind, `cpu` or `cuda`."""
        return torch.device(kind, self.local_rank) if kind == "cuda" else torch.device(kind)


def read_world(environ: Mapping[str, str] = os.environ) -> World:
    """The place that `torchrun` or `mpirun` has given this process; alone when neither has.

    Raises:
        ValueError: only some of the variables are there, or one is no number in its range.
    """
    for names in (VARIABLES, MPI_VARIABLES):
        given = {name: environ[name] for name in names if name in environ}
        if not given:
            continue
        if len(given) < len(names):
            raise ValueError(f"the launcher must set {', '.join(names)}; only {', '.join(given)} there")
        try:
            rank, local_rank, size = (int(given[name]) for name in names)
        except ValueError:
            raise ValueError(f"the launcher must set whole numbers, got {given}") from None
        return World(rank, local_rank, size)
    return World()


@contextmanager
def process_group(
    world: World, device: str = "cpu", *, store: Any = None, timeout_s: float = TIMEOUT_S
) -> Iterator[None]:
    """The default process group while the block runs: NCCL on GPUs (with gloo beside it for the CPU), gloo elsewhere.

    Where there is one already, it is that one, and it stays.

    Args:
        world: this process's place.
        device: `cpu` or `cuda`.
        store: a torch store where the ranks meet; by default MASTER_ADDR and MASTER_PORT say where, and a rank alone
            needs none.
        timeout_s: how long a collective may wait.

    Raises:
        ValueError: several ranks, and nobody says where they meet.
    """
    if device == "cuda":
        torch.cuda.set_device(world.device(device))
    if dist.is_initialized():
        with _known_warnings():
            yield
        return
    if store is None and world.size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    if store is None and (missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]):
        raise ValueError(
            f"{' and '.join(missing)} must say where the {world.size} ranks meet; torchrun sets them, mpirun takes "
            f"-x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500"
        )
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    wait = timedelta(seconds=timeout_s)
    if store is None:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=wait)
    else:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=wait, store=store)
    try:
        with _known_warnings():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _known_warnings() -> Iterator[None]:
    """Silence what torch says of things that are meant: local outputs are views, and are never written to; a tensor
    that is sharded twice over one dimension is gathered in two steps."""
    redistribute = logging.getLogger("torch.distributed.tensor._redistribute")
    level = redistribute.level
    redistribute.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            yield
    finally:
        redistribute.setLevel(level)
