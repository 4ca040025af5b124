"""One job from its invitation to an event: fetch the version, let the runner work, put the update into the spool."""

import asyncio
import errno
import json
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc

from atoll.client.disk.client_state import PersonalState
from atoll.client.disk.model_cache import ModelCache, PartialVersion, PieceDamaged
from atoll.client.disk.residual_store import Kept, Owner
from atoll.client.disk.spool import Entry, Spool
from atoll.client.session.events import (
    Evaluated,
    EvaluationRequest,
    Event,
    Invitation,
    JobFailed,
    ModelReady,
    Request,
    Trained,
)
from atoll.client.threads import off_loop, on_thread
from atoll.client.wire.control_stream import Link
from atoll.client.wire.download import download
from atoll.client.wire.ranks import Ranks
from atoll.client.wire.rotating_channel import Connection
from atoll.client.work.runner import EvaluateOrder, Runner, RunnerFailed, Training, TrainOrder
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol import crash_points
from atoll.protocol.manifest import ManifestError, UpdateManifest, VersionManifest, digest_of, parse_version
from atoll.protocol.printable import in_mb
from atoll.protocol.vocabulary import ClientId, FailureReason
from atoll.protocol.wire.stream import StreamBroken, broken_streams

logger = logging.getLogger(__name__)


class NotAdmitted(Exception):
    """The site's own policy does not allow the work."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


DAMAGES_MAX = 3
"""Pieces of one version that may come damaged before it is given up."""

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
"""A download that ends so will end so again."""

T = TypeVar("T")


class Workshop:
    """Each job ends in the event that the session waits for, whatever happens.

    Args:
        site: this client's name.
        work: folder for what is being written.
        cache: of versions.
        spool: of updates.
        kept: what an update leaves for the next.
        personal: what this site keeps for itself.
        runner: trains and evaluates.
        link: waits until there is a connection, and returns it.
        ranks: of the aggregation, if there are any.
        wait: seconds to wait after that many cuts without a byte of progress.
        remember: makes durable what was seen of the run, before what came of it leaves; may run on a thread.
        admit: asked once the model is known, before it is downloaded; raises NotAdmitted.
    """

    def __init__(
        self,
        site: str,
        *,
        work: Path,
        cache: ModelCache,
        spool: Spool,
        kept: Kept,
        personal: PersonalState,
        runner: Runner,
        link: Callable[[], Awaitable[Link]],
        ranks: Ranks,
        wait: Callable[[int], float],
        remember: Callable[[], None],
        admit: Callable[[Request, VersionManifest], None],
    ) -> None:
        self._remember = remember
        self._site, self._cache, self._spool = ClientId(site), cache, spool
        self._out, self._residual, self._own_out = (work / name for name in ("update.safetensors", "residual", "own"))
        self._kept, self._personal, self._runner = kept, personal, runner
        self._link, self._ranks, self._wait, self._admit = link, ranks, wait, admit
        self._download_seconds = 0.0
        self._tidying: asyncio.Future[None] | None = None

    # ------------------------------------------------------------ the model

    async def fetch(self, request: Request) -> Event:
        """ModelReady, or JobFailed. A cut connection only makes it wait."""
        began = time.monotonic()
        try:
            await self._fetch(request)
        except NotAdmitted as error:
            return JobFailed(request.key, error.reason, error.detail)
        except StreamBroken as error:
            return JobFailed(request.key, FailureReason.DOWNLOAD_FAILED, str(error))
        except OSError as error:
            return JobFailed(request.key, _disk_reason(error, FailureReason.DOWNLOAD_FAILED), _text(error))
        except ValueError as error:  # the manifest, a piece, or a header that no file can have
            return JobFailed(request.key, FailureReason.DOWNLOAD_FAILED, str(error))
        self._download_seconds = time.monotonic() - began
        crash_points.reached("agent.downloaded")
        return ModelReady(request.key)

    async def _fetch(self, request: Request) -> None:
        digest = request.model_digest
        encoded = request.manifest or await self._persistently(lambda link: _get_manifest(link, request))
        if digest_of(encoded) != digest:
            raise ManifestError(f"the manifest that came is not that of version {digest}")
        manifest = parse_version(encoded)
        self._admit(request, manifest)
        if isinstance(request, Invitation):
            self._spool.check_room(manifest.num_bytes)
        if not self._cache.is_scanned:
            await on_thread(self._cache.scan)
        if self._tidying is not None:
            await asyncio.wait({self._tidying})
        if self._cache.find(digest, manifest) is not None:
            logger.debug("version %s is here already", digest[:12])
            return
        if self._ranks.num_ranks and not request.data:
            await self._fetch_from_ranks(request, manifest)
            return
        is_inline = len(request.data) == manifest.num_bytes
        partial = self._cache.begin(digest, manifest, reuse=not is_inline)
        try:
            await off_loop(manifest.num_bytes, partial.resume)
            if is_inline and not partial.is_complete:
                with suppress(PieceDamaged):  # then what is missing is downloaded
                    partial.append(request.data[partial.data_bytes :])
            if not partial.is_complete:
                await self._persistently(
                    lambda link: _complete(link.connection, request, partial), lambda: partial.data_bytes
                )
            self._cache.finish(digest, manifest, partial)
            self._tidy(manifest)
        finally:
            partial.close()

    async def _fetch_from_ranks(self, request: Request, manifest: VersionManifest) -> None:
        """Each rank's part from that rank, all at once."""
        parts = self._cache.begin_parts(request.model_digest, manifest, self._ranks.num_ranks)
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

    def _tidy(self, manifest: VersionManifest) -> None:
        """Delete older versions while the new one is worked with: of 100 MB that takes a third of its download."""
        self._tidying = asyncio.ensure_future(off_loop(manifest.num_bytes, self._cache.tidy))

    async def _fetch_part(self, request: Request, rank: int, part: PartialVersion) -> None:
        await off_loop(part.num_bytes, part.resume)
        if not part.is_complete:
            await self._persistently(
                lambda _: _complete(self._ranks.connection(rank), request, part), lambda: part.data_bytes
            )

    async def _persistently(
        self, attempt: Callable[[Link], Awaitable[T]], progress: Callable[[], int] = lambda: 0
    ) -> T:
        """Try over as many connections as it takes, until the coordinator says that it is of no use."""
        num_cuts = 0
        while True:
            link, before = await self._link(), progress()
            try:
                return await attempt(link)
            except StreamBroken as error:
                if error.code in FINAL:
                    raise
                logger.info("the download was cut (%s), and will go on where it stopped", error)
            num_cuts = num_cuts + 1 if progress() == before else 0
            await asyncio.sleep(self._wait(num_cuts))

    # ------------------------------------------------------------ the work

    async def train(self, invitation: Invitation, budget: float) -> Event:
        """Trained, with the update in the spool; or JobFailed."""
        key = invitation.key
        self._residual.unlink(missing_ok=True)  # of a training that came to nothing
        try:
            order = TrainOrder(
                task=invitation.task,
                model=self._cache.path(invitation.model_digest),
                out=self._out,
                round_id=invitation.round_id,
                seed=invitation.seed,
                local=_overrides(invitation.local),
                algorithm=invitation.algorithm,
                own=self._own(invitation),
                own_out=self._own_out,
                model_seed=invitation.model_seed,
                budget=budget,
                codec=invitation.codec,
                owed=self._kept.current(_residual_of(invitation)) if invitation.codec else (),
                residual=self._residual,
            )
            training = asyncio.ensure_future(self._runner.train(order))
            await asyncio.sleep(0)  # let it begin
            crash_points.reached("agent.training")
            trained = await training
            crash_points.reached("agent.trained")
            entry = await self._spool_update(invitation, trained)
        except RunnerFailed as error:
            return JobFailed(key, error.reason, error.detail)
        except OSError as error:
            return JobFailed(key, _disk_reason(error, FailureReason.TRAINING_FAILED), _text(error))
        crash_points.reached("agent.spooled")
        return Trained(key, entry.digest)

    def _own(self, invitation: Invitation) -> Path | None:
        """What this site has kept of the training that counted last.

        Raises:
            RunnerFailed: it is gone, and the algorithm cannot do without it.
        """
        counted = invitation.counted_round
        own = self._personal.find(invitation.run_id, counted)
        if own is None and counted and invitation.algorithm == "scaffold":
            detail = f"the control variate of round {counted} is no longer in this agent's state directory (personal/)"
            raise RunnerFailed(FailureReason.TRAINING_FAILED, f"{detail}: put it back, or start a new run")
        return own

    async def _spool_update(self, invitation: Invitation, trained: Training) -> Entry:
        logger.info(
            "trained %d examples for round %d of %s, work %.0f %%, in %.2f s",
            trained.num_examples,
            invitation.round_id,
            invitation.run_id,
            100 * trained.work,
            trained.seconds,
        )
        manifest = UpdateManifest(
            run_id=invitation.run_id,
            round_id=invitation.round_id,
            client_id=self._site,
            base_version=invitation.base_version,
            base_digest=invitation.model_digest,
            num_examples=trained.num_examples,
            work=trained.work,
            pieces=trained.pieces,
            normalizer=trained.normalizer,
            effective_steps=trained.effective_steps,
        )

        def add() -> Entry:
            self._remember()
            if self._residual.exists():
                self._kept.stage(_residual_of(invitation), manifest.digest, self._residual)
            if trained.has_own:
                self._personal.stage(invitation.run_id, invitation.round_id, invitation.counted_round, self._own_out)
            return self._spool.add(
                self._out,
                manifest,
                statistics=trained.statistics,
                download_seconds=self._download_seconds,
                train_seconds=trained.seconds,
                rank=invitation.rank,
            )

        try:
            return await on_thread(add)
        except OSError:
            self._kept.settle(manifest.digest, accepted=False)
            raise

    async def evaluate(self, request: EvaluationRequest, budget: float) -> Event:
        """Evaluated, with the sums or without."""
        try:
            order = EvaluateOrder(
                task=request.task,
                model=self._cache.path(request.model_digest),
                local=_overrides(request.local),
                own=self._personal.find(request.run_id, request.counted_round),
                model_seed=request.model_seed,
                budget=budget,
            )
            sums = await self._runner.evaluate(order)
            await on_thread(self._remember)
        except RunnerFailed as error:
            return Evaluated(request.key, None, f"{error.reason}: {error.detail}", error.reason)
        except OSError as error:
            reason = _disk_reason(error, FailureReason.TRAINING_FAILED)
            return Evaluated(request.key, None, f"{reason}: {_text(error)}", reason)
        logger.info("evaluated version %d of %s", request.version, request.run_id)
        return Evaluated(request.key, sums, "" if sums is not None else "this site has no test data")


def _residual_of(invitation: Invitation) -> Owner:
    """What biased codecs left out of this client's updates."""
    return Owner("residual", invitation.run_id, invitation.task)


async def _get_manifest(link: Link, request: Request) -> bytes:
    asked = pb.ManifestRequest(run_id=request.run_id, digest=request.model_digest)
    with broken_streams():
        async with link.calls() as stub:
            reply = await stub.GetManifest(asked, timeout=MANIFEST_TIMEOUT_S)
    encoded: bytes = reply.manifest
    return encoded


async def _complete(
    connection: Connection[rpc.CoordinatorStub] | Connection[rpc.AggregatorStub],
    request: Request,
    partial: PartialVersion,
) -> None:
    """Everything that the version lacks."""
    num_damages = 0
    wanted = sum(piece.num_bytes for piece in partial.wanted) - partial.filled_bytes
    logger.info("downloading %s (%s were here already)", in_mb(wanted), in_mb(partial.data_bytes))
    while not partial.is_complete:
        try:
            await download(connection, request.run_id, request.model_digest, partial)
        except PieceDamaged as error:
            num_damages += 1
            logger.warning("a piece came damaged and is fetched again: %s", error)
            if num_damages == DAMAGES_MAX:
                raise


def _overrides(local: str) -> dict[str, Any]:
    """The invitation's overrides of the task's Local: a JSON object of plain values."""
    try:
        overrides = json.loads(local)
    except (ValueError, RecursionError) as error:
        raise RunnerFailed(FailureReason.TRAINING_FAILED, f"the invitation's `local` is not JSON: {error}") from None
    if not isinstance(overrides, dict):
        raise RunnerFailed(FailureReason.TRAINING_FAILED, "the invitation's `local` is not a JSON object")
    return overrides


def _disk_reason(error: OSError, otherwise: FailureReason) -> FailureReason:
    return FailureReason.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else otherwise


def _text(error: OSError) -> str:
    return error.strerror or str(error)
