"""The authority when its key lies elsewhere: it dials in, as clients do, and signs what it is asked to over its stream.

So that machine needs no open port. While it is away nobody enrols or renews; nothing else depends on it.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.identity.certificates import CertificateError, check_issued, read_leaf, read_request
from atoll.protocol.identity.names import Identity
from atoll.server.identity.authority import AuthorityAway, NotSigned, Renewal
from atoll.server.transport.interceptor import Context

logger = logging.getLogger(__name__)


PENDING_MAX = 256
"""Signatures that are waited for at once: only members, and those who have an invitation, can ask for any."""

PATIENCE_S = 10.0
"""Seconds that one may take, with those in which the authority comes back."""


@dataclass(slots=True, eq=False)
class _Line:
    """The stream of an authority, and what it was asked."""

    outbox: "asyncio.Queue[pb.SignOrder | None]" = field(default_factory=asyncio.Queue)
    pending: "dict[int, asyncio.Future[bytes]]" = field(default_factory=dict)

    def close(self) -> None:
        """Whoever waits for a signature over it waits no longer."""
        self.outbox.put_nowait(None)
        for answer in self.pending.values():
            if not answer.done():
                answer.set_exception(AuthorityAway("the authority went away before it had signed: try again"))


class RemoteSigner:
    """See `Signer`, and the module docstring.

    Args:
        ca_pem: the authority's certificate.
        patience_s: see PATIENCE_S.
    """

    def __init__(self, ca_pem: bytes, patience_s: float = PATIENCE_S) -> None:
        self.ca_pem, self._patience_s = ca_pem, patience_s
        self._line: _Line | None = None
        self._is_here = asyncio.Event()
        self._numbers, self._num_waiting = itertools.count(1), 0

    async def sign(self, request: bytes, identity: Identity, renewal: Renewal | None = None) -> bytes:
        """Ask the authority; see `Signer`."""
        key = read_request(request)
        if self._num_waiting >= PENDING_MAX:
            raise AuthorityAway(f"{PENDING_MAX} others wait for the authority: try again")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._patience_s):
                pem = await self._ask(request, identity, renewal)
        except TimeoutError:
            raise AuthorityAway("the authority's key lies elsewhere, and it does not answer: try again") from None
        finally:
            self._num_waiting -= 1
        try:
            check_issued(pem, self.ca_pem, key)
            if read_leaf(pem).identity != identity:
                raise CertificateError(f"it is for {read_leaf(pem).identity}")
        except CertificateError as error:
            raise NotSigned(f"the authority's answer does not fit: {error}") from None
        return pem

    async def _ask(self, request: bytes, identity: Identity, renewal: Renewal | None) -> bytes:
        while (line := self._line) is None:
            await self._is_here.wait()
        number = next(self._numbers)
        order = pb.SignOrder(number=number, request=request, role=identity.role, name=identity.name)
        if renewal is not None:
            order.older_certificate_pem, order.consent = renewal.certificate_pem, renewal.signature
        answer = line.pending[number] = asyncio.get_running_loop().create_future()
        try:
            line.outbox.put_nowait(order)
            pem: bytes = await answer
            return pem
        finally:
            del line.pending[number]

    def connect(self) -> _Line:
        """An authority has come; a newer one takes an older one's place."""
        if self._line is not None:
            self._line.close()
        self._line = _Line()
        self._is_here.set()
        logger.info("the authority is here")
        return self._line

    def disconnect(self, line: _Line) -> None:
        """Its stream has ended."""
        line.close()
        if self._line is line:
            self._line = None
            self._is_here.clear()
            logger.warning("the authority is away: nobody enrols or renews until it is back")

    @staticmethod
    def answered(line: _Line, message: pb.SignAnswer) -> None:
        """What it says to one order; to one that nobody waits for any more it means nothing."""
        answer = line.pending.get(message.number)
        if answer is None or answer.done():
            return
        if message.certificate_pem:
            answer.set_result(message.certificate_pem)
        else:
            answer.set_exception(NotSigned(message.refusal[:2000] or "the authority refuses"))


class SigningService(rpc.SigningServicer):
    """What an authority calls."""

    def __init__(self, signer: RemoteSigner) -> None:
        self._signer = signer

    async def Serve(self, requests: AsyncIterator[pb.SignAnswer], context: Context) -> AsyncIterator[pb.SignOrder]:
        """Orders, for as long as the authority is here."""
        line = self._signer.connect()
        reader = asyncio.get_running_loop().create_task(self._read(requests, line))
        try:
            yield pb.SignOrder()  # it is heard
            while (order := await line.outbox.get()) is not None:
                yield order
            await context.abort(grpc.StatusCode.ABORTED, "replaced by a newer stream of an authority, or ended")
        finally:
            reader.cancel()
            self._signer.disconnect(line)

    async def _read(self, requests: AsyncIterator[pb.SignAnswer], line: _Line) -> None:
        try:
            async for message in requests:
                self._signer.answered(line, message)
        except (grpc.aio.AioRpcError, grpc.aio.AbortError) as error:
            logger.debug("the stream of the authority broke: %s", error)
        line.close()
