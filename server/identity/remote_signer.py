"""The authority as seen by the coordinator when its key is on another machine: it dials in and signs over its stream.

So that machine needs no open port. While it is away, enrolments and renewals wait or fail; nothing else depends on it.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import CertificateError, check_issued, read_leaf, read_request, vouched
from atoll.protocol.identity.names import Identity
from atoll.server.identity.authority import AuthorityAway, NotSigned, Renewal
from atoll.server.names.conflicts import UNKNOWN, Claimant, NameConflicts
from atoll.server.transport.interceptor import Context
from atoll.server.transport.peer import address_of

logger = logging.getLogger(__name__)


PENDING_MAX = 256
"""Largest number of pending signatures; only members, and holders of an invitation, can request one."""

PATIENCE_S = 10.0
"""Time that a signature may take, including the time until the authority reconnects [s]."""


@dataclass(slots=True, eq=False)
class _AuthorityStream:
    """Stream of an authority, with its unanswered orders."""

    outbox: "asyncio.Queue[pb.SignOrder | None]" = field(default_factory=asyncio.Queue)
    pending: "dict[int, asyncio.Future[pb.SignAnswer]]" = field(default_factory=dict)
    address: str = UNKNOWN.address
    why: str = "the stream has ended"

    def close(self, why: str = "") -> None:
        """End the stream, and fail the pending signatures."""
        self.why = why or self.why
        self.outbox.put_nowait(None)
        for answer in self.pending.values():
            if not answer.done():
                answer.set_exception(AuthorityAway("the authority went away before it had signed: try again"))


class RemoteSigner:
    """Signer over the authority's stream; see `Signer`.

    Args:
        ca_pem: the authority's certificate.
        patience_s: see PATIENCE_S.
    """

    def __init__(self, ca_pem: bytes, patience_s: float = PATIENCE_S) -> None:
        self.ca_pem, self.cross_pem, self._patience_s = ca_pem, b"", patience_s
        self._stream: _AuthorityStream | None = None
        self._is_here = asyncio.Event()
        self._numbers, self._num_waiting = itertools.count(1), 0
        self._conflicts = NameConflicts("authority", "run `atoll authority serve` on one machine")

    async def sign(self, request: bytes, identity: Identity, renewal: Renewal | None = None) -> bytes:
        """Ask the authority to sign; see `Signer`."""
        key = read_request(request)
        if self._num_waiting >= PENDING_MAX:
            raise AuthorityAway(f"{PENDING_MAX} signatures are waiting for the authority: try again")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._patience_s):
                answer = await self._ask_newest(request, identity, renewal)
        except TimeoutError:
            raise AuthorityAway(
                "the authority's key is on another machine, which does not answer: run `atoll authority serve` there, "
                "and try again"
            ) from None
        finally:
            self._num_waiting -= 1
        pem: bytes = answer.certificate_pem
        try:
            if answer.ca_pem:  # from an authority that may have a successor
                self.ca_pem = vouched(answer.ca_pem, answer.cross_pem, self.ca_pem)
                self.cross_pem = answer.cross_pem
            check_issued(pem, self.ca_pem, key)
            if read_leaf(pem).identity != identity:
                raise CertificateError(f"it is for {read_leaf(pem).identity}")
        except CertificateError as error:
            raise NotSigned(f"the authority has answered with another certificate: {error}") from None
        return pem

    async def _ask_newest(self, request: bytes, identity: Identity, renewal: Renewal | None) -> pb.SignAnswer:
        """Ask the authority, and again if a newer stream has replaced the one that was used."""
        while True:
            while (stream := self._stream) is None:
                await self._is_here.wait()
            try:
                return await self._ask(stream, request, identity, renewal)
            except AuthorityAway:
                if self._stream in (None, stream):
                    raise

    async def _ask(
        self, stream: _AuthorityStream, request: bytes, identity: Identity, renewal: Renewal | None
    ) -> pb.SignAnswer:
        number = next(self._numbers)
        order = pb.SignOrder(number=number, request=request, role=identity.role, name=identity.name)
        if renewal is not None:
            order.older_certificate_pem, order.consent = renewal.certificate_pem, renewal.signature
        answer = stream.pending[number] = asyncio.get_running_loop().create_future()
        try:
            stream.outbox.put_nowait(order)
            signed: pb.SignAnswer = await answer
            return signed
        finally:
            del stream.pending[number]

    def connect(self, address: str = UNKNOWN.address) -> _AuthorityStream:
        """Register the stream of an authority; close an older stream, and log alternating streams."""
        older, self._stream = self._stream, _AuthorityStream(address=address)
        if older is not None:
            older.close(f"replaced by a newer stream of an authority, from {address}")
            holder, now = Claimant(older.address), time.monotonic()
            entry = self._conflicts.enter("main", Claimant(address), holder, heard_at=now, now=now)
            if entry.line:
                logger.warning("%s", entry.line)
        self._is_here.set()
        logger.info("the authority is connected")
        return self._stream

    def disconnect(self, stream: _AuthorityStream) -> None:
        """Remove a stream that has ended."""
        stream.close()
        if self._stream is stream:
            self._stream = None
            self._is_here.clear()
            logger.warning("the authority is away: enrolments and renewals fail until it is back")

    @staticmethod
    def answered(stream: _AuthorityStream, message: pb.SignAnswer) -> None:
        """Handle the answer to one order; ignore it if the order has been given up."""
        answer = stream.pending.get(message.number)
        if answer is None or answer.done():
            return
        if message.certificate_pem:
            answer.set_result(message)
        else:
            answer.set_exception(NotSigned(message.refusal[:2000] or "the authority refuses"))


class SigningService:
    """Service that an authority calls."""

    def __init__(self, signer: RemoteSigner) -> None:
        self._signer = signer

    async def Serve(self, requests: AsyncIterator[pb.SignAnswer], context: Context) -> AsyncIterator[pb.SignOrder]:
        """Send orders until the authority leaves."""
        stream = self._signer.connect(address_of(context.peer()))
        reader = asyncio.get_running_loop().create_task(self._read(requests, stream))
        try:
            yield pb.SignOrder()  # number 0: the welcome
            while (order := await stream.outbox.get()) is not None:
                yield order
            await context.abort(grpc.StatusCode.ABORTED, stream.why)
        finally:
            reader.cancel()
            self._signer.disconnect(stream)

    async def _read(self, requests: AsyncIterator[pb.SignAnswer], stream: _AuthorityStream) -> None:
        try:
            async for message in requests:
                self._signer.answered(stream, message)
        except (grpc.aio.AioRpcError, grpc.aio.AbortError) as error:
            logger.debug("the stream of the authority broke: %s", error)
        stream.close()
