"""The rank of this process among all ranks of a run; the only module that reads a launcher's environment variables."""

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Imported early, because its default arguments keep the process group that exists at its first import, which
# constructing an optimizer does: gloo's threads would outlive the group, and sometimes abort the interpreter's exit.
import torch.distributed.nn.functional
from torch.distributed import distributed_c10d

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""The variables that `torchrun` sets. Without all three this process is alone."""

MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
"""The variables of rank, local rank and number of ranks that Open MPI's `mpirun` sets."""

SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
"""The variables of rank, local rank and number of ranks that Slurm sets for a step's tasks, not for a batch script."""

SLURM_PORTS = range(20_000, 30_000)
"""The ports at which the ranks of a Slurm step meet, by the numbers of job and step."""

TIMEOUT_S = 300.0
"""Longest wait of a collective for the slowest rank [s]; models are built and compiled before the first collective."""

_BACKEND = re.compile(r"\bgloo\b|\bNCCL\b|\bProcessGroup|\bTCPStore\b", re.IGNORECASE)
"""Names in the messages of the backends: of their files, of their classes."""


@dataclass(frozen=True, slots=True)
class World:
    """The rank of this process, and the number of ranks of its run."""

    rank: int = 0
    """The rank among all, in 0..size - 1."""

    local_rank: int = 0
    """The rank among those on this machine, from 0; the index of its GPU."""

    size: int = 1
    """The number of ranks on all machines."""

    def __post_init__(self) -> None:
        if not (self.size >= 1 and 0 <= self.rank < self.size and 0 <= self.local_rank <= self.rank):
            raise ValueError(
                f"RANK must be in 0..WORLD_SIZE - 1 and LOCAL_RANK in 0..RANK, "
                f"got RANK={self.rank}, LOCAL_RANK={self.local_rank}, WORLD_SIZE={self.size}"
            )

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0, which logs and writes for all."""
        return self.rank == 0

    def device(self, kind: str) -> torch.device:
        """Return this rank's device of a kind, `cpu` or `cuda`; the one GPU where a launcher shows no other to it."""
        if kind != "cuda":
            return torch.device(kind)
        return torch.device(kind, 0 if torch.cuda.device_count() == 1 else self.local_rank)


def read_world(environ: Mapping[str, str] = os.environ) -> World:
    """Return the rank that `torchrun`, `mpirun` or `srun` has assigned to this process; rank 0 of 1 without any.

    Raises:
        ValueError: only some of the variables are set, or one is no number in its range.
    """
    for names in (VARIABLES, MPI_VARIABLES, SLURM_VARIABLES):
        given = {name: environ[name] for name in names if name in environ}
        if not given or (names == SLURM_VARIABLES and names[-1] not in given):
            continue
        if len(given) < len(names):
            raise ValueError(f"the launcher must set {', '.join(names)}; got only {', '.join(given)}")
        try:
            rank, local_rank, size = (int(given[name]) for name in names)
        except ValueError:
            raise ValueError(f"the launcher must set whole numbers, got {given}") from None
        return World(rank, local_rank, size)
    return World()


def ranks_here(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks on this machine, as the launcher reports it; None: it does not."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if name in environ:
            return int(environ[name])
    if is_slurm(environ) and (counts := environ.get("SLURM_STEP_TASKS_PER_NODE")):
        return _tasks_on(int(environ.get("SLURM_NODEID", "0")), counts)
    return 1 if read_world(environ).size == 1 else None


def is_slurm(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a task of a Slurm step that no other launcher has divided further."""
    return SLURM_VARIABLES[-1] in environ and not any(name in environ for name in (*VARIABLES, *MPI_VARIABLES))


def meeting_place(world: World, environ: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the address and the port where the ranks meet: MASTER_ADDR and MASTER_PORT, or a Slurm step's.

    A step's ranks meet on its first node, at a port of `SLURM_PORTS` that follows from the numbers of job and step.

    Raises:
        ValueError: a variable is missing, or the port is no number.
    """
    given = {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}
    if is_slurm(environ):
        nodes = environ.get("SLURM_STEP_NODELIST", "")
        number = sum(int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        of_step = {"MASTER_ADDR": _first_host(nodes)} if nodes else {}
        given = {**of_step, "MASTER_PORT": str(SLURM_PORTS[number % len(SLURM_PORTS)]), **given}
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]:
        raise ValueError(
            f"set {' and '.join(missing)} to the address where the {world.size} ranks meet; torchrun sets them, "
            f"mpirun takes -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500"
        )
    if not given["MASTER_PORT"].isdecimal():
        raise ValueError(f"MASTER_PORT: must be a whole number, got {given['MASTER_PORT']!r}")
    return given["MASTER_ADDR"], int(given["MASTER_PORT"])


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: `gpu[03-07,12]-a,login1` begins with `gpu03-a`."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0])


def _tasks_on(node: int, counts: str) -> int | None:
    """Return the number of tasks on a node, from `4(x2),3`: four on each of two nodes, three on another."""
    each: list[int] = []
    for word in counts.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word)
        if found is None:
            return None
        each += [int(found[1])] * int(found[2] or 1)
    return each[node] if node < len(each) else None


@contextmanager
def process_group(
    world: World, device: str = "cpu", *, store: Any = None, timeout_s: float = TIMEOUT_S
) -> Iterator[None]:
    """Provide the default process group for the block: NCCL on GPUs (with gloo beside it for the CPU), gloo elsewhere.

    An existing group is used, and stays. Groups that are made in the block, such as a mesh's axes, have the
    same timeout: torch gives them 10 or 30 minutes, whatever the timeout of the default group is.

    Args:
        world: this process's rank.
        device: `cpu` or `cuda`.
        store: a torch store for the rendezvous; left out: the one at `meeting_place`, or for a rank alone a new
            one.
        timeout_s: longest wait of a collective [s].

    Raises:
        ValueError: several ranks, and no address for their rendezvous.
    """
    if device == "cuda":
        torch.cuda.set_device(world.device(device))
    if dist.is_initialized():
        with _known_warnings(), _timeout_of_new_groups(timeout_s):
            yield
        return
    if store is None and world.size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    if store is None:
        address, port = meeting_place(world)
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    wait = timedelta(seconds=timeout_s)
    if store is None:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=wait)
    else:
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=wait, store=store)
    try:
        with _known_warnings(), _timeout_of_new_groups(timeout_s):
            yield
    finally:
        if dist.is_initialized():  # as long as the block has not destroyed it
            dist.destroy_process_group()


def is_lost_peer(error: BaseException | None) -> bool:
    """Return whether the loss of another rank caused the error: it, or one that it was raised from, is a backend's.

    Those are torch's `DistError`, and the bare `RuntimeError` of gloo and NCCL, which name themselves in its message. A
    user's error is none, whatever its words.
    """
    while error is not None:
        is_of_backend = type(error) is RuntimeError and _BACKEND.search(str(error)) is not None
        if is_of_backend or isinstance(error, dist.DistError):
            return True
        error = error.__cause__
    return False


@contextmanager
def _timeout_of_new_groups(timeout_s: float) -> Iterator[None]:
    """Set the timeout of every new process group in the block; torch has no setting for groups that it makes itself."""
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names}
    for name in names:
        setattr(distributed_c10d, name, timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)


@contextmanager
def _known_warnings() -> Iterator[None]:
    """Suppress torch's warnings, in the block, about deliberate choices of Atoll.

    Local outputs are views, which are never written to; a tensor that is sharded twice over one dimension is gathered
    in two steps.
    """
    redistribute = logging.getLogger("torch.distributed.tensor._redistribute")
    level = redistribute.level
    redistribute.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
            yield
    finally:
        redistribute.setLevel(level)
