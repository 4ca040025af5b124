"""What stays on disk when a round has ended, and the deletion of the rest. Memory runs ahead of the disk: what the
machine no longer needs, a replay may still need, so everything here starts from a round's end that has been written.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.protocol.vocabulary import TERMINAL, Digest, RunId, Version
from atoll.server.folding.reducer import Reducer
from atoll.server.journal.journal import Journal
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.threads import on_thread

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Garbage is collected when a round ends, but not more often than this: empty rounds take milliseconds."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What must stay, taken from the state that the event of a round's end left."""

    seq: int  # of that event
    version: Version
    updates: frozenset[Digest]
    versions: frozenset[Version]
    oldest_base: Version  # of an update that may still count
    is_over: bool  # the run has ended: nothing that is half here is waited for

    @classmethod
    def after(cls, seq: int, machine: RunMachine, policy: StragglerPolicy) -> "Keep":
        """What the machine still refers to, and what a late update may name as its base.

        The same event may have ended one round and opened the next.
        """
        ledger = machine.ledger
        updates = [*ledger.carried.values(), *ledger.waiting, *(machine.round.held if machine.round else ())]
        stalest = max(0, ledger.version - policy.max_staleness)
        return cls(
            seq,
            ledger.version,
            frozenset(update.digest for update in updates),
            frozenset((*ledger.unevaluated, *map(Version, range(stalest, ledger.version)))),
            Version(stalest) if policy.takes_stale else ledger.version,
            ledger.state in TERMINAL,
        )


@dataclass(frozen=True, slots=True)
class _Live:
    """The updates that stay. Asked at the moment of each deletion, from the thread that deletes: no look is too old."""

    is_live: Callable[[Digest], bool]

    def __contains__(self, digest: object) -> bool:
        return self.is_live(Digest(str(digest)))


class Retention:
    """Deletes what one run no longer needs: updates, old versions, the journal before the last snapshots.

    Args:
        run_id: of the run.
        reducer: its files.
        journal: its rows, written on `journal_thread` alone.
        journal_thread: see there.
        keep_rounds: records that stay.
        is_in_flight: whether an update is being received and judged.
        spawn: runs a coroutine whose failure ends the process.
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
        self._received: dict[Digest, int] = {}  # updates that came in since the last collection, by their event
        self._keep: Keep | None = None  # of the newest round that has ended and was not cleaned up after
        self._live: _Live | None = None  # of the last collection
        self._task: asyncio.Task[None] | None = None
        self._is_last = asyncio.Event()

    def received(self, digest: Digest, seq: int) -> None:
        """An update was received by this event, and may count in a round that has not ended."""
        self._received[digest] = seq

    def round_ended(self, keep: Keep) -> None:
        """The end of a round, or of the run, is on disk: collect what is left over, now or soon."""
        self._keep = keep
        if self._task is None or self._task.done():
            self._task = self._spawn(self._collect_while_rounds_end())

    def is_unused(self, digest: Digest) -> bool:
        """Whether the last collection found no decision that could need an update; it may lie elsewhere."""
        return self._live is not None and digest not in self._live

    async def finish(self) -> None:
        """The run has ended: collect what is left over at once, and wait until that is done."""
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
        prune = partial(self._journal.prune, self._run_id, keep_rounds=self._keep_rounds, live=live)
        try:
            await self._reducer.collect_garbage(
                live,
                pinned_versions=set(keep.versions),
                current=keep.version,
                oldest_base=None if keep.is_over else keep.oldest_base,
            )
            await on_thread(self._journal_thread, prune)
        except OSError as error:  # a full disk, too: pruning writes before it frees
            logger.error("run %s: garbage stays for now: %s", self._run_id, error)
