"""The memory of a rank, as a machine has it: what does not change from one start to the next."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.ground.printable import count_of

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """The ranks of one machine."""

    num_ranks: int
    """Ranks on it (>= 1)."""
    memory: int
    """Memory of one of them [bytes]."""


def machine_of(device: str, num_ranks: int) -> Machine:
    """Return this machine.

    Args:
        device: "cpu" or "cuda".
        num_ranks: ranks on it, each with a GPU, or all with an equal part of its memory.

    Raises:
        ValueError: it has fewer GPUs.
    """
    if device == "cpu":
        return Machine(num_ranks, memory_of_host() // num_ranks)
    if torch.cuda.device_count() < num_ranks:
        raise ValueError(
            f"{count_of(num_ranks, 'rank needs', 'ranks need')} as many GPUs, and this machine has "
            f"{torch.cuda.device_count()}"
        )
    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(num_ranks)]
    return Machine(num_ranks, min(sizes))


def memory_of_host(cgroups: Path = CGROUPS, of_process: Path = Path("/proc/self/cgroup")) -> int:
    """Return the physical memory of this machine, or the least limit of this process's control groups [bytes].

    Args:
        cgroups: the root of the hierarchy (cgroup v2: `memory.max`).
        of_process: the file with the group of this process.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        line = next(line for line in of_process.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return total
    inner = cgroups / line.removeprefix("0::").lstrip("/")
    groups = [group for group in (inner, *inner.parents) if group.is_relative_to(cgroups)]
    return min([total, *(limit for group in groups if (limit := _limit(group)) is not None)])


def _limit(group: Path) -> int | None:
    try:
        text = (group / "memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
