"""The retention of a run's files and rows, and the garbage collection of all others.

The machine's memory runs ahead of the disk: a replay may still need files that the machine no longer refers to. So a
collection uses only the state after an event that is on disk.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import Digest, RunId
from atoll.server.folding.reducer import Reducer
from atoll.server.hosting.run_parts import SharedParts
from atoll.server.journal.pruning import Stay
from atoll.server.required.keep import Keep

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Shortest time between two collections [s]; a round's end starts one, and an empty round takes milliseconds."""

FOLLOWED_S = 60.0
"""Time for which a run can be followed from any of its entries [s]: a follower may be away for as long."""

K = TypeVar("K")
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Function that starts a task whose failure ends the process."""


class Retention(ABC, Generic[K]):
    """Retention of one run: deletes unneeded data, at once or after INTERVAL_S; a subclass names what to keep (`K`).

    Args:
        run_id: the run.
        shared: the parts that all runs share.
        spawn: see `Spawn`.
    """

    def __init__(self, run_id: RunId, shared: SharedParts, spawn: Spawn) -> None:
        self._run_id, self._shared, self._spawn = run_id, shared, spawn
        self._next: K | None = None  # what must be kept after the newest event, if no collection has run since
        self._task: asyncio.Task[None] | None = None
        self._is_last = asyncio.Event()

    def begin(self, keep: K) -> None:
        """Schedule a collection of all that `keep` does not name, at most one in INTERVAL_S [s]; return at once."""
        self._next = keep
        if self._task is None or self._task.done():
            self._task = self._spawn(self._collect_while_there_is_news())

    async def finish(self) -> None:
        """Collect the rest at once and wait until that is done; called when the run has ended."""
        self._is_last.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._is_last.clear()

    async def _collect_while_there_is_news(self) -> None:
        while (keep := self._next) is not None:
            self._next = None
            try:
                await self.collect(keep)
            except OSError as error:  # even a full disk: pruning writes before it frees
                text = "run %s: garbage could not be collected and remains for now: %s"
                logger.error(text, self._run_id, error, extra={"run": self._run_id})
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_last.wait(), INTERVAL_S)

    @abstractmethod
    async def collect(self, keep: K) -> None:
        """Delete everything that need not be kept; raises OSError."""

    async def _prune(self, stay: Stay) -> None:
        await on_thread(self._shared.journal_thread, partial(self._shared.journal.prune, self._run_id, stay))


@dataclass(frozen=True, slots=True)
class _Live:
    """Set of updates to keep, evaluated at each deletion on the deleting thread, so that the answer is current."""

    is_live: Callable[[Digest], bool]

    def __contains__(self, digest: object) -> bool:
        return self.is_live(Digest(str(digest)))


class UpdateRetention(Retention[Keep]):
    """Retention of a run of rounds: updates, old versions, the journal before the last snapshots.

    Args:
        run_id: the run.
        reducer: the run's files.
        shared: the parts that all runs share.
        spawn: see `Spawn`.
    """

    def __init__(self, run_id: RunId, reducer: Reducer, shared: SharedParts, spawn: Spawn) -> None:
        super().__init__(run_id, shared, spawn)
        self._reducer, self._is_in_flight = reducer, partial(shared.is_in_flight, run_id)
        self._received: dict[Digest, int] = {}  # updates received since the last collection -> sequence number
        self._live: _Live | None = None  # number of the last collection

    def received(self, digest: Digest, seq: int) -> None:
        """Record an update that an event has received: it may count in a round that has not ended."""
        self._received[digest] = seq

    def is_unused(self, digest: Digest) -> bool:
        """Return True if no decision needed the update at the last collection; its file may be at a rank."""
        return self._live is not None and digest not in self._live

    async def collect(self, keep: Keep) -> None:
        """Delete updates that no decision can refer to, old versions, and the journal before the last snapshots."""
        self._received = {digest: seq for digest, seq in self._received.items() if seq > keep.seq}

        live = self._live = _Live(
            lambda digest: digest in keep.updates or digest in self._received or self._is_in_flight(digest)
        )
        await self._reducer.collect_garbage(
            live,
            pinned_versions=set(keep.versions),
            current=keep.version,
            oldest_base=None if keep.is_over else keep.oldest_base,
        )
        stay = Stay(
            since=keep.at - FOLLOWED_S,
            rounds=self._shared.keep_rounds,
            live=live,
            sites=keep.sites,
            pinned=keep.versions,
        )
        await self._prune(stay)
