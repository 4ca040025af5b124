"""The download of a version of the global model: manifest, the policy's admission, and the missing pieces.

A lost connection only delays a download: it resumes over the next one at the byte where it stopped.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import grpc

from atoll.client.disk.model_cache import PartialVersion, PieceDamaged
from atoll.client.disk.stores import Stores
from atoll.client.session.events import Invitation, ModelRequest
from atoll.client.wire.control_stream import Link
from atoll.client.wire.coordinator_connection import CoordinatorConnection
from atoll.client.wire.download import download
from atoll.client.wire.rotating_channel import RotatingChannel
from atoll.client.wire.transfer_log import told
from atoll.ground.printable import printable_size
from atoll.ground.strict_json import ManifestError
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.manifest import VersionManifest, digest_of, parse_version
from atoll.protocol.threads import off_loop, on_thread
from atoll.protocol.vocabulary import FailureReason
from atoll.protocol.wire.stream import StreamBroken, broken_streams

logger = logging.getLogger(__name__)

DAMAGES_MAX = 3
"""Number of damaged pieces of one version after which its download is given up."""

MANIFEST_TIMEOUT_S = 60.0

FINAL = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)
"""Status codes that are final: another attempt at the same download would get them, too."""

T = TypeVar("T")


class NotAdmitted(Exception):
    """Error: the site's policy refuses a job."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


class VersionFetcher:
    """Downloader of versions into the agent's model cache.

    Args:
        stores: the model cache, and the spool that must have room for the update.
        connection: the connection to the coordinator and its aggregation ranks.
        wait: returns the seconds to wait after a number of consecutive failures without progress.
        admit: applies the site's policy once the manifest is known, before the download; raises NotAdmitted.
    """

    def __init__(
        self,
        stores: Stores,
        connection: CoordinatorConnection,
        *,
        wait: Callable[[int], float],
        admit: Callable[[ModelRequest, VersionManifest], Awaitable[None]],
    ) -> None:
        self._cache, self._spool = stores.models, stores.spool
        self._connection, self._wait, self._admit = connection, wait, admit
        self._tidying: asyncio.Future[None] | None = None

    async def fetch(self, request: ModelRequest) -> None:
        """Complete the version that a request names; on return every piece is on disk and checked.

        Raises:
            NotAdmitted: the site's policy refuses the job.
            StreamBroken: the coordinator refuses the download.
            OSError: the disk or the spool has no room, or fails.
            ValueError: the manifest or its layout is not valid, or DAMAGES_MAX pieces arrived damaged.
        """
        digest = request.model_digest
        encoded = request.manifest or await self._persistently(lambda link: _get_manifest(link, request))
        if digest_of(encoded) != digest:
            raise ManifestError(f"the manifest that arrived does not belong to version {digest}")
        manifest = parse_version(encoded)
        await self._admit(request, manifest)
        if isinstance(request, Invitation):
            self._spool.check_room(manifest.num_bytes)
        if not self._cache.is_scanned:
            await on_thread(None, self._cache.scan)
        if self._tidying is not None:
            await asyncio.wait({self._tidying})
        if self._cache.find(digest, manifest) is not None:
            logger.debug("version %s is in the cache", digest[:12])
        elif self._connection.ranks.num_ranks and not request.data:
            await self._fetch_from_ranks(request, manifest)
        else:
            await self._fetch_from_coordinator(request, manifest)

    async def _fetch_from_coordinator(self, request: ModelRequest, manifest: VersionManifest) -> None:
        """Complete a version from the bytes in the request, if it has all of them, or else by download."""
        digest, is_inline = request.model_digest, len(request.data) == manifest.num_bytes
        partial = self._cache.begin(digest, manifest, reuse=not is_inline)
        try:
            await off_loop(manifest.num_bytes, partial.resume)
            if is_inline and not partial.is_complete:
                with suppress(PieceDamaged):  # the download below replaces it
                    partial.append(request.data[partial.data_bytes :])
            if not partial.is_complete:
                await self._persistently(
                    lambda link: _complete(link.connection, request, partial), lambda: partial.data_bytes
                )
            self._cache.finish(digest, manifest, partial)
            self._tidy(manifest)
        finally:
            partial.close()

    async def _fetch_from_ranks(self, request: ModelRequest, manifest: VersionManifest) -> None:
        """Download the version's part from each aggregation rank, all concurrently, and join them."""
        parts = self._cache.begin_parts(request.model_digest, manifest, self._connection.ranks.num_ranks)
        fetching = [asyncio.ensure_future(self._fetch_part(request, rank, part)) for rank, part in enumerate(parts)]
        try:
            await asyncio.gather(*fetching)
            await off_loop(manifest.num_bytes, self._cache.join, request.model_digest, manifest, parts)
        finally:
            for task in fetching:
                task.cancel()
            await asyncio.wait(fetching)
            for part in parts:
                part.close()
            self._tidy(manifest)

    async def _fetch_part(self, request: ModelRequest, rank: int, part: PartialVersion) -> None:
        await off_loop(part.num_bytes, part.resume)
        if not part.is_complete:
            await self._persistently(
                lambda _: _complete(self._connection.ranks.connection(rank), request, part), lambda: part.data_bytes
            )

    def _tidy(self, manifest: VersionManifest) -> None:
        """Delete older versions while the job uses the new one; for 100 MB this takes a third of the download time."""
        self._tidying = asyncio.ensure_future(off_loop(manifest.num_bytes, self._cache.tidy))

    async def _persistently(
        self, attempt: Callable[[Link], Awaitable[T]], progress: Callable[[], int] = lambda: 0
    ) -> T:
        """Repeat an attempt over successive connections until it succeeds or ends with a FINAL status.

        Args:
            attempt: one try, over the given connection.
            progress: returns the bytes on disk; the wait before the next try grows only while this number does not.
        """
        num_cuts = 0
        while True:
            link, before = await self._connection.link(), progress()
            try:
                return await attempt(link)
            except StreamBroken as error:
                if error.code in FINAL:
                    raise
                logger.info("the download was cut (%s), and will resume where it stopped", error)
            num_cuts = num_cuts + 1 if progress() == before else 0
            await asyncio.sleep(self._wait(num_cuts))


async def _get_manifest(link: Link, request: ModelRequest) -> bytes:
    manifest_request = pb.ManifestRequest(run_id=request.run_id, digest=request.model_digest)
    with broken_streams():
        async with link.calls() as stub:
            reply = await stub.GetManifest(manifest_request, timeout=MANIFEST_TIMEOUT_S)
    encoded: bytes = reply.manifest
    return encoded


async def _complete(
    channel: RotatingChannel[rpc.Stub],
    request: ModelRequest,
    partial: PartialVersion,
) -> None:
    """Download every piece that the version lacks; give up at the DAMAGES_MAX-th damaged one."""
    num_damages = 0
    wanted = sum(piece.num_bytes for piece in partial.wanted) - partial.filled_bytes
    logger.info("downloading %s (%s were here already)", printable_size(wanted), printable_size(partial.data_bytes))
    while not partial.is_complete:
        try:
            with told(f"downloading the model of {request.run_id}", partial.num_bytes, lambda: partial.data_bytes):
                await download(channel, request.run_id, request.model_digest, partial)
        except PieceDamaged as error:
            num_damages += 1
            logger.warning("a piece arrived damaged and is fetched again: %s", error)
            if num_damages == DAMAGES_MAX:
                raise
