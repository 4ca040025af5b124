"""The environment of ranks that one machine starts."""

import os
import sys
from collections.abc import Mapping


def environment_of(num_ranks: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of ranks: loopback only, a share of the cores each, a new store after each restart.

    A variable that the user has set stays.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // num_ranks))}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    wanted |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    # with a shared store, gloo would find the addresses of the dead ranks in it
    wanted["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    wanted["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # DDP warns that it looks for unused parameters; errors are raised anyway
    return {name: value for name, value in wanted.items() if name not in environ}
