"""Invitation, enrolment, renewal and revocation of members: the register and the authority brought together."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.protocol.identity.certificates import (
    CertificateError,
    Leaf,
    check_consent,
    fingerprint,
    key_fingerprint,
    read_certificates,
    read_leaf,
    read_request,
)
from atoll.protocol.identity.join_code import JoinCode
from atoll.protocol.identity.names import ANYBODY, Identity, Role, Wanted
from atoll.protocol.threads import on_thread
from atoll.server.audit.actions import Action
from atoll.server.audit.log import AuditLog, Caller
from atoll.server.identity.authority import Renewal, Signer
from atoll.server.identity.rate_limits import RateLimits
from atoll.server.identity.register import WRONG_TRIES_MAX, Member, Refused, Register, Voided
from atoll.server.identity.roster import with_hand_made

logger = logging.getLogger(__name__)

RENEWALS_BURST, RENEWALS_PER_S = 10, 2.0
"""Renewals of one identity, as a burst and a rate [1/s]: each costs a signature, and a row until it expires."""


class TooOften(Exception):
    """Error: the caller asks more often than a member needs to."""


class Enrolments:
    """Coordinator's members. All of it runs on one event loop.

    Args:
        register: the register of members.
        signer: the authority, or the connection to it.
        authority: the authority's directory, whose log has the manually issued certificates; None: it is elsewhere.
    """

    def __init__(self, register: Register, signer: Signer, authority: Path | None = None) -> None:
        self._register, self._signer, self._authority = register, signer, authority
        self.addresses: tuple[str, ...] = ()
        """The addresses, host:port, at which holders of join codes enrol."""
        self.audit: AuditLog | None = None
        """The audit log; None: nothing is recorded."""
        self._listeners: list[Callable[[Identity], None]] = []
        self._enrolling: dict[bytes, asyncio.Lock] = {}  # one enrolment at a time for each invitation
        self._renewals = RateLimits(RENEWALS_BURST, RENEWALS_PER_S)

    @property
    def ca_pem(self) -> bytes:
        """The certificates of the trusted authorities (PEM)."""
        return self._signer.ca_pem

    @property
    def cross_pem(self) -> bytes:
        """The certificates with which older authorities vouch for newer ones (PEM), or empty."""
        return self._signer.cross_pem

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the authority, as join codes have it."""
        return fingerprint(read_certificates(self._signer.ca_pem)[0])

    def on_revoked(self, listener: Callable[[Identity], None]) -> None:
        """Call `listener` on the event loop whenever all certificates of an identity have been revoked."""
        self._listeners.append(listener)

    async def invite(self, identity: Identity, lifetime_s: float) -> tuple[JoinCode, float]:
        """Make a join code that is valid for `lifetime_s` [s]; it voids an earlier one of the same identity.

        Returns:
            The join code, and the time of its expiry [s since the epoch].
        """
        invite = self._register.invite
        invitation = await on_thread(None, lambda: invite(identity, now=time.time(), lifetime_s=lifetime_s))
        logger.info("%s is invited", identity, extra=_about(identity))
        self._record(Action.CLIENT_INVITE, identity, f"good for {lifetime_s:g} s")
        code = JoinCode(self.addresses, self.fingerprint, invitation.id, invitation.secret)
        return code, invitation.expires_at

    async def enrol(self, id: bytes, secret: bytes, request: bytes, wanted: Wanted = ANYBODY) -> bytes:
        """Give the holder of an invitation its certificate; a repetition with the same key gets the same certificate.

        Raises:
            CertificateError: the request is malformed.
            Refused: the invitation is not valid for this identity or key.
            AuthorityAway, NotSigned: the authority issues no certificate now.
        """
        key_sha256 = key_fingerprint(read_request(request))
        identity = await self._redeem(id, secret, key_sha256, wanted)
        lock = self._enrolling.setdefault(id, asyncio.Lock())  # only a holder of the secret gets here
        try:
            async with lock:
                return await self._give(id, identity, request, key_sha256)
        finally:
            if not lock.locked():
                self._enrolling.pop(id, None)

    async def _redeem(self, id: bytes, secret: bytes, key_sha256: str, wanted: Wanted) -> Identity:
        redeem = self._register.redeem
        try:
            return await on_thread(None, lambda: redeem(id, secret, key_sha256, wanted, now=time.time()))
        except Voided as error:
            identity = error.identity
            what = "the invitation of %s is void after %d wrong tries: invite again"
            logger.warning(what, identity, WRONG_TRIES_MAX, extra=_about(identity))
            self._record(Action.CLIENT_VOID, identity, f"its invitation, after {WRONG_TRIES_MAX} wrong tries")
            raise

    async def _give(self, id: bytes, identity: Identity, request: bytes, key_sha256: str) -> bytes:
        issued_to, enrolled = self._register.issued_to, self._register.enrolled
        earlier = await on_thread(None, lambda: issued_to(identity, key_sha256, now=time.time()))
        if earlier is not None:
            return earlier
        pem = await self._signer.sign(request, identity)
        leaf = read_leaf(pem)
        given = await on_thread(None, lambda: enrolled(id, leaf, key_sha256, pem, now=time.time()))
        logger.info("%s has enrolled, until %s", identity, _date(leaf), extra=_about(identity))
        self._record(Action.CLIENT_ENROL, identity, _certificate(leaf), by=identity)
        return given

    async def renew(self, certificate_pem: bytes, request: bytes, signature: bytes) -> bytes:
        """Give a member a further certificate, for a new key, on the signature of the older one's key.

        Raises:
            CertificateError: the request is malformed, or the older key has not signed it.
            Refused: the older certificate is revoked.
            TooOften: it renews too often.
            AuthorityAway, NotSigned: the authority issues no certificate now.
        """
        older = read_leaf(certificate_pem)
        if self._register.revocations.is_refused(older):
            raise Refused(f"the certificate of {older.identity} is revoked")
        if not self._renewals.take(older.identity.uri, time.monotonic()):
            raise TooOften(f"{older.identity} renews more than {RENEWALS_PER_S:g} times a second: wait and try again")
        key_sha256 = key_fingerprint(read_request(request))
        check_consent(certificate_pem, request, signature)
        pem = await self._signer.sign(request, older.identity, Renewal(certificate_pem, signature))
        leaf, renewed = read_leaf(pem), self._register.renewed
        if leaf.identity != older.identity:
            raise CertificateError(f"the authority has signed for {leaf.identity} in place of {older.identity}")
        now = time.time()
        await on_thread(None, lambda: renewed(older.serial, leaf, key_sha256, pem, now=now))
        text = "%s has renewed its certificate, until %s"
        logger.info(text, older.identity, _date(leaf), extra=_about(older.identity))
        self._record(Action.CLIENT_RENEW, older.identity, _certificate(leaf), by=older.identity)
        return pem

    async def revoke(self, identity: Identity) -> None:
        """Revoke all certificates and invitations of an identity, and end its open calls."""
        await on_thread(None, lambda: self._register.revoke(identity, now=time.time()))
        logger.warning("%s is revoked", identity, extra=_about(identity))
        self._record(Action.CLIENT_REVOKE, identity, "ok")
        for listener in self._listeners:
            listener(identity)

    async def members(self) -> Sequence[Member]:
        """Return all identities that were ever invited or have a certificate."""
        return await on_thread(None, self._members)

    def _members(self) -> Sequence[Member]:
        now = time.time()
        members = self._register.members(now=now)
        return members if self._authority is None else with_hand_made(members, self._authority, now=now)

    def _record(self, action: Action, about: Identity, outcome: str, *, by: Identity | None = None) -> None:
        if self.audit is None:
            return
        if by is None:  # an admin's call: the audit log has the caller
            self.audit.record(action, str(about), outcome)
        else:
            self.audit.record_bounded(action, str(about), outcome, caller=Caller(by.name, by.role))


def _certificate(leaf: Leaf) -> str:
    return f"serial {leaf.serial:x}, until {_date(leaf)}"


def _date(leaf: Leaf) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(leaf.expires_at))


def _about(identity: Identity) -> dict[str, object]:
    """Return the log fields about a member, for a client its site."""
    return {"site": identity.name} if identity.role is Role.CLIENT else {}
