"""The gRPC service that the coordinator offers to its aggregation ranks. It loads no torch."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import grpc

from atoll.ground.durable import told_outside
from atoll.ground.printable import count_of
from atoll.ground.strict_json import ManifestError
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import parse_update
from atoll.protocol.part_manifest import part_of
from atoll.protocol.settings import ConfigError
from atoll.protocol.threads import off_loop, on_thread
from atoll.protocol.vocabulary import Digest, RejectReason, RunId
from atoll.protocol.wire.channel import CHUNK_BYTES, PROTOCOL
from atoll.server.errors import StoreCorrupted
from atoll.server.files.run_store import KeptUpdate
from atoll.server.hosting.coordinator import Coordinator
from atoll.server.hosting.message_judge import MessageJudge
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.hosting.update_judge import UpdateJudge
from atoll.server.journal.codec import decode_meta, encode_meta, lies_at
from atoll.server.names.conflicts import Claimant
from atoll.server.ranks.registry import RankConnection, Ranks
from atoll.server.ranks.spread_parts import Report
from atoll.server.transfers.timeouts import Silent, first_of
from atoll.server.transfers.verdicts import refused
from atoll.server.transport.interceptor import Context
from atoll.server.transport.peer import address_of
from atoll.tensors.codecs.names import known_codecs

logger = logging.getLogger(__name__)

NAME_MAX, DETAIL_MAX = 200, 2000

META_BYTES_MAX = 1 << 26
"""Largest size of a rank's findings about one update or part [bytes]; 65,536 tensors with the longest names need
less."""


class AggregationService:
    """Service for aggregation ranks: their streams, and the updates that are at the ranks."""

    def __init__(self, coordinator: Coordinator, ranks: Ranks) -> None:
        self._coordinator, self._ranks = coordinator, ranks

    async def Serve(self, requests: AsyncIterator[pb.RankMessage], context: Context) -> AsyncIterator[pb.RankOrder]:
        """Serve the stream of one rank, from RankHello to its end."""
        try:
            first = await first_of(requests)
        except Silent as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        fault = self._fault_of(first)
        if fault is not None or first is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, fault or "the first message must be RankHello")
            return
        hello = first.hello
        claimant = Claimant(address_of(context.peer()), hello.process[:NAME_MAX], hello.folder[:NAME_MAX])
        connection = RankConnection(hello.rank, hello.address, hello.store_address, claimant=claimant)
        connection.codecs = known_codecs(hello.codecs)
        if refusal := self._ranks.refusal_of(connection):
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, refusal)
        self._ranks.join(connection)
        reader = self._coordinator.spawn(self._read(requests, connection))
        try:
            while (order := await connection.outbox.get()) is not None:
                yield order
            if connection.why:
                await context.abort(grpc.StatusCode.ABORTED, connection.why)
        finally:
            reader.cancel()
            self._ranks.leave(connection)

    def _fault_of(self, message: pb.RankMessage | None) -> str | None:
        if message is None or message.WhichOneof("message") != "hello":
            return "the first message must be RankHello"
        hello = message.hello
        if hello.protocol != PROTOCOL:
            return f"protocol {hello.protocol} is not {PROTOCOL}: update the older side ({hello.software[:80]!r})"
        if hello.num_ranks != self._ranks.num_ranks or hello.rank >= self._ranks.num_ranks:
            return (
                f"rank {hello.rank} of {hello.num_ranks}: this coordinator has "
                f"{count_of(self._ranks.num_ranks, 'rank')}"
            )
        try:
            self._coordinator.dialer.check(hello.address)  # clients will dial it
        except ConfigError as error:
            return str(error)
        return None

    async def _read(self, requests: AsyncIterator[pb.RankMessage], connection: RankConnection) -> None:
        try:
            async for message in requests:
                self._ranks.heard(connection, message)
        except (grpc.aio.AioRpcError, grpc.aio.AbortError, asyncio.InvalidStateError) as error:
            logger.debug("the stream of rank %d broke: %s", connection.rank, error)
        connection.close()

    async def Admit(self, request: pb.AdmitRequest, context: Context) -> pb.AdmitReply:
        """Return which callers of a rank are members, and of which runs."""
        try:
            return self._coordinator.admission.answer(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:DETAIL_MAX])

    async def OpenUpdate(self, request: pb.UploadOpen, context: Context) -> pb.OpenedUpdate:
        """Return the verdict that is possible before an update's bytes arrive, if there is one."""
        judge = await self._judge(request)
        if isinstance(judge, pb.Verdict):
            return pb.OpenedUpdate(verdict=judge)
        has_words = not judge.run.reducer.store.has_values
        if (verdict := await judge.before_bytes()) is not None or judge.part is None:
            return pb.OpenedUpdate(verdict=verdict, has_words=has_words)
        async with _storing(context):
            opened = await self._ranks.parts.open(judge, judge.run.reducer.store, judge.part.index, request.part)
        opened.has_words = has_words
        return opened

    async def SubmitPart(self, requests: AsyncIterator[pb.SubmittedUpdate], context: Context) -> pb.UploadReply:
        """Record that a part is durable at a rank, and decide about the update if it was the last one."""
        request, found = await _submitted(requests, context)
        judge = await self._judge(request.opened)
        if isinstance(judge, pb.Verdict):
            return pb.UploadReply(verdict=judge)
        if judge.part is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "`opened` names no part")
            raise AssertionError("abort raises")
        where = f"part {judge.part.index} of update {judge.update.digest} of rank {request.rank}"
        meta = await off_loop(len(found), partial(decode_meta, where=where), found.decode())
        report = Report(request.rank, replace(meta, manifest=request.opened.part))
        async with _storing(context):
            return await self._ranks.parts.keep(judge, judge.run.reducer.store, judge.part.index, report)

    async def SubmitUpdate(self, requests: AsyncIterator[pb.SubmittedUpdate], context: Context) -> pb.Verdict:
        """Decide about an update whose bytes are durable at a rank, or refuse it because of them."""
        request, found = await _submitted(requests, context)
        try:
            reason = RejectReason(request.reason or RejectReason.BAD_ENCODING)
        except ValueError:
            what = f"reason {request.reason[:NAME_MAX]!r}; allowed: {', '.join(RejectReason)}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
        judge = await self._judge(request.opened)
        if isinstance(judge, pb.Verdict):
            return judge
        if (verdict := await judge.old_verdict()) is not None:
            return verdict
        if request.reason:
            return await judge.refuse(reason, request.detail)
        if judge.manifest.parts:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an update in parts is submitted part by part")
        where = f"update {judge.update.digest} of rank {request.rank}"

        def completed() -> str:
            meta = decode_meta(found.decode(), where=where)
            return encode_meta(replace(meta, manifest=request.opened.manifest, rank=request.rank))

        return await judge.decide(KeptUpdate(await off_loop(len(found), completed), None))

    async def _judge(self, opened: pb.UploadOpen) -> UpdateJudge | pb.Verdict:
        """Return the judge of an update, or of the part that the rank names."""
        try:
            manifest = await off_loop(len(opened.manifest), parse_update, opened.manifest)
            part = await off_loop(len(opened.part), part_of, manifest, opened.part) if opened.part else None
            judge = self._coordinator.judge(manifest, opened, part)
            assert not isinstance(judge, MessageJudge), "a run of messages has no ranks"
            return judge
        except ManifestError as error:
            return refused(RejectReason.BAD_MANIFEST, str(error))

    async def GetUpdates(self, request: pb.UpdatesRequest, context: Context) -> AsyncIterator[pb.AcceptedUpdate]:
        """Yield the journal's rows of accepted updates that are at the rank."""
        digests = [Digest(digest.hex()) for digest in request.digests]
        try:
            rows = await on_thread(None, self._coordinator.journal.updates, RunId(request.run_id), digests)
        except StoreCorrupted as error:  # including the case that the update was never accepted, or is deleted
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error)[:DETAIL_MAX])
        if elsewhere := [digest for digest, row in rows.items() if not lies_at(row.meta, request.rank)]:
            what = f"update {elsewhere[0]} is not at rank {request.rank}, which asks"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, what)
        for digest, row in rows.items():
            meta = row.meta.encode()
            for start in range(0, len(meta), CHUNK_BYTES):
                yield pb.AcceptedUpdate(digest=bytes.fromhex(digest), meta=meta[start : start + CHUNK_BYTES])

    async def FindUnused(self, request: pb.UpdatesRequest, context: Context) -> pb.UnusedUpdates:
        """Return the updates that no decision can need."""
        run, digests = self._coordinator.runs.get(RunId(request.run_id)), map(Digest, map(bytes.hex, request.digests))
        if not isinstance(run, RunDriver):
            return pb.UnusedUpdates()
        if request.withdraws:
            unused = [digest for digest in digests if await self._withdraw(run.run_id, digest)]
        else:
            self._ranks.parts.prune(run.run_id, lambda update: run.machine.refusal(update) is not None)
            unused = [digest for digest in digests if run.retention.is_unused(digest)]
        return pb.UnusedUpdates(digests=map(bytes.fromhex, unused))

    async def _withdraw(self, run_id: RunId, digest: Digest) -> bool:
        """Stop counting an update's parts as kept; return False if it is accepted, or may be now."""
        if not self._ranks.parts.withdraw(run_id, digest):
            return False
        return not await on_thread(None, self._coordinator.journal.has_update, run_id, digest)


async def _submitted(
    requests: AsyncIterator[pb.SubmittedUpdate], context: Context
) -> tuple[pb.SubmittedUpdate, bytearray]:
    """Return the first message about an update, or about a part of one, and the findings of all messages."""
    request, found = await anext(requests, pb.SubmittedUpdate()), bytearray()
    async for more in requests:
        found += more.meta
        if len(found) > META_BYTES_MAX:
            what = f"the findings about one update have more than {META_BYTES_MAX} bytes"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
    return request, found


@asynccontextmanager
async def _storing(context: Context) -> AsyncIterator[None]:
    """Ask the rank, and with it the client, to retry if the block meets a full or failing disk."""
    try:
        yield
    except OSError as error:
        logger.error("the notes about a part cannot be stored: %s", error)
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"cannot be stored now: {told_outside(error)}")
