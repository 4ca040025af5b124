"""The functions of ranks for these tests."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from atoll.parallel.world import process_group, read_world


def note(folder: str, deed: str) -> None:
    """Note the process and the sum over all ranks; then do a deed, once."""
    world, place = read_world(), Path(folder)
    with process_group(world):
        value = torch.tensor(world.rank + 1)
        dist.all_reduce(value)
        with (place / f"rank.{world.rank}").open("a") as file:
            file.write(f"{os.getpid()} {int(value)} {torch.__version__}\n")
        if deed == "wait":
            time.sleep(600)
        dist.barrier()
        if deed == "fail once" and world.rank == 1 and not (place / "failed").exists():
            (place / "failed").touch()
            raise SystemExit(3)
        if deed == "fail":
            raise SystemExit(3)
