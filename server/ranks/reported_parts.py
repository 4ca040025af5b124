"""The parts of updates at an aggregation rank: each is kept separately and reported to the coordinator, which decides.

Other parts of the same update may arrive at other ranks. Until its report a part may be discarded freely; from then on
only with the coordinator's consent, because it may be accepted meanwhile.
"""

from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Protocol

from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import Digest
from atoll.server.errors import StoreCorrupted
from atoll.server.files.run_store import RunStore
from atoll.server.journal.codec import StoredUpdateMeta


class Reporting(Protocol):
    """Judge of an update in parts at a rank; `rank.RemoteJudge` implements it."""

    is_kept: bool
    """Whether the coordinator has said that the part is durable, here or at another rank."""

    async def report(self, findings: StoredUpdateMeta) -> pb.Verdict | None:
        """Report a part that is durable here; return the verdict on the update, None while other parts are missing."""

    async def withdraw(self, digest: Digest) -> bool:
        """Return whether kept parts of an update may be deleted: they count nowhere, and none is accepted."""


class ReportedPart:
    """One part of an update, for its stream; see `uploads.PartStream`."""

    def __init__(self, store: RunStore, manifest: UpdateManifest, digest: Digest, compute: Executor) -> None:
        self._store, self._digest, self._compute = store, digest, compute
        self._files = store.parts_of(manifest, digest)
        self._refusal: pb.Verdict | None = None

    async def begin(self, part: PartManifest, judge: Reporting) -> bool:
        """Return whether the part's bytes are wanted: it is not kept, here or at another rank."""
        return not judge.is_kept and not await on_thread(self._compute, self._files.settle, part.index)

    async def keep(self, part: PartManifest) -> None:
        """Move a sound and durable part to where it is deleted only with the coordinator's consent."""
        await on_thread(self._compute, self._files.settle, part.index)
        crash_points.reached("upload.part_kept")

    def refuse(self, verdict: pb.Verdict) -> None:
        """Record that the update is refused because of this part's bytes."""
        self._refusal = verdict

    async def verdict(self, part: PartManifest, judge: Reporting) -> pb.Verdict | None:
        """Report the part, and return the verdict on the update; None while other parts are missing."""
        if self._refusal is not None or judge.is_kept:
            return self._refusal
        try:
            findings = await on_thread(self._compute, self._files.findings, part.index)
        except StoreCorrupted:
            if await judge.withdraw(self._digest):  # the client sends it again
                await on_thread(self._compute, self._store.discard_parts, self._digest)
            raise
        return await judge.report(findings)


class ReportedParts:
    """Parts that arrive at a rank; see `uploads.PartStreams`."""

    come_here = False

    @asynccontextmanager
    async def of(
        self, store: RunStore, manifest: UpdateManifest, digest: Digest, part: PartManifest, compute: Executor
    ) -> AsyncIterator[ReportedPart]:
        """Provide the part for its upload stream."""
        yield ReportedPart(store, manifest, digest, compute)
