"""The readings that all processes share: processor time, memory, files, garbage collector, disk and certificate."""

import gc
import os
import time
from contextlib import suppress
from pathlib import Path

from atoll.protocol.identity.keeper import Keeper
from atoll.telemetry.instruments import IDENTITY, Reading

BEGUN = time.time()
"""Instant at which this module was imported, at the start of its process."""


def read_process() -> Reading:
    """Return the values of this process now."""
    times = os.times()
    found: Reading = {
        "process.cpu.time": [({"cpu.mode": "user"}, times.user), ({"cpu.mode": "system"}, times.system)],
        "process.uptime": [({}, time.time() - BEGUN)],
        "cpython.gc.collections": [
            ({"cpython.gc.generation": generation}, stats["collections"])
            for generation, stats in enumerate(gc.get_stats())
        ],
    }
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found["process.memory.usage"] = [({}, pages * os.sysconf("SC_PAGE_SIZE"))]
        found["process.file_descriptor.usage"] = [({}, len(os.listdir("/proc/self/fd")))]
    return found


def free_bytes(folder: Path) -> Reading:
    """Return the free bytes of a folder's disk; nothing, if it cannot be read."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        return {"atoll.disk.free": [({}, disk.f_bavail * disk.f_frsize)]}
    return {}


def certificate_end(keeper: Keeper | None) -> Reading:
    """Return the end of a process's certificate; nothing of an insecure process."""
    if keeper is None:
        return {}
    credential = keeper.current
    return {"atoll.certificate.expiry_time": [({IDENTITY: credential.identity.uri}, credential.leaf.expires_at)]}
