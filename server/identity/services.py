"""The gRPC handlers of enrolment and renewal: they translate, hand over, and answer."""

import time
from typing import Any, NoReturn

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.identity.certificates import CertificateError
from atoll.server.identity.authority import AuthorityAway, NotSigned
from atoll.server.identity.buckets import Buckets
from atoll.server.identity.enrolments import Enrolments, TooOften
from atoll.server.identity.register import Refused

Context = grpc.aio.ServicerContext[Any, Any]

TRIES_BURST, TRIES_PER_S = 20, 0.5
"""Of one address to enrol."""

_CODES: dict[type[Exception], grpc.StatusCode] = {
    CertificateError: grpc.StatusCode.INVALID_ARGUMENT,
    Refused: grpc.StatusCode.PERMISSION_DENIED,
    NotSigned: grpc.StatusCode.PERMISSION_DENIED,
    TooOften: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AuthorityAway: grpc.StatusCode.UNAVAILABLE,
}
_REFUSALS = tuple(_CODES)


class EnrolmentService(rpc.EnrolmentServicer):
    """What those call who are no members yet.

    Args:
        enrolments: of the coordinator.
        address: where members dial.
        admin_address: where owners, operators and auditors dial.
    """

    def __init__(self, enrolments: Enrolments, address: str, admin_address: str) -> None:
        self._enrolments, self._places = enrolments, (address, admin_address)
        self._tries = Buckets(TRIES_BURST, TRIES_PER_S)

    async def GetAuthority(self, request: pb.GetAuthorityRequest, context: Context) -> pb.AuthorityReply:
        """The authority's certificate, which is no secret."""
        return pb.AuthorityReply(ca_pem=self._enrolments.ca_pem)

    async def Enrol(self, request: pb.EnrolRequest, context: Context) -> pb.Certificate:
        """A certificate for the holder of an invitation."""
        host = context.peer().rpartition(":")[0]
        if not self._tries.take(host, time.monotonic()):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many tries from this address: wait a minute")
        try:
            pem = await self._enrolments.enrol(request.id, request.secret, request.request)
        except _REFUSALS as error:
            await _refuse(context, error)
        address, admin_address = self._places
        return pb.Certificate(
            certificate_pem=pem, ca_pem=self._enrolments.ca_pem, address=address, admin_address=admin_address
        )


class MembershipService(rpc.MembershipServicer):
    """What members call to stay members."""

    def __init__(self, enrolments: Enrolments) -> None:
        self._enrolments = enrolments

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.Certificate:
        """A further certificate for whoever calls."""
        mine = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
        if mine is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "only a member renews: enrol first")
        assert mine is not None
        try:
            pem = await self._enrolments.renew(mine, request.request, request.signature)
        except _REFUSALS as error:
            await _refuse(context, error)
        return pb.Certificate(certificate_pem=pem, ca_pem=self._enrolments.ca_pem)


async def _refuse(context: Context, error: Exception) -> NoReturn:
    await context.abort(_CODES[type(error)], str(error))
    raise AssertionError("abort raises")
