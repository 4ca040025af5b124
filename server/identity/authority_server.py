"""The authority as a separate process on another machine: it dials the coordinator and signs what it may sign.

It trusts the coordinator only in part. At the coordinator's request it signs for clients and aggregation ranks; for any
other role it only renews certificates, with a signature by the older certificate's key, which the coordinator does not
have. Owners, operators and auditors get their first certificate by hand (`atoll authority issue`).
"""

import asyncio
import json
import logging
import os
import random
import time
from pathlib import Path

import grpc

from atoll.ground.backoff import delay
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.displaced import Displaced
from atoll.protocol.identity.certificates import (
    CertificateError,
    check_consent,
    check_issued,
    read_certificates,
    read_leaf,
)
from atoll.protocol.identity.dialer import options_to
from atoll.protocol.identity.handshake_fault import explained, is_handshake_failure
from atoll.protocol.identity.names import COORDINATOR, Identity, Role
from atoll.protocol.identity.proxy import HttpProxy
from atoll.protocol.threads import begin_on_thread
from atoll.protocol.wire.stream import Stream, StreamBroken
from atoll.server.identity.authority import Authority, NotSigned, Renewal
from atoll.server.identity.rate_limits import RateLimits

logger = logging.getLogger(__name__)

BY_ITSELF = frozenset({Role.CLIENT, Role.AGGREGATOR})
"""Roles for which a coordinator may request certificates without a signature by an older key."""

SIGNATURES_BURST, SIGNATURES_PER_S = 1000, 20.0
RECONNECT_S = (0.5, 5.0)
"""First and longest wait between two connections; the longest is less than a coordinator waits [s]."""
MYSELF = Identity(Role.AUTHORITY, "main")
LOG = "issued.jsonl"

BY_HAND = "by hand"
"""Reason that the log gives for a certificate made by `atoll authority issue`."""


class AuthorityServer:
    """Server of the authority: it decides, logs each certificate in the authority's directory, and then sends it.

    Args:
        authority: the authority.
        folder: its directory.
        proxy: the HTTP proxy on the way to coordinators, if any.
    """

    def __init__(self, authority: Authority, folder: Path, proxy: HttpProxy | None = None) -> None:
        self._authority, self._folder, self._proxy = authority, folder, proxy
        self._signatures = RateLimits(SIGNATURES_BURST, SIGNATURES_PER_S)
        self._was_welcomed = False  # on the newest connection

    def sign(self, request: bytes, identity: Identity, renewal: Renewal | None) -> bytes:
        """Sign a request of a coordinator.

        Raises:
            NotSigned: the coordinator may not request it, or requests too often.
            CertificateError, ValueError: the request is malformed.
            OSError: the log cannot be written.
        """
        now = time.time()
        if not self._signatures.take("", time.monotonic()):
            raise NotSigned(f"more than {SIGNATURES_PER_S:g} signatures a second: wait and try again")
        if renewal is not None:
            self._check(renewal, request, identity, now)
        elif identity.role not in BY_ITSELF:
            raise NotSigned(f"{identity} gets its first certificate by hand: atoll authority issue")
        return self.issue(request, identity, "by itself" if renewal is None else "renewal")

    def _check(self, renewal: Renewal, request: bytes, identity: Identity, now: float) -> None:
        """Check that the older certificate is ours, valid and for this identity, and its key has signed the request."""
        older = read_certificates(renewal.certificate_pem)[0]
        check_issued(renewal.certificate_pem, self._authority.ca_pem, older.public_key())  # type: ignore[arg-type]
        check_consent(renewal.certificate_pem, request, renewal.signature)
        leaf = read_leaf(renewal.certificate_pem)
        if leaf.identity != identity:
            raise NotSigned(f"{leaf.identity} asks to become {identity}")
        if leaf.expires_at <= now:
            raise NotSigned(f"the certificate of {identity} has expired: invite it again")

    def issue(self, request: bytes, identity: Identity, why: str) -> bytes:
        """Issue a certificate for any identity, and log it.

        Raises:
            CertificateError, ValueError: the request is malformed.
            OSError: the log cannot be written.
        """
        pem = self._authority.issue(request, identity)
        leaf = read_leaf(pem)
        entry = {"at": time.time(), "identity": identity.uri, "serial": f"{leaf.serial:x}", "until": leaf.expires_at}
        line = json.dumps({**entry, "why": why}).encode() + b"\n"
        file = os.open(self._folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)
        return pem

    def answer(self, order: pb.SignOrder) -> pb.SignAnswer:
        """Answer one order of the coordinator: a certificate, or the reason for the refusal."""
        renewal = Renewal(order.older_certificate_pem, order.consent) if order.older_certificate_pem else None
        try:
            identity = Identity(Role(order.role), order.name)
            pem = self.sign(order.request, identity, renewal)
        except (NotSigned, CertificateError, ValueError, OSError) as error:
            logger.warning("refused to sign for %s %s: %s", order.role[:20], order.name[:80], error)
            return pb.SignAnswer(number=order.number, refusal=str(error)[:2000])
        logger.info("signed for %s", identity)
        authority = self._authority
        return pb.SignAnswer(
            number=order.number, certificate_pem=pem, ca_pem=authority.ca_pem, cross_pem=authority.cross_pem
        )

    async def serve(self, coordinator: str) -> None:
        """Dial a coordinator and answer its orders; reconnect whenever the stream ends, until cancelled."""
        attempt, complaint, rng = 0, "", random.Random()
        displaced = Displaced(RECONNECT_S[1], rng)
        while True:
            begun_at = time.monotonic()
            try:
                await self._connection(coordinator)
                attempt, complaint = 0, ""
            except StreamBroken as error:
                if self._was_welcomed:
                    attempt, complaint = 0, ""
                    displaced.held_for(time.monotonic() - begun_at)
                if error.is_displaced:
                    wait, level = displaced.next_wait(), logging.WARNING if displaced.is_news else logging.DEBUG
                    what = f"another authority serves {coordinator}: {error.detail}; run it on one machine"
                    logger.log(level, "%s; trying again in %.1f s", what, wait)
                    await asyncio.sleep(wait)
                    continue
                cause = "TLS" if is_handshake_failure(error.detail) else error.code.name
                if cause != complaint:
                    why = await explained(str(error), coordinator, self._authority.credential(MYSELF))
                    logger.warning("no connection to %s: %s; trying again", coordinator, why)
                complaint = cause
            await asyncio.sleep(delay(attempt, *RECONNECT_S, rng))
            attempt += 1

    async def _connection(self, coordinator: str) -> None:
        self._was_welcomed = False
        credential = self._authority.credential(MYSELF)
        secret = grpc.ssl_channel_credentials(credential.ca_pem, credential.key_pem, credential.certificate_pem)
        over = self._proxy.options(coordinator) if self._proxy is not None else ()
        async with grpc.aio.secure_channel(coordinator, secret, options=options_to(COORDINATOR, over)) as channel:
            stream: Stream[pb.SignAnswer, pb.SignOrder] = Stream(rpc.Stub(channel, "Signing").Serve)
            while (order := await stream.read()) is not None:
                if order.number == 0:
                    self._was_welcomed = True
                    logger.info("connected to %s", coordinator)
                    continue
                await stream.write(await begin_on_thread(None, self.answer, order))
