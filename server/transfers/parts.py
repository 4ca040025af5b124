"""The streams of one update's parts: each brings the part's bytes, and all together get one verdict.

Without aggregation ranks all parts arrive at one process, and are collected here. A rank has different streams
(`server/ranks/reported_parts.py`), because the coordinator collects.

A stream that ends early leaves its part incomplete at the byte where it stopped, and the kept parts on disk. So nothing
is lost with this object, which lives while a stream of the update is open.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import chain
from typing import Any, Protocol

from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import Digest, RunId
from atoll.server.errors import StoreCorrupted
from atoll.server.files.run_store import KeptUpdate, RunStore
from atoll.server.parts.gathering import Gathering


class JudgingParts(Protocol):
    """Judge of an update in parts; `uploads.Judging` is one."""

    async def cover(self, parts: Iterable[PartManifest]) -> pb.Verdict | None:
        """Return the refusal of an update whose combined parts do not cover each element of the model once."""

    async def decide(self, kept: KeptUpdate | None) -> pb.Verdict:
        """Decide about a sound update that is durable here."""


class PartStream(Protocol):
    """Stream of one part, or all streams of one update. The judge's type depends on the process."""

    async def begin(self, part: PartManifest, judge: Any) -> bool:
        """Record the stream of a part; return whether its bytes are wanted."""

    async def keep(self, part: PartManifest) -> None:
        """Record that a part is sound and durable."""

    def refuse(self, verdict: pb.Verdict) -> None:
        """Record that the update is refused because of a part's bytes."""

    async def verdict(self, part: PartManifest, judge: Any) -> pb.Verdict | None:
        """Return the verdict on the update; None: the part is kept, and others are missing."""


class PartStreams(Protocol):
    """Streams of parts that a process receives."""

    come_here: bool
    """Whether all parts of an update arrive at this process, which then reserves room for all of them."""

    def of(
        self, store: RunStore, manifest: UpdateManifest, digest: Digest, part: PartManifest, compute: Executor
    ) -> AbstractAsyncContextManager[PartStream]:
        """Provide the stream of a part, within the block."""


class Parts:
    """Parts of one update, for all streams of them."""

    def __init__(self, store: RunStore, manifest: UpdateManifest, digest: Digest, compute: Executor) -> None:
        self._store, self._manifest, self._compute = store, manifest, compute
        self._files = store.parts_of(manifest, digest)
        self._coming: dict[int, PartManifest] = {}
        self._lock = asyncio.Lock()  # held while all parts are checked together, and while the update is decided
        self._gathering: Gathering[pb.Verdict] | None = None
        self.num_streams = 0

    async def begin(self, part: PartManifest, judge: JudgingParts) -> bool:
        """Record the stream of a part; return whether its bytes are wanted: it is not kept, and there is no verdict."""
        async with self._lock:
            if self._gathering is None:
                kept = await on_thread(self._compute, self._files.kept)
                self._gathering = Gathering(len(self._manifest.parts), kept)
            self._coming[part.index] = part
            is_wanted = self._gathering.begin(part.index)
            await self._judge_together(self._gathering, judge)
            return is_wanted and self._gathering.verdict is None

    async def keep(self, part: PartManifest) -> None:
        """Record that a part is sound and durable."""
        assert self._gathering is not None
        self._gathering.keep(part.index)
        crash_points.reached("upload.part_kept")

    def refuse(self, verdict: pb.Verdict) -> None:
        """Record that the update is refused because of one part's bytes."""
        assert self._gathering is not None
        self._gathering.verdict = verdict

    async def verdict(self, part: PartManifest, judge: JudgingParts) -> pb.Verdict | None:
        """Return the verdict on the update, which is decided when its last part is kept; None: not yet."""
        gathering = self._gathering
        assert gathering is not None
        async with self._lock:
            await self._judge_together(gathering, judge)
            if gathering.verdict is None and gathering.is_whole:
                async with self._sending_damaged_again(gathering):
                    whole = await on_thread(self._compute, self._store.keep_whole, self._manifest)
                crash_points.reached("upload.before_accept")
                gathering.verdict = await judge.decide(whole)
            return gathering.verdict

    @asynccontextmanager
    async def _sending_damaged_again(self, gathering: Gathering[pb.Verdict]) -> AsyncIterator[None]:
        """Request all parts again if a kept part is found damaged on the disk within the block."""
        try:
            yield
        except StoreCorrupted:
            gathering.kept.clear()
            await on_thread(self._compute, self._files.discard)
            raise

    async def _judge_together(self, gathering: Gathering[pb.Verdict], judge: JudgingParts) -> None:
        """Check all manifests together as soon as they are known, before the last part's bytes are accepted."""
        if gathering.verdict is not None or not gathering.must_be_covered:
            return
        coming = dict(self._coming)  # a stream may end meanwhile
        kept = self._files.manifests(gathering.kept - coming.keys())
        async with self._sending_damaged_again(gathering):
            gathering.verdict = await judge.cover(chain(coming.values(), kept))
        gathering.covers = gathering.verdict is None

    def end(self, part: PartManifest) -> None:
        """Record the end of a part's stream, whatever the result."""
        if self._coming.pop(part.index, None) is not None and self._gathering is not None:
            self._gathering.end(part.index)


class PartsUnderWay:
    """Updates in parts that have an open stream."""

    come_here = True

    def __init__(self) -> None:
        self._parts: dict[tuple[RunId, Digest], Parts] = {}

    @asynccontextmanager
    async def of(
        self, store: RunStore, manifest: UpdateManifest, digest: Digest, part: PartManifest, compute: Executor
    ) -> AsyncIterator[Parts]:
        """Provide the parts of an update for the stream of one of them, within the block."""
        key = manifest.run_id, digest
        parts = self._parts.get(key) or Parts(store, manifest, digest, compute)
        self._parts[key] = parts
        parts.num_streams += 1
        try:
            yield parts
        finally:
            parts.end(part)
            parts.num_streams -= 1
            if not parts.num_streams:
                del self._parts[key]
