"""The store at which the ranks of one start meet, whichever launcher has started them."""

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from atoll.parallel.world import World, meeting_place

PORT = "atoll/port"
"""The key of the newest start's store in a store that outlives the ranks."""

CONNECT_S = 5.0
"""Longest wait for the store of a start that may be over [s]."""


def store_of(world: World, timeout_s: float, environ: Mapping[str, str] = os.environ) -> Any:
    """Return a store of the ranks of this start alone.

    torchrun keeps the store at MASTER_ADDR and MASTER_PORT over restarts of its ranks (always with --master-addr, and
    with c10d unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), where the backends would find the addresses of dead ranks.
    Rank 0 then opens another store, and names its port there.

    Args:
        world: the `World` of this rank.
        timeout_s: longest wait for another rank [s].
        environ: the environment variables of the launcher.

    Raises:
        ValueError: several ranks, and no address where they meet.
        DistError: they do not meet in time.
    """
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    address, port = meeting_place(world, environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _store(address, port, world, world.is_first, timeout_s)
    of_launcher = _store(address, port, world, False, timeout_s)
    if world.is_first:
        store = _store(address, 0, world, True, timeout_s)
        of_launcher.set(PORT, str(store.port))
        return store
    until = time.monotonic() + timeout_s
    while True:  # at first there may be the port of an earlier start
        try:
            store = _store(address, int(of_launcher.get(PORT)), world, False, min(CONNECT_S, timeout_s))
        except dist.DistError:
            if time.monotonic() > until:
                raise
        else:
            store.set_timeout(timedelta(seconds=timeout_s))
            return store


def _store(address: str, port: int, world: World, is_server: bool, timeout_s: float) -> Any:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world.size, is_server, timeout=timeout, wait_for_workers=False
    )
