"""The probe of the folder that an agent and all its ranks share: each writes a file that rank 0 reads, and back."""

import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

from atoll.parallel.world import World
from atoll.task.errors import TaskBroken

SEEN_S = 60.0
"""Longest wait for a file of another machine [s]; NFS shows a new name after up to a minute."""

RETRY_S = 0.05


def check_shared(folder: Path, store: Any, world: World, timeout_s: float = SEEN_S) -> None:
    """Check that all ranks read and write one folder; each calls it once.

    Args:
        folder: the folder of the crew, as this rank names it.
        store: the store of the ranks, for this alone.
        world: the `World` of this rank.
        timeout_s: the longest wait for a file of another rank [s].

    Raises:
        TaskBroken: they do not; the message names the ranks and their machines.
    """
    if world.is_first:
        store.set("token", secrets.token_hex(8))
    token, host = store.get("token").decode(), os.uname().nodename
    mine = folder / f"token.{token}.{world.rank}"
    store.set(f"host/{world.rank}", host)
    try:
        mine.touch()
        others = range(1, world.size) if world.is_first else [0]
        missing = _missing(folder, token, list(others), timeout_s)
        store.set(f"done/{world.rank}", "")
        store.wait([f"done/{rank}" for rank in range(world.size)])
    finally:
        mine.unlink(missing_ok=True)
    if missing:
        there = ", ".join(f"rank {rank} ({store.get(f'host/{rank}').decode()})" for rank in missing)
        raise TaskBroken(
            f"the machines share no folder: rank {world.rank} ({host}) does not see in {folder} what {there} has "
            "written there; set crew.folder to a folder of a file system that all of them mount"
        )


def _missing(folder: Path, token: str, ranks: list[int], timeout_s: float) -> list[int]:
    """Return the ranks whose files do not appear."""
    until, pause = time.monotonic() + timeout_s, threading.Event()
    while missing := [rank for rank in ranks if not (folder / f"token.{token}.{rank}").exists()]:
        if time.monotonic() >= until:
            break
        pause.wait(RETRY_S)
    return missing
