"""Enrolling with a join code: a key is made here, and a certificate for it comes from the coordinator.

The code's fingerprint is all that is trusted. The coordinator's certificate is fetched in a handshake that believes
anything; a channel is opened to whoever can prove to hold exactly that certificate; over it comes the authority's; and
only when this has the fingerprint, and has signed the coordinator's, does the secret leave this machine.
"""

import asyncio
import json
import logging
import os
import random
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
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
)
from atoll.protocol.identity.credential import (
    Credential,
    CredentialError,
    make_private_folder,
    spare_authority,
    write_private,
)
from atoll.protocol.identity.join_code import JoinCode, is_address
from atoll.protocol.identity.names import ANYBODY, COORDINATOR, Role, Wanted
from atoll.protocol.identity.proxy import HttpProxy
from atoll.protocol.settings import ConfigError
from atoll.protocol.wire.channel import HANDSHAKE_S, client_options

logger = logging.getLogger(__name__)

TIMEOUT_S = 30.0
ENROLLING, PLACE = "enrolling.pem", "place.json"
"""The key until there is a certificate for it; where the coordinator is, and which code led there."""

PATIENCE_S, BUSY_WAIT_S = 120.0, (1.0, 5.0)
"""How long to try while too many others enrol, and the seconds between two tries, by chance so that not all come back
at once."""

_TRY_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class EnrolmentFailed(ConfigError):
    """There is no certificate; the text says why, and what to do."""


class Unreachable(EnrolmentFailed):
    """Nobody answers, or not now: it may work another time."""


class Busy(Unreachable):
    """Too many enrol just now."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the coordinator is that one is a member of."""

    address: str
    admin_address: str
    invitation: str
    """The id of the invitation, hexadecimal."""

    @classmethod
    def load(cls, folder: Path) -> "Place":
        """As it was stored beside a credential.

        Raises:
            CredentialError: there is none, or it is damaged.
        """
        try:
            said = json.loads((folder / PLACE).read_text("utf-8"))
            place = cls(said["address"], said["admin_address"], said["invitation"])
        except FileNotFoundError:
            raise CredentialError(
                [
                    f"there is no {folder / PLACE}: enrol first, with a join code; "
                    "with a certificate by hand, say where with `atoll authority install --admin HOST:PORT`"
                ]
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CredentialError([f"{folder / PLACE} is damaged ({error}): enrol anew"]) from None
        return place

    def store(self, folder: Path) -> None:
        """Put it beside a credential."""
        content = {"address": self.address, "admin_address": self.admin_address, "invitation": self.invitation}
        write_private(folder / PLACE, json.dumps(content).encode())


def is_enrolled(folder: Path, code: JoinCode, now: float) -> bool:
    """Whether this very code has been used here, and what came of it still holds."""
    try:
        return Place.load(folder).invitation == code.id.hex() and not Credential.load(folder).is_expired(now)
    except CredentialError:
        return False


async def enrol(code: JoinCode, folder: Path, wanted: Wanted = ANYBODY) -> Credential:
    """Become a member: the credential and the coordinator's place lie in the folder afterwards.

    One that is cut is begun again with the same key, and so gets the same certificate.

    Args:
        code: of the invitation.
        folder: where the credential will lie.
        wanted: who one is willing to become; a code for somebody else is refused, and stays good.

    Raises:
        Unreachable: nobody answers at any of the code's addresses.
        EnrolmentFailed: somebody else answers there than the code says, or the invitation is refused.
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
        raise EnrolmentFailed([f"the coordinator says that it is at {answer.address[:80]!r}, which is no address"])
    credential.store(folder)
    Place(answer.address, answer.admin_address, code.id.hex()).store(folder)
    (folder / ENROLLING).unlink(missing_ok=True)
    return credential


def key_in(folder: Path) -> PrivateKey:
    """The key of an enrolment that was cut, or a new one; on disk before anybody signs for it.

    Raises:
        CredentialError: an authority lies there.
        OSError: the disk does not allow it.
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
    """As `_ask_again`; and later, as long as there is patience, while it has too much to do with others."""
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
    """As `_ask`; once more when the coordinator may have renewed its certificate between our two handshakes."""
    try:
        return await _ask(address, code, key, wanted)
    except Busy:
        raise
    except Unreachable:
        return await _ask(address, code, key, wanted)


async def _ask(address: str, code: JoinCode, key: PrivateKey, wanted: Wanted) -> tuple[pb.Certificate, bytes]:
    """The answer of whoever is at an address and is who the code says; and the authority."""
    proxy = HttpProxy.of(os.environ)
    shown = await _certificate_at(address, proxy)
    over = proxy.options(address) if proxy is not None else []
    own = {"grpc.ssl_target_name_override": server_name(COORDINATOR)}
    options = list((dict(client_options()) | own | dict(over)).items())
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(shown), options=options) as channel:
        stub = rpc.EnrolmentStub(channel)
        try:
            authority: pb.AuthorityReply = await stub.GetAuthority(pb.GetAuthorityRequest(), timeout=TIMEOUT_S)
            ca_pem = _trusted(authority.ca_pem, code.fingerprint, shown, address)
            asked = make_request(key)
            request = pb.EnrolRequest(
                id=code.id, secret=code.secret, request=asked, roles=wanted.roles, name=wanted.name
            )
            return await stub.Enrol(request, timeout=TIMEOUT_S), ca_pem
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Busy([str(error.details())]) from None
            if error.code() in _TRY_AGAIN:
                raise Unreachable([f"{error.code().name}: {error.details()}"]) from None
            raise EnrolmentFailed([f"the coordinator at {address} refuses: {error.details()}"]) from None


async def _certificate_at(address: str, proxy: HttpProxy | None) -> bytes:
    """The certificate (PEM) that whoever listens there shows. It is not yet believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    name = server_name(COORDINATOR)
    if proxy is not None and proxy.is_for(address):
        opening = proxy.open_tls(address, context, name)
    else:
        opening = asyncio.open_connection(host.strip("[]"), int(port), ssl=context, server_hostname=name, limit=2**16)
    try:
        _, writer = await asyncio.wait_for(opening, HANDSHAKE_S)
    except (OSError, TimeoutError) as error:
        raise Unreachable([str(error) or "no handshake in time"]) from None
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()  # nothing is to be said to whoever it is
        with suppress(OSError):
            await writer.wait_closed()
    return ssl.DER_cert_to_PEM_cert(shown).encode()


def _trusted(ca_pem: bytes, wanted: bytes, shown: bytes, address: str) -> bytes:
    """The authority's certificate alone, when it is the one that the code names and the coordinator's is from it."""
    try:
        found = [authority for authority in read_certificates(ca_pem) if fingerprint(authority) == wanted]
        if not found:
            raise CertificateError("its authority has another fingerprint than the join code")
        leaf, trusted = read_leaf(shown), to_pem(found[0])
        check_issued(shown, trusted, certified_key(shown))
        if leaf.identity.role is not Role.COORDINATOR or leaf.expires_at <= time.time():
            raise CertificateError(f"its certificate is for {leaf.identity}, until {time.ctime(leaf.expires_at)}")
    except CertificateError as error:
        what = f"whoever is at {address} is not the coordinator of this join code: {error}. Nothing was told to it"
        raise EnrolmentFailed([what]) from None
    return trusted
