"""An aggregation rank: it receives its clients' updates, serves its pieces of the model, and folds with others.

The coordinator decides about every update: it is asked before the bytes arrive and again when they are durable here.
While it is away, clients are told to retry. Between folds the ranks do not know of each other.
"""

import asyncio
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from atoll.aggregation.fold.exchange import ExchangeBroken
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.fold.sharded import Cohort, fold_shard
from atoll.aggregation.fold.step import kept_pieces
from atoll.aggregation.fold.streaming import Folded
from atoll.aggregation.masked.fold import Outcome, fold_masked
from atoll.aggregation.masked.no_sum import NoSum
from atoll.ground.durable import DiskFull, naming_full_disk, told_outside
from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.log_fields import about, note_run
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.threads import off_loop, on_thread
from atoll.protocol.vocabulary import Digest, RejectReason, RunId, Version
from atoll.protocol.wire.channel import CHUNK_BYTES
from atoll.server.errors import UpdateDamaged
from atoll.server.files.run_store import INCOMING_AGE_MAX_S, KeptUpdate
from atoll.server.files.versions import VersionFile
from atoll.server.folding.method import Method
from atoll.server.folding.plan import FoldPlan, Planned
from atoll.server.folding.reducer import step_of
from atoll.server.folding.sums import sessions_of
from atoll.server.identity.admission import AskedAdmission
from atoll.server.journal.codec import StoredUpdateMeta, decode_meta, encode, encode_meta
from atoll.server.journal.holder import run_folder
from atoll.server.ranks.fetch import NotFetched, fetch_manifest
from atoll.server.ranks.gloo import Gloo, MeetingPoint
from atoll.server.ranks.rank_store import RankRun
from atoll.server.ranks.reported_parts import ReportedParts
from atoll.server.transfers.uploads import Uploads
from atoll.tensors.ownership import owned_pieces
from atoll.tensors.secure.plan import Vector
from atoll.tensors.updates.reader import StoredUpdate

logger = logging.getLogger(__name__)

TRIES, AGAIN_S = 3, 0.1
"""Attempts at a call to the coordinator, and the wait between them [s]. gRPC may refuse some of many calls at once,
because its server counts each slightly longer than the caller does; this need not cut an upload."""

EXCHANGE_TIMEOUT_S = 60.0
"""Time within which the other ranks must answer in a fold [s]."""


class CoordinatorAway(OSError):
    """Error: the coordinator, which decides about updates, cannot be reached now."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Place of a process among the ranks."""

    rank: int
    num_ranks: int
    interface: str
    """Network interface over which the ranks exchange sums."""
    folder_id: str = ""
    """Id of the rank's state directory (`ground/folder_id`)."""
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random id of the rank's process."""


class RemoteJudge:
    """Judge of one update that asks the coordinator; see `uploads.Judging`."""

    def __init__(self, rank: "Rank", manifest: UpdateManifest, opened: pb.UploadOpen) -> None:
        self._stub, self._rank, self._run_id = rank.aggregation, rank.place.rank, manifest.run_id
        self._run_of = rank.run
        self._opened = pb.UploadOpen()
        self._opened.CopyFrom(opened)
        self._opened.ClearField("data")
        self.is_kept = False
        """Whether the coordinator has said that the part is durable, here or at another rank."""

    async def before_bytes(self) -> pb.Verdict | None:
        """Return the coordinator's verdict before the bytes arrive, if there is one."""
        reply: pb.OpenedUpdate = await _asked(lambda: self._stub.OpenUpdate(self._opened))
        self.is_kept = reply.kept
        if reply.has_words:  # the coordinator knows the run
            self._run_of(self._run_id).store.has_values = False
        return reply.verdict if reply.HasField("verdict") else None

    async def old_verdict(self) -> pb.Verdict | None:
        """Return None: the coordinator itself looks for an older verdict when it decides."""
        return None

    async def decide(self, kept: KeptUpdate | None) -> pb.Verdict:
        """Ask the coordinator to decide about a sound update that is durable here."""
        assert kept is not None
        meta = await off_loop(len(kept.meta), partial(decode_meta, where="an update"), kept.meta)
        return await self._submit(await off_loop(len(kept.meta), _found, meta))

    async def report(self, findings: StoredUpdateMeta) -> pb.Verdict | None:
        """Report the part, which is durable here; return the verdict if every part of the update is durable."""
        found = await off_loop(len(findings.manifest), _found, findings)
        reply: pb.UploadReply = await _asked(lambda: self._stub.SubmitPart(self._submission(found)))
        return reply.verdict if reply.HasField("verdict") else None

    async def withdraw(self, digest: Digest) -> bool:
        """Return whether kept parts of another update may be deleted: then the coordinator no longer counts them."""
        digests = [bytes.fromhex(digest)]
        request = pb.UpdatesRequest(run_id=self._run_id, digests=digests, rank=self._rank, withdraws=True)
        try:
            reply: pb.UnusedUpdates = await _asked(lambda: self._stub.FindUnused(request))
            return len(reply.digests) > 0
        except CoordinatorAway:
            return False  # they are kept until the next collection

    async def refuse(self, reason: RejectReason, detail: str) -> pb.Verdict:
        """Ask the coordinator to refuse the update because of its bytes."""
        return await self._submit(reason=reason, detail=detail[:2000])

    async def _submit(self, meta: bytes = b"", reason: str = "", detail: str = "") -> pb.Verdict:
        verdict: pb.Verdict = await _asked(lambda: self._stub.SubmitUpdate(self._submission(meta, reason, detail)))
        return verdict

    def _submission(self, meta: bytes, reason: str = "", detail: str = "") -> Iterator[pb.SubmittedUpdate]:
        yield pb.SubmittedUpdate(opened=self._opened, rank=self._rank, reason=reason, detail=detail)
        for start in range(0, len(meta), CHUNK_BYTES):
            yield pb.SubmittedUpdate(meta=meta[start : start + CHUNK_BYTES])


async def _asked(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the coordinator's answer to an idempotent call.

    Raises:
        CoordinatorAway: the coordinator cannot be reached now.
    """
    for attempt in itertools.count(1):
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or attempt == TRIES:
                raise CoordinatorAway(f"the coordinator cannot be asked now ({error.code().name}): try again") from None
        await asyncio.sleep(AGAIN_S)


def _found(meta: StoredUpdateMeta) -> bytes:
    """Encode the findings about an update or a part without its manifest, which the coordinator already has."""
    return encode_meta(replace(meta, manifest=b"")).encode()


class Rank:
    """State of one rank's process.

    Args:
        place: the place of the process among the ranks.
        folder: its directory.
        channel: the channel to the coordinator, which may be replaced.
    """

    def __init__(self, place: RankPlace, folder: Path, channel: grpc.aio.Channel) -> None:
        self.place, self.folder = place, folder
        self.connect(channel)
        self.admission = AskedAdmission(lambda: self.aggregation)
        self.meeting_point = MeetingPoint(place.interface)
        self._runs: dict[RunId, RankRun] = {}
        self._compute = ThreadPoolExecutor(2, thread_name_prefix="compute")
        self._folding = ThreadPoolExecutor(1, thread_name_prefix="fold")
        self._attempt, self._stop_fold = 0, threading.Event()
        self._wanted: dict[RunId, tuple[int, str]] = {}  # bytes for which the disk had no room, and the message
        self.uploads = Uploads(
            self._judge,
            lambda run_id: self.run(run_id).store,
            lambda _: self._compute,
            parts=ReportedParts(),
            on_full=self._no_room,
        )
        self.sent_bytes = self.exchanged_bytes = 0
        self.keeper: Keeper | None = None
        """Keeper of the rank's credential; None: it is insecure."""

    def connect(self, channel: grpc.aio.Channel) -> None:
        """Use this channel to the coordinator from now on."""
        self.coordinator, self.aggregation = rpc.Stub(channel, "Coordinator"), rpc.Stub(channel, "Aggregation")

    def run(self, run_id: RunId) -> RankRun:
        """Return the store of a run that the coordinator knows; no other run may get a folder."""
        if run_id not in self._runs:
            folder = run_folder(self.folder, run_id)
            folder.mkdir(parents=True, exist_ok=True)
            self._runs[run_id] = RankRun(folder, run_id, self.place.rank, self.place.num_ranks)
        return self._runs[run_id]

    async def version(self, run_id: RunId, digest: Digest) -> VersionFile:
        """Return a committed version, of which this rank has its shard. The caller need not be trusted.

        Raises:
            NoSuchVersion: the coordinator knows no such run, or no such version of it.
            NotFetched: the coordinator cannot be asked now, or the disk has no room for the shard.
            StoreCorrupted: the shard is damaged, or gone.
        """
        if run_id not in self._runs:
            await fetch_manifest(self.coordinator, run_id, digest)
        run = self.run(run_id)
        try:
            return run.known(digest) or await run.find(self.coordinator, digest)
        except DiskFull as error:
            self._no_room(run_id, run.shard_bytes, error)
            raise NotFetched(told_outside(error)) from error

    def _judge(self, manifest: UpdateManifest, opened: pb.UploadOpen, part: PartManifest | None) -> RemoteJudge:
        return RemoteJudge(self, manifest, opened)

    def _no_room(self, run_id: RunId, num_bytes: int, error: DiskFull) -> None:
        """Report from now on that the disk has no room for a run, until `num_bytes` bytes fit."""
        wanted, _ = self._wanted.get(run_id, (0, ""))
        if run_id not in self._wanted:
            logger.error("run %s: %s", run_id, error, extra={"run": run_id})
        self._wanted[run_id] = max(wanted, num_bytes), str(error)

    def _shortages(self) -> list[pb.Shortage]:
        """Return the runs whose updates or versions do not fit on this rank's disk now, each with the reason."""
        for run_id, (num_bytes, _) in [*self._wanted.items()]:
            with suppress(FileNotFoundError):
                if not self.run(run_id).store.has_room(num_bytes):
                    continue
            del self._wanted[run_id]
        return [pb.Shortage(run_id=run_id, detail=detail[:2000]) for run_id, (_, detail) in self._wanted.items()]

    def status(self) -> pb.RankMessage:
        """Return the report of this process: bytes received, sent, exchanged, clients that sent them, and shortages."""
        done = pb.RankStatus(
            shortages=self._shortages(),
            received_bytes=self.uploads.received_bytes,
            sent_bytes=self.sent_bytes,
            exchanged_bytes=self.exchanged_bytes,
            store_address=self.meeting_point.address,
            arrivals=self.uploads.arrivals.report(),
            certificate_until=0.0 if self.keeper is None else self.keeper.current.leaf.expires_at,
        )
        return pb.RankMessage(status=done)

    def stop(self) -> None:
        """End the running fold."""
        self._stop_fold.set()

    def break_off(self, attempt: int) -> None:
        """End the running fold if it belongs to this attempt."""
        if attempt == self._attempt:
            self._stop_fold.set()

    # ------------------------------------------------------------ a fold

    def begin_fold(self, attempt: int) -> threading.Event:
        """End the running fold, whose attempt has been given up; return the event that ends the new one."""
        self._stop_fold.set()
        self._attempt, self._stop_fold = attempt, threading.Event()
        return self._stop_fold

    async def fold(self, order: pb.Fold, encoded_plan: bytes, stop: threading.Event) -> pb.RankMessage:
        """Fold a round with the other ranks; return the answer, success or failure, for the coordinator."""
        note_run(order.run_id, order.run_number)
        with about(run=order.run_id, round=order.round_id):
            return await self._fold(order, encoded_plan, stop)

    async def _fold(self, order: pb.Fold, encoded_plan: bytes, stop: threading.Event) -> pb.RankMessage:
        begun = time.perf_counter()
        run_id = RunId(order.run_id)
        try:
            plan = await off_loop(len(encoded_plan), FoldPlan.decode, encoded_plan)
            base = await self.version(run_id, plan.base_digest)
            if plan.anchor is not None:
                await self.version(run_id, plan.anchor.digest)
            metas = await self._metas(run_id, [p.digest for p in plan.updates if p.lies_at(self.place.rank)])
            fold = _Fold(self.place, self.run(run_id), plan, base, metas, order, stop)
            folded, exchanged, outcome = await on_thread(self._folding, fold)
        except DiskFull as error:
            self._no_room(run_id, self.run(run_id).shard_bytes, error)
            return _failed(order, error, again=True)
        except (ExchangeBroken, InterruptedError, NotFetched) as error:
            return _failed(order, error, again=True)
        except (ValueError, OSError) as error:
            logger.error("the fold of round %d failed", order.round_id, exc_info=error)
            return _failed(order, error, again=False)
        self.exchanged_bytes += exchanged
        if self.meeting_point.is_full:  # replaced here, between two folds, when no rank uses it
            self.meeting_point = MeetingPoint(self.place.interface)
        seconds = time.perf_counter() - begun
        logger.info("round %d of %s is folded in %.2f s", order.round_id, run_id, seconds)
        return pb.RankMessage(
            folded=pb.Folded(
                run_id=run_id,
                attempt=order.attempt,
                sha256=[bytes.fromhex(piece.sha256) for piece in folded.pieces],
                seconds=seconds,
                exchanged_bytes=exchanged,
                outcome=b"" if outcome is None else encode(outcome).encode(),
            )
        )

    async def _metas(self, run_id: RunId, digests: list[Digest]) -> dict[Digest, StoredUpdateMeta]:
        """Download the journal's findings about the updates that are here."""
        encoded = {digest: bytearray() for digest in digests}
        request = self._about(run_id, digests)
        try:
            async for accepted in self.aggregation.GetUpdates(request):
                encoded[Digest(accepted.digest.hex())] += accepted.meta
        except grpc.aio.AioRpcError as error:
            raise NotFetched(f"the coordinator cannot be asked now ({error.code().name})") from None

        def decoded() -> dict[Digest, StoredUpdateMeta]:
            return {digest: decode_meta(meta.decode(), where=f"update {digest}") for digest, meta in encoded.items()}

        return await off_loop(sum(map(len, encoded.values())), decoded)

    def _about(self, run_id: RunId, digests: Iterable[Digest]) -> pb.UpdatesRequest:
        encoded = [bytes.fromhex(digest) for digest in digests]
        return pb.UpdatesRequest(run_id=run_id, digests=encoded, rank=self.place.rank)

    # ------------------------------------------------------------ garbage

    async def collect(self, order: pb.Collect) -> None:
        """Delete the updates and versions that no decision can need."""
        run_id, run, asked_at = RunId(order.run_id), self.run(RunId(order.run_id)), time.time()
        with self.uploads.in_flight_during(run_id) as in_flight:  # an update may be accepted after the answer
            here = await on_thread(None, run.store.digests)
            request = self._about(run_id, here)
            try:
                unused = {Digest(digest.hex()) for digest in (await self.aggregation.FindUnused(request)).digests}
            except grpc.aio.AioRpcError:
                return  # the next order tries again
            base = run.store.version_path(Version(order.oldest_base))

            def collect() -> int:
                made_at = base.stat().st_mtime if base.exists() else 0.0
                return run.store.collect_garbage(
                    _Used(unused, in_flight),
                    keep_versions=order.keep_versions,
                    current=Version(order.current),
                    pinned={Version(version) for version in order.pinned},
                    keep_incoming=lambda _, at: (
                        not order.is_over and at >= made_at and asked_at - at < INCOMING_AGE_MAX_S
                    ),
                )

            try:
                await on_thread(None, collect)
            except OSError as error:
                text = "run %s: garbage could not be collected and remains for now: %s"
                logger.error(text, run_id, error, extra={"run": run_id})


@dataclass(frozen=True, slots=True)
class _Used:
    """Set of all updates except those found unused and not in flight since."""

    unused: set[Digest]
    in_flight: set[Digest]

    def __contains__(self, digest: object) -> bool:
        return digest not in self.unused or digest in self.in_flight


class _Fold:
    """One attempt at one fold, on a thread."""

    def __init__(
        self,
        place: RankPlace,
        run: RankRun,
        plan: FoldPlan,
        base: VersionFile,
        metas: dict[Digest, StoredUpdateMeta],
        order: pb.Fold,
        stop: threading.Event,
    ) -> None:
        self._place, self._run, self._plan, self._base, self._metas = place, run, plan, base, metas
        self._order, self._stop = order, stop

    def __call__(self) -> tuple[Folded, int, Outcome | None]:
        """Fold; return the written shard, the number of bytes sent to other ranks, and the outcome of secure sums."""
        self._check_wanted()
        plan, store, layout, num_ranks = self._plan, self._run.store, self._base.manifest.layout, self._place.num_ranks
        version, outcome = Version(plan.base_version + 1), None
        method = Method.of(plan.aggregation, plan.optimizer)
        step = step_of(plan, layout, method, store)
        out, owned = store.version_path(version), owned_pieces(self._base.manifest.pieces, self._place.rank, num_ranks)
        self._run.check_slots(plan.base_version, {name: kept_pieces(name, step, layout, owned) for name in step.before})
        execution = Execution(os.cpu_count() or 1, between=self._between_tiles, device=method.device)
        here = {
            place: store.stored_update(planned.digest, self._metas[planned.digest], None, rank=self._place.rank)
            for place, planned in enumerate(plan.updates)
            if planned.lies_at(self._place.rank)
        }
        with naming_full_disk(out), self._exchange() as exchange:
            if plan.sums is not None:
                vector = Vector(layout, plan.sums.encoding)
                folded, outcome = fold_masked(
                    self._base.path,
                    sessions_of(plan, here),
                    out,
                    vector=vector,
                    exchange=exchange,
                    step=step,
                    execution=execution,
                )
            else:
                folded = fold_shard(
                    layout,
                    self._base.path,
                    [_weighted(plan.updates[place], update) for place, update in here.items()],
                    out,
                    cohort=self._cohort(),
                    exchange=exchange,
                    step=step,
                    execution=execution,
                )
            self._run.made(version, folded.pieces, dict(folded.slots))
            return folded, exchange.sent_bytes, outcome

    def _exchange(self) -> Gloo:
        return Gloo(
            self._place.rank,
            self._place.num_ranks,
            store_address=self._order.store_address,
            key=str(self._order.attempt),
            interface=self._place.interface,
            timeout_s=EXCHANGE_TIMEOUT_S,
            waiting=self._check_wanted,
        )

    def _cohort(self) -> Cohort:
        ranks = range(self._place.num_ranks)
        places = tuple(tuple(k for k, p in enumerate(self._plan.updates) if p.lies_at(rank)) for rank in ranks)
        return Cohort(self._plan.totals, places, {name: frozenset(k) for name, k in self._plan.omitted.items()})

    def _check_wanted(self) -> None:
        if self._stop.is_set():
            raise InterruptedError("this attempt at the fold has been given up")

    def _between_tiles(self) -> None:
        self._check_wanted()
        crash_points.reached("rank.mid_fold")


def _weighted(planned: Planned, update: StoredUpdate) -> Weighted:
    return Weighted(update, planned.weight, planned.factor, planned.trained_factor)


def _failed(order: pb.Fold, error: Exception, *, again: bool) -> pb.RankMessage:
    detail = f"{type(error).__name__}: {error}"[:2000]
    damaged = bytes.fromhex(error.digest) if isinstance(error, UpdateDamaged) else b""
    dropped = error.dropped if isinstance(error, NoSum) else {}
    failed = pb.FoldFailed(
        run_id=order.run_id, attempt=order.attempt, detail=detail, again=again, damaged=damaged, dropped=dropped
    )
    return pb.RankMessage(fold_failed=failed)
