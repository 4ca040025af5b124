"""Becoming a member, staying one, and being one no longer: the register and the authority brought together."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

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
from atoll.protocol.identity.names import ANYBODY, Identity, Wanted
from atoll.protocol.threads import on_thread
from atoll.server.audit.actions import Action
from atoll.server.audit.log import AuditLog, Caller
from atoll.server.identity.authority import Renewal, Signer
from atoll.server.identity.rate_limits import Buckets
from atoll.server.identity.register import WRONG_TRIES_MAX, Member, Refused, Register, Voided

logger = logging.getLogger(__name__)

RENEWALS_BURST, RENEWALS_PER_S = 10, 2.0
"""Of one identity: each time a key is made and a signature, and a row is kept until the certificate expires."""


class TooOften(Exception):
    """Somebody asks more often than it makes sense."""


class Enrolments:
    """What the coordinator does about its members. Everything happens on one event loop.

    Args:
        register: of the members.
        signer: the authority, or the way to it.
    """

    def __init__(self, register: Register, signer: Signer) -> None:
        self._register, self._signer = register, signer
        self.addresses: tuple[str, ...] = ()
        """Where to enrol, host:port, as join codes have it."""
        self.audit: AuditLog | None = None
        """Where it is written down."""
        self._listeners: list[Callable[[Identity], None]] = []
        self._enrolling: dict[bytes, asyncio.Lock] = {}  # one at a time of each invitation
        self._renewals = Buckets(RENEWALS_BURST, RENEWALS_PER_S)

    @property
    def ca_pem(self) -> bytes:
        """The authorities that are trusted."""
        return self._signer.ca_pem

    @property
    def fingerprint(self) -> bytes:
        """Of the authority, as join codes have it."""
        return fingerprint(read_certificates(self._signer.ca_pem)[0])

    def on_revoked(self, listener: Callable[[Identity], None]) -> None:
        """Call this, on the event loop, when all certificates of an identity have ceased to count."""
        self._listeners.append(listener)

    async def invite(self, identity: Identity, lifetime_s: float) -> tuple[JoinCode, float]:
        """A join code that is good for so many seconds, and until when; an earlier one of the same identity is void."""
        invite = self._register.invite
        invitation = await on_thread(None, lambda: invite(identity, now=time.time(), lifetime_s=lifetime_s))
        logger.info("%s is invited", identity)
        self._say(Action.CLIENT_INVITE, identity, f"good for {lifetime_s:g} s")
        code = JoinCode(self.addresses, self.fingerprint, invitation.id, invitation.secret)
        return code, invitation.expires_at

    async def enrol(self, id: bytes, secret: bytes, request: bytes, wanted: Wanted = ANYBODY) -> bytes:
        """Give the holder of an invitation its certificate. Repeated with the same key, it is the same one.

        Raises:
            CertificateError: the request is none.
            Refused: the invitation is not good for this.
            AuthorityAway, NotSigned: there is no certificate now.
        """
        key_sha256 = key_fingerprint(read_request(request))
        identity = await self._redeem(id, secret, key_sha256, wanted)
        lock = self._enrolling.setdefault(id, asyncio.Lock())  # only those who have the secret come here
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
            who = error.identity
            logger.warning("the invitation of %s is void after %d wrong tries: invite again", who, WRONG_TRIES_MAX)
            self._say(Action.CLIENT_VOID, who, f"its invitation, after {WRONG_TRIES_MAX} wrong tries")
            raise

    async def _give(self, id: bytes, identity: Identity, request: bytes, key_sha256: str) -> bytes:
        issued_to, enrolled = self._register.issued_to, self._register.enrolled
        had = await on_thread(None, lambda: issued_to(identity, key_sha256, now=time.time()))
        if had is not None:
            return had
        pem = await self._signer.sign(request, identity)
        leaf = read_leaf(pem)
        given = await on_thread(None, lambda: enrolled(id, leaf, key_sha256, pem, now=time.time()))
        logger.info("%s has enrolled, until %s", identity, _date(leaf))
        self._say(Action.CLIENT_ENROL, identity, _certificate(leaf), by=identity)
        return given

    async def renew(self, certificate_pem: bytes, request: bytes, signature: bytes) -> bytes:
        """Give a member a further certificate, for a new key, on the word of the older one.

        Raises:
            CertificateError: the request is none, or the older key has not signed it.
            Refused: it has been revoked.
            TooOften: it asks too often.
            AuthorityAway, NotSigned: there is no certificate now.
        """
        older = read_leaf(certificate_pem)
        if self._register.revocations.is_refused(older):
            raise Refused(f"the certificate of {older.identity} is revoked")
        if not self._renewals.take(older.identity.uri, time.monotonic()):
            raise TooOften(f"{older.identity} renews more than {RENEWALS_PER_S:g} times a second")
        key_sha256 = key_fingerprint(read_request(request))
        check_consent(certificate_pem, request, signature)
        pem = await self._signer.sign(request, older.identity, Renewal(certificate_pem, signature))
        leaf, renewed = read_leaf(pem), self._register.renewed
        if leaf.identity != older.identity:
            raise CertificateError(f"the authority has signed for {leaf.identity} in place of {older.identity}")
        now = time.time()
        await on_thread(None, lambda: renewed(older.serial, leaf, key_sha256, pem, now=now))
        logger.info("%s has renewed its certificate, until %s", older.identity, _date(leaf))
        self._say(Action.CLIENT_RENEW, older.identity, _certificate(leaf), by=older.identity)
        return pem

    async def revoke(self, identity: Identity) -> None:
        """None of its certificates counts from now on, nor an invitation; its open calls end."""
        await on_thread(None, lambda: self._register.revoke(identity, now=time.time()))
        logger.warning("%s is revoked", identity)
        self._say(Action.CLIENT_REVOKE, identity, "ok")
        for listener in self._listeners:
            listener(identity)

    async def members(self) -> Sequence[Member]:
        """Everybody who was ever invited or has a certificate."""
        return await on_thread(None, lambda: self._register.members(now=time.time()))

    def _say(self, action: Action, about: Identity, outcome: str, *, by: Identity | None = None) -> None:
        if self.audit is None:
            return
        if by is None:  # an admin: whoever is acting
            self.audit.record(action, str(about), outcome)
        else:
            self.audit.record_bounded(action, str(about), outcome, caller=Caller(by.name, by.role))


def _certificate(leaf: Leaf) -> str:
    return f"serial {leaf.serial:x}, until {_date(leaf)}"


def _date(leaf: Leaf) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(leaf.expires_at))
