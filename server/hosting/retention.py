"""The retention of a run's files and rows, and the garbage collection of all others.

The machine's memory runs ahead of the disk: a replay may still need what the machine no longer refers to. So a
collection starts only from the end of a round that is written.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import Digest, RunId
from atoll.server.folding.reducer import Reducer
from atoll.server.journal.journal import Journal
from atoll.server.journal.pruning import Stay
from atoll.server.required.keep import Keep

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""The least time between two collections [s]; a round's end starts one, and an empty round takes milliseconds."""

FOLLOWED_S = 60.0
"""The time for which a run can be followed from any of its entries [s]: a follower may be away for as long."""


@dataclass(frozen=True, slots=True)
class _Live:
    """The updates that stay, evaluated at each deletion on the thread that deletes, so the answer is current."""

    is_live: Callable[[Digest], bool]

    def __contains__(self, digest: object) -> bool:
        return self.is_live(Digest(str(digest)))


class Retention:
    """Deletes what one run no longer needs: updates, old versions, the journal before the last snapshots.

    Args:
        run_id: the run.
        reducer: the run's files.
        journal: the run's rows.
        journal_thread: the only thread that writes to `journal`.
        keep_rounds: the number of round records that stay.
        is_in_flight: returns True while an update is being received or judged.
        spawn: starts a task whose failure ends the process.
    """

    def __init__(
        self,
        run_id: RunId,
        reducer: Reducer,
        journal: Journal,
        journal_thread: Executor,
        *,
        keep_rounds: int,
        is_in_flight: Callable[[Digest], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._is_in_flight = is_in_flight
        self._run_id, self._reducer, self._keep_rounds = run_id, reducer, keep_rounds
        self._journal, self._journal_thread = journal, journal_thread
        self._spawn = spawn
        self._received: dict[Digest, int] = {}  # updates received since the last collection -> sequence number
        self._keep: Keep | None = None  # that of the newest ended round without a collection
        self._live: _Live | None = None  # that of the last collection
        self._task: asyncio.Task[None] | None = None
        self._is_last = asyncio.Event()

    def received(self, digest: Digest, seq: int) -> None:
        """Note an update that an event has received: it may count in a round that has not ended."""
        self._received[digest] = seq

    def round_ended(self, keep: Keep) -> None:
        """Collect garbage, at once or after INTERVAL_S: the end of a round or of the run is on disk."""
        self._keep = keep
        if self._task is None or self._task.done():
            self._task = self._spawn(self._collect_while_rounds_end())

    def is_unused(self, digest: Digest) -> bool:
        """Return True if no decision needed the update at the last collection; its file may lie at a rank."""
        return self._live is not None and digest not in self._live

    async def finish(self) -> None:
        """Collect the rest at once and wait until that is done; called when the run has ended."""
        self._is_last.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._is_last.clear()

    async def _collect_while_rounds_end(self) -> None:
        while (keep := self._keep) is not None:
            self._keep = None
            await self.collect(keep)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_last.wait(), INTERVAL_S)

    async def collect(self, keep: Keep) -> None:
        """Delete updates that no decision can refer to, old versions, and the journal before the last snapshots."""
        self._received = {digest: seq for digest, seq in self._received.items() if seq > keep.seq}

        live = self._live = _Live(
            lambda digest: digest in keep.updates or digest in self._received or self._is_in_flight(digest)
        )
        stay = Stay(
            since=keep.at - FOLLOWED_S,
            rounds=self._keep_rounds,
            live=live,
            sites=keep.sites,
            pinned=keep.versions,
        )
        prune = partial(self._journal.prune, self._run_id, stay)
        try:
            await self._reducer.collect_garbage(
                live,
                pinned_versions=set(keep.versions),
                current=keep.version,
                oldest_base=None if keep.is_over else keep.oldest_base,
            )
            await on_thread(self._journal_thread, prune)
        except OSError as error:  # also a full disk: pruning writes before it frees
            text = "run %s: garbage could not be collected and stays for now: %s"
            logger.error(text, self._run_id, error, extra={"run": self._run_id})
