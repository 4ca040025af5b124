"""The gRPC services of enrolment, renewal and member administration: they translate, delegate and answer."""

import logging
import time
from typing import NoReturn

import grpc

from atoll.ground.durable import DiskFull, told_outside
from atoll.ground.printable import count_of, printable
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import CertificateError, server_name
from atoll.protocol.identity.names import Identity, Role, Wanted
from atoll.server.identity.authority import AuthorityAway, NotSigned
from atoll.server.identity.enrolments import Enrolments, TooOften
from atoll.server.identity.own_certificates import OWNER
from atoll.server.identity.rate_limits import RateLimits
from atoll.server.identity.register import Member, Refused
from atoll.server.journal.database import Database
from atoll.server.transport.interceptor import Context

logger = logging.getLogger(__name__)


TRIES_BURST, TRIES_PER_S = 20, 0.5
"""Enrolments that one address may try: burst and rate [1/s]."""

LIFETIME_S_MAX = 30 * 86400.0
"""Longest lifetime of an invitation [s]."""

_CODES: dict[type[Exception], grpc.StatusCode] = {
    CertificateError: grpc.StatusCode.INVALID_ARGUMENT,
    Refused: grpc.StatusCode.PERMISSION_DENIED,
    NotSigned: grpc.StatusCode.PERMISSION_DENIED,
    TooOften: grpc.StatusCode.RESOURCE_EXHAUSTED,
    AuthorityAway: grpc.StatusCode.UNAVAILABLE,
    DiskFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_REFUSALS = tuple(_CODES)
_NOT_STORED = "cannot be stored now: {0}"


class EnrolmentService:
    """Service for callers that are not members yet.

    Args:
        enrolments: the coordinator's enrolments.
        address: the address that members dial.
        admin_address: the address that owners, operators and auditors dial.
    """

    def __init__(self, enrolments: Enrolments, address: str, admin_address: str) -> None:
        self._enrolments, self._addresses = enrolments, (address, admin_address)
        self._tries = RateLimits(TRIES_BURST, TRIES_PER_S)

    async def GetAuthority(self, request: pb.GetAuthorityRequest, context: Context) -> pb.AuthorityReply:
        """Return the authority's certificate, which is public."""
        return pb.AuthorityReply(ca_pem=self._enrolments.ca_pem, cross_pem=self._enrolments.cross_pem)

    async def Enrol(self, request: pb.EnrolRequest, context: Context) -> pb.Certificate:
        """Give the holder of an invitation its certificate."""
        host = context.peer().rpartition(":")[0]
        if not self._tries.take(host, time.monotonic()):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many tries from this address: wait a minute")
        try:
            wanted = Wanted(tuple(request.roles), request.name)
            pem = await self._enrolments.enrol(request.id, request.secret, request.request, wanted)
        except _REFUSALS as error:
            await _refuse(context, error)
        self._tries.put_back(host)  # many sites may share an address; only failed tries count
        address, admin_address = self._addresses
        return pb.Certificate(
            certificate_pem=pem, ca_pem=self._enrolments.ca_pem, address=address, admin_address=admin_address
        )


class MembershipService:
    """Service with which members renew their certificates."""

    def __init__(self, enrolments: Enrolments) -> None:
        self._enrolments = enrolments

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.Certificate:
        """Give the caller a further certificate."""
        certificate = next(iter(context.auth_context().get("x509_pem_cert", ())), None)
        if certificate is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "only a member can renew: enrol first")
        assert certificate is not None
        try:
            pem = await self._enrolments.renew(certificate, request.request, request.signature)
        except _REFUSALS as error:
            await _refuse(context, error)
        enrolments = self._enrolments
        return pb.Certificate(certificate_pem=pem, ca_pem=enrolments.ca_pem, cross_pem=enrolments.cross_pem)


class MembersAdmin:
    """Part of the operators' service that concerns members.

    Args:
        enrolments: the coordinator's enrolments; None: the coordinator is `--insecure`.
        num_ranks: the number of its aggregation ranks.
        database: the database of the register and the journal.
    """

    def __init__(self, enrolments: Enrolments | None, num_ranks: int, database: Database) -> None:
        self._enrolments, self.num_ranks, self._database = enrolments, num_ranks, database

    async def check_database(self, context: Context) -> None:
        """Refuse a call that would wait for the database: the caller may give up before it is done."""
        if self._database.away:
            what = f"nothing was done, as the journal waits for its database: {self._database.away}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, what)

    async def Invite(self, request: pb.InviteRequest, context: Context) -> pb.InviteReply:
        """Make an invitation, as a join code."""
        enrolments, identity = await self._open(context), await _identity(context, request.role, request.name)
        if not 1 <= request.lifetime_s <= LIFETIME_S_MAX:
            what = f"an invitation for {request.lifetime_s:g} s; allowed: 1 s to {LIFETIME_S_MAX / 86400:g} days"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
        if identity.role is Role.AGGREGATOR:
            await self._check_rank(identity, context)
        try:
            code, expires_at = await enrolments.invite(identity, request.lifetime_s)
        except DiskFull as error:
            await _not_stored(context, error)
        return pb.InviteReply(join_code=str(code), expires_at=expires_at)

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeReply:
        """Revoke an identity's certificates and invitations."""
        enrolments, identity = await self._open(context), await _identity(context, request.role, request.name)
        try:
            await enrolments.revoke(identity)
        except DiskFull as error:
            await _not_stored(context, error)
        return pb.RevokeReply()

    async def ListMembers(self, request: pb.ListMembersRequest, context: Context) -> pb.ListMembersReply:
        """List all identities that were ever invited or have a certificate."""
        members = await (await self._open(context)).members()
        return pb.ListMembersReply(members=map(_row, members))

    async def _check_rank(self, identity: Identity, context: Context) -> None:
        """Refuse an aggregator that is not a rank here: its name must be its number, in canonical notation."""
        if not (identity.name.isdigit() and str(int(identity.name)) == identity.name):
            what = f"{identity}: an aggregator's name is its number, such as 0 or 12"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
        if int(identity.name) >= self.num_ranks:
            has = count_of(self.num_ranks, "aggregation rank") if self.num_ranks else "no aggregation ranks"
            what = f"{identity}: this coordinator has {has}; start it with --aggregators N"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, what)

    async def _open(self, context: Context) -> Enrolments:
        if self._enrolments is None:
            what = "this coordinator is --insecure: it has no authority, and no members to invite or revoke"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, what)
        assert self._enrolments is not None
        await self.check_database(context)
        return self._enrolments


async def _identity(context: Context, role: str, name: str) -> Identity:
    try:
        identity = Identity(Role(role), name)
        if identity.role in (Role.COORDINATOR, Role.AGGREGATOR):
            server_name(identity)
    except ValueError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if identity.role in (Role.COORDINATOR, Role.AUTHORITY):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{identity} can be neither invited nor revoked")
    if identity == OWNER:
        what = f"{identity} is the holder of the state directory, and can be neither invited nor revoked"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
    return identity


def _row(member: Member) -> pb.MemberRow:
    identity, expires_at = member.identity, member.expires_at or 0.0
    return pb.MemberRow(
        role=identity.role,
        name=identity.name,
        standing=member.standing,
        since=member.since,
        expires_at=expires_at,
    )


async def _refuse(context: Context, error: Exception) -> NoReturn:
    """Refuse a stranger's or a member's request and log it; outsiders learn of a disk only that it is full."""
    logger.warning("refused: %s (from %s)", printable(str(error)), context.peer())  # the error may quote their input
    code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
    await context.abort(code, _NOT_STORED.format(told_outside(error)) if isinstance(error, DiskFull) else str(error))
    raise AssertionError("abort raises")


async def _not_stored(context: Context, error: DiskFull) -> NoReturn:
    """Refuse an operator's request because the disk is full, and name the disk."""
    logger.error("refused: %s (from %s)", error, context.peer())
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, _NOT_STORED.format(error))
    raise AssertionError("abort raises")
