"""The updates in parts that ranks receive: which parts are kept, at which rank, and the one verdict.

A rank asks here before it accepts a part's bytes, and reports the part once it is durable there. An update is complete,
and is decided, when every part is kept at some rank. A part counts at the rank that reported it first. Nothing here
survives the process: a client without a verdict opens every part again, and the ranks report their parts.

A rank deletes a kept part only after it has asked (`withdraw`, and `Retention` for parts recorded here). So a part that
counts as kept is kept.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.threads import off_loop, on_thread
from atoll.protocol.vocabulary import ClientId, Digest, RunId
from atoll.server.errors import StoreCorrupted
from atoll.server.files.part_notes import PartNotes
from atoll.server.files.run_store import KeptUpdate, RunStore
from atoll.server.journal.codec import StoredUpdateMeta, encode_meta
from atoll.server.parts.gathering import Gathering, newest_first
from atoll.server.rounds.events import Update
from atoll.server.transfers.timeouts import PARTIALS_MAX

logger = logging.getLogger(__name__)


class JudgingSpread(Protocol):
    """Judge of an update in parts; `hosting.update_judge.UpdateJudge` implements it."""

    @property
    def manifest(self) -> UpdateManifest:
        """The update's manifest, the root."""

    @property
    def update(self) -> Update:
        """The update, as the machine knows it."""

    async def cover(self, parts: Iterable[PartManifest]) -> pb.Verdict | None:
        """Return the refusal of an update whose combined parts do not cover each element of the model once."""

    async def old_verdict(self) -> pb.Verdict | None:
        """Return the verdict that was given meanwhile, if any."""

    async def decide(self, kept: KeptUpdate | None) -> pb.Verdict:
        """Decide about a sound update that is durable."""


@dataclass(slots=True, eq=False)
class _Update:
    """State of an update in parts that has no verdict yet."""

    key: tuple[RunId, Digest]
    owner: tuple[RunId, ClientId]
    update: Update
    notes: PartNotes
    gathering: Gathering[pb.Verdict]
    ranks: dict[int, int] = field(default_factory=dict)
    """The rank of each kept part."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held while parts are recorded and checked together, and until the decision is on disk."""


@dataclass(frozen=True, slots=True)
class Report:
    """Part that is durable at a rank."""

    rank: int
    findings: StoredUpdateMeta
    """Findings about the bytes of the part, with its manifest."""


class SpreadParts:
    """Updates in parts of all runs that have no verdict yet."""

    def __init__(self) -> None:
        self._updates: dict[tuple[RunId, Digest], _Update] = {}
        self._newest: dict[tuple[RunId, ClientId], list[str]] = {}

    def holds(self, run_id: RunId, digest: Digest) -> bool:
        """Return whether a part of an update counts as kept, so that its bytes must be kept."""
        return (run_id, digest) in self._updates

    async def open(self, judge: JudgingSpread, store: RunStore, index: int, manifest: bytes) -> pb.OpenedUpdate:
        """Return what a rank should do with a part that a client opens there.

        Args:
            judge: the judge of the update.
            store: the files of the run.
            index: index of the part.
            manifest: manifest of the part.

        Raises:
            OSError: a note cannot be written or read; a later call may succeed.
        """
        findings = StoredUpdateMeta(manifest, {}, {})
        is_kept, verdict = await self._shielded(judge, store, index, findings, rank=None)
        return pb.OpenedUpdate(verdict=verdict, kept=is_kept and verdict is None)

    async def keep(self, judge: JudgingSpread, store: RunStore, index: int, report: Report) -> pb.UploadReply:
        """Record that a part is durable at a rank; return the verdict if it was the last one. See `open`."""
        _, verdict = await self._shielded(judge, store, index, report.findings, rank=report.rank)
        return pb.UploadReply(kept=True) if verdict is None else pb.UploadReply(verdict=verdict)

    def withdraw(self, run_id: RunId, digest: Digest) -> bool:
        """Stop counting all parts of an update as kept; return False if it is being decided now."""
        update = self._updates.get((run_id, digest))
        if update is not None and update.lock.locked():
            return False
        if update is not None:
            self._forget(update)
        return True

    def prune(self, run_id: RunId, is_hopeless: Callable[[Update], bool]) -> None:
        """Forget the updates of a run that can no longer count."""
        for (of_run, _), update in list(self._updates.items()):
            if of_run == run_id and not update.lock.locked() and is_hopeless(update.update):
                self._forget(update)

    async def _shielded(
        self, judge: JudgingSpread, store: RunStore, index: int, findings: StoredUpdateMeta, *, rank: int | None
    ) -> tuple[bool, pb.Verdict | None]:
        """Return whether the part is kept, and the verdict: a decision continues if the rank's call is cut."""
        return await asyncio.shield(asyncio.ensure_future(self._noted(judge, store, index, findings, rank)))

    async def _noted(
        self, judge: JudgingSpread, store: RunStore, index: int, findings: StoredUpdateMeta, rank: int | None
    ) -> tuple[bool, pb.Verdict | None]:
        while True:
            update = self._of(judge, store)
            async with update.lock:
                gathering = update.gathering
                if gathering.verdict is None and not self._knows(update):
                    continue  # forgotten while this call waited
                if gathering.verdict is None:
                    await self._go_on(update, judge, index, findings, rank)
                return index in gathering.kept, gathering.verdict

    async def _go_on(
        self, update: _Update, judge: JudgingSpread, index: int, findings: StoredUpdateMeta, rank: int | None
    ) -> None:
        """Record a part and check what is known, up to the decision; with a verdict the update is forgotten."""
        gathering = update.gathering
        gathering.verdict = await judge.old_verdict()  # another stream may have received it
        try:
            if gathering.verdict is None:
                await self._note(update, index, findings, rank)
                await self._judge(update, judge)
        except StoreCorrupted:
            self._forget(update)
            raise
        if gathering.verdict is not None:
            self._forget(update)
            await on_thread(None, update.notes.discard)

    async def _note(self, update: _Update, index: int, findings: StoredUpdateMeta, rank: int | None) -> None:
        gathering = update.gathering
        if index in gathering.kept or (rank is None and index in gathering.coming):
            return
        await on_thread(None, update.notes.note, index, findings)
        gathering.begin(index)
        if rank is not None:
            gathering.keep(index)
            update.ranks[index] = rank

    async def _judge(self, update: _Update, judge: JudgingSpread) -> None:
        """Check all manifests together once they are known, and decide once all parts are kept."""
        gathering = update.gathering
        if gathering.must_be_covered:
            gathering.verdict = await judge.cover(update.notes.manifests())
            gathering.covers = gathering.verdict is None
        if gathering.verdict is None and gathering.is_whole:
            ranks = tuple(update.ranks[index] for index in range(gathering.num_parts))
            meta = await on_thread(None, update.notes.whole, ranks)
            encoded = await off_loop(len(meta.manifest) + 100 * len(meta.magnitudes), encode_meta, meta)
            crash_points.reached("upload.before_accept")
            gathering.verdict = await judge.decide(KeptUpdate(encoded, None))

    def _of(self, judge: JudgingSpread, store: RunStore) -> _Update:
        """Return the state of an update; of a client's updates, only the newest are kept."""
        root, digest = judge.manifest, judge.update.digest
        key, owner = (root.run_id, digest), (root.run_id, root.client_id)
        if key not in self._updates:
            gathering: Gathering[pb.Verdict] = Gathering(len(root.parts), set())
            self._updates[key] = _Update(key, owner, judge.update, store.notes_of(root, digest), gathering)
        newest, older = newest_first(self._newest.get(owner, ()), digest, PARTIALS_MAX)
        self._newest[owner] = newest + older
        for old in older:
            pushed_out = self._updates[root.run_id, Digest(old)]
            if not pushed_out.lock.locked():
                self._forget(pushed_out)
        return self._updates[key]

    def _knows(self, update: _Update) -> bool:
        return self._updates.get(update.key) is update

    def _forget(self, update: _Update) -> None:
        if self._knows(update):
            del self._updates[update.key]
            self._newest[update.owner].remove(update.key[1])
            if not self._newest[update.owner]:
                del self._newest[update.owner]
