"""The enrolment with a join code: a key is made here, and the coordinator returns a certificate for it.

Only the fingerprint in the code is trusted. First an unverified handshake fetches the server's certificate. Then a
channel is opened to a server that proves the possession of exactly this certificate, and over it comes the authority's
certificate. The secret leaves this machine only if this certificate has the fingerprint and has signed the server's
certificate.
"""

import asyncio
import json
import logging
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from atoll.ground.durable import write_private
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.certificates import (
    CertificateError,
    PrivateKey,
    certified_key,
    check_issued,
    fingerprint,
    key_to_pem,
    make_request,
    new_key,
    read_certificates,
    read_key,
    read_leaf,
    server_name,
    to_pem,
    validity_of,
    vouched,
)
from atoll.protocol.identity.clock_hint import out_of_time, with_clock_hint
from atoll.protocol.identity.credential import (
    Credential,
    CredentialError,
    make_private_folder,
    spare_authority,
)
from atoll.protocol.identity.join_code import JoinCode, is_address
from atoll.protocol.identity.names import ANYBODY, COORDINATOR, PLACE, Role, Wanted
from atoll.protocol.identity.proxy import HttpProxy
from atoll.protocol.identity.shown_certificate import certificate_at
from atoll.protocol.settings import ConfigError
from atoll.protocol.wire.channel import client_options

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0
ENROLLING = "enrolling.pem"
"""File in the credential's folder that holds the key until there is a certificate for it."""

PATIENCE_S, BUSY_WAIT_S = 120.0, (1.0, 5.0)
"""Time for attempts while too many others enrol [s], and the bounds of the random wait between two attempts [s]."""

_TRY_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class EnrolmentFailed(ConfigError):
    """Error: an enrolment got no certificate; the text says why, and what to do."""


class Unreachable(EnrolmentFailed):
    """Error: an enrolment got no answer; it may succeed later."""


class Busy(Unreachable):
    """Error: too many members enrol at the coordinator now."""


@dataclass(frozen=True, slots=True)
class Place:
    """Addresses of a member's coordinator, and the invitation that led to them."""

    address: str
    admin_address: str
    invitation: str
    """Id of the invitation, hexadecimal."""

    @classmethod
    def load(cls, folder: Path) -> "Place":
        """Read the place that is stored beside a credential.

        Raises:
            CredentialError: the place is missing or damaged.
        """
        try:
            fields = json.loads((folder / PLACE).read_text("utf-8"))
            place = cls(fields["address"], fields["admin_address"], fields["invitation"])
        except FileNotFoundError:
            raise CredentialError(
                [
                    f"there is no {folder / PLACE}: enrol first, with a join code; for a certificate that was issued "
                    "by hand, name the coordinator with `atoll authority install --admin HOST:PORT`"
                ]
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CredentialError([f"{folder / PLACE} is damaged ({error}): enrol again"]) from error
        return place

    def store(self, folder: Path) -> None:
        """Store the place beside a credential."""
        content = {"address": self.address, "admin_address": self.admin_address, "invitation": self.invitation}
        write_private(folder / PLACE, json.dumps(content).encode())


def is_enrolled(folder: Path, code: JoinCode, now: float) -> bool:
    """Return whether this join code was used here and the resulting credential has not expired."""
    try:
        return Place.load(folder).invitation == code.id.hex() and not Credential.load(folder).is_expired(now)
    except CredentialError:
        return False


async def enrol(code: JoinCode, folder: Path, wanted: Wanted = ANYBODY) -> Credential:
    """Become a member: store the credential and the coordinator's place in a folder.

    Idempotent: an interrupted enrolment is repeated with the same key, and gets the same certificate.

    Args:
        code: join code of the invitation.
        folder: the folder of the credential.
        wanted: identities that the caller accepts; a code for another identity is refused, and stays valid.

    Raises:
        Unreachable: no address in the code answers.
        EnrolmentFailed: the server is not the code's coordinator, or refuses the invitation.
        CredentialError, OSError: the folder cannot be used.
    """
    key, faults = key_in(folder), []
    for address in code.addresses:
        try:
            answer, ca_pem = await _ask_while_busy(address, code, key, wanted)
            break
        except (Unreachable, TimeoutError) as error:
            faults.append(f"{address}: {error or f'no answer within {TIMEOUT_S:g} s'}")
    else:
        raise Unreachable([f"cannot enrol at {fault}" for fault in faults])
    try:
        credential = Credential(key_to_pem(key), answer.certificate_pem, ca_pem)
    except CredentialError as error:
        raise EnrolmentFailed([f"the coordinator's answer does not fit: {error}"]) from None
    if not (is_address(answer.address) and is_address(answer.admin_address)):
        raise EnrolmentFailed([f"the coordinator gives {answer.address[:80]!r} as its address; allowed: host:port"])
    credential.store(folder)
    Place(answer.address, answer.admin_address, code.id.hex()).store(folder)
    (folder / ENROLLING).unlink(missing_ok=True)
    return credential


def key_in(folder: Path) -> PrivateKey:
    """Return the key of an interrupted enrolment, or a new one that is durable before its certificate is requested.

    Raises:
        CredentialError: the folder has an authority.
        OSError: the folder cannot be written.
    """
    spare_authority(folder)
    make_private_folder(folder)
    with suppress(FileNotFoundError, CertificateError):
        return read_key((folder / ENROLLING).read_bytes())
    key = new_key()
    write_private(folder / ENROLLING, key_to_pem(key))
    return key


async def _ask_while_busy(
    address: str, code: JoinCode, key: PrivateKey, wanted: Wanted
) -> tuple[pb.Certificate, bytes]:
    """Ask for a certificate; while the coordinator is busy, repeat after random waits, for at most `PATIENCE_S`."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await _ask_again(address, code, key, wanted)
        except Busy as busy:
            wait = random.uniform(*BUSY_WAIT_S)
            if time.monotonic() + wait > until:
                raise
            logger.info("%s: %s; asking again in %.1f s", address, busy, wait)
            await asyncio.sleep(wait)


async def _ask_again(address: str, code: JoinCode, key: PrivateKey, wanted: Wanted) -> tuple[pb.Certificate, bytes]:
    """Ask for a certificate; retry once in case the coordinator renewed its certificate between our two handshakes."""
    try:
        return await _ask(address, code, key, wanted)
    except Busy:
        raise
    except Unreachable:
        return await _ask(address, code, key, wanted)


async def _ask(address: str, code: JoinCode, key: PrivateKey, wanted: Wanted) -> tuple[pb.Certificate, bytes]:
    """Ask the code's coordinator for a certificate; return its answer and the authority's certificate."""
    proxy = HttpProxy.of(os.environ)
    try:
        shown = await certificate_at(address, proxy)
    except (OSError, TimeoutError) as error:
        raise Unreachable([with_clock_hint(str(error)) or "no handshake in time"]) from None
    _check_time(f"the certificate of the server at {address}", shown, "the server must renew it")
    over = proxy.options(address) if proxy is not None else []
    options = client_options([("grpc.ssl_target_name_override", server_name(COORDINATOR)), *over])
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(shown), options=options) as channel:
        stub = rpc.Stub(channel, "Enrolment")
        try:
            authority: pb.AuthorityReply = await stub.GetAuthority(pb.GetAuthorityRequest(), timeout=TIMEOUT_S)
            ca_pem = _trusted(authority, code.fingerprint, shown, address)
            request = pb.EnrolRequest(
                id=code.id, secret=code.secret, request=make_request(key), roles=wanted.roles, name=wanted.name
            )
            return await stub.Enrol(request, timeout=TIMEOUT_S), ca_pem
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Busy([str(error.details())]) from None
            if error.code() in _TRY_AGAIN:
                raise Unreachable([with_clock_hint(f"{error.code().name}: {error.details()}")]) from None
            raise EnrolmentFailed([f"the coordinator at {address} refuses: {error.details()}"]) from None


def _trusted(named: pb.AuthorityReply, wanted: bytes, shown: bytes, address: str) -> bytes:
    """Return the authority with the code's fingerprint and those it vouches for; one has signed the server's leaf.

    Args:
        named: the certificates that the server sent as its authorities.
        wanted: fingerprint in the join code.
        shown: the server's certificate, PEM.
        address: the address of the server, for the error.

    Raises:
        EnrolmentFailed: the server is not the code's coordinator.
    """
    try:
        found = [authority for authority in read_certificates(named.ca_pem) if fingerprint(authority) == wanted]
        if not found:
            raise CertificateError("its authority has another fingerprint than the join code")
        leaf, trusted = read_leaf(shown), vouched(named.ca_pem, named.cross_pem, to_pem(found[0]))
        check_issued(shown, trusted, certified_key(shown))
        if leaf.identity.role is not Role.COORDINATOR:
            raise CertificateError(f"its certificate is for {leaf.identity}")
    except CertificateError as error:
        fault = f"the server at {address} is not the coordinator of this join code: {error}. The code was not sent"
        raise EnrolmentFailed([fault]) from None
    _check_time(f"the certificate of the authority of the server at {address}", trusted, "it needs a new authority")
    return trusted


def _check_time(what: str, pem: bytes, remedy: str) -> None:
    """Refuse a certificate that is not valid now: with a wrong clock, a new certificate would not help.

    Raises:
        Unreachable: a clock may be wrong, and may be set soon.
        CertificateError: the bytes are not a certificate.
    """
    times, now = validity_of(read_certificates(pem)[0]), time.time()
    if not times.includes(now):
        raise Unreachable([out_of_time(what, times, now, remedy)])
