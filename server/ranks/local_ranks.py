"""The aggregation ranks that a coordinator starts on its machine, and restarts when one dies.

They end with the coordinator, however it ends: only its process holds the other end of their standard input.
"""

import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from atoll.ground.backoff import delay
from atoll.ground.process import crash_points
from atoll.protocol.settings import ConfigError
from atoll.server.identity.authority import NotSigned
from atoll.server.journal.placement import state_of_rank

logger = logging.getLogger(__name__)

AGAIN_S = (0.2, 5.0)
"""Wait before a dead rank is restarted: the first and the longest one; doubled after each early death [s]."""

EARLY_S = 10.0
"""Lifetime below which a death counts as early [s]."""


class SpawnedRanks:
    """Processes of the local ranks, one for each.

    Args:
        num_ranks: the number of ranks.
        state: the coordinator's state directory; each rank has a folder in it.
        address: the coordinator's address.
        max_connections: the clients that may be connected to each rank.
        insecure: nothing is authenticated; otherwise each rank's credential is in its folder.
        equip: gives a rank a valid credential before each start, because the last one may have expired.
    """

    def __init__(
        self,
        num_ranks: int,
        state: Path,
        address: str,
        *,
        max_connections: int,
        insecure: bool,
        equip: Callable[[int], Awaitable[None]],
    ) -> None:
        self._num_ranks, self._state, self._address = num_ranks, state, address
        self._max_connections, self._insecure, self._equip = max_connections, insecure, equip
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all ranks."""
        self._tasks = [asyncio.ensure_future(self._keep(rank)) for rank in range(self._num_ranks)]

    async def stop(self) -> None:
        """End all ranks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, rank: int) -> None:
        num_early, environment, rng = 0, dict(os.environ), random.Random()
        while True:
            begun = time.monotonic()
            try:
                await self._equip(rank)
                how = await self._life(rank, environment)
            except (OSError, ConfigError, NotSigned) as error:
                how = f"cannot be started ({error})"
            num_early = 0 if time.monotonic() - begun > EARLY_S else num_early + 1
            wait = delay(num_early, *AGAIN_S, rng)
            logger.error("aggregation rank %d %s; it is restarted in %.1f s", rank, how, wait)
            await asyncio.sleep(wait)
            environment.pop(crash_points.VARIABLE, None)  # a drill kills it once

    async def _life(self, rank: int, environment: dict[str, str]) -> str:
        settings = {
            "coordinator": self._address,
            "rank": rank,
            "ranks": self._num_ranks,
            "insecure": self._insecure,
            "max_connections": self._max_connections,
            "state": str(state_of_rank(self._state, rank, self._num_ranks)),
        }
        overrides = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
        command = [sys.executable, "-P", "-c", "from atoll.cli.main import run; run()", "aggregator", "--with-parent"]
        process = await asyncio.create_subprocess_exec(*command, *overrides, stdin=subprocess.PIPE, env=environment)
        try:
            return f"has ended with exit code {await process.wait()}"
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the process's input, which ends it; kill it if it has not ended after 5 s."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(asyncio.shield(process.wait()), 5.0)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
