"""The renewal of a credential: a new key and a certificate for it before the old one expires."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.certificates import CertificateError, consent, key_to_pem, make_request, new_key, vouched
from atoll.protocol.identity.clock_hint import with_clock_hint
from atoll.protocol.identity.credential import Credential, CredentialError
from atoll.protocol.identity.keeper import Keeper

logger = logging.getLogger(__name__)

LOOK_S = 10.0
"""Longest interval between two checks of the wall clock [s], which may be set, or advance while the machine sleeps. A
coordinator whose clock was set back by minutes is not reached in the meantime: its certificate is not valid yet."""

RETRY_MAX_S = 60.0
"""Longest wait after a failed renewal [s]."""

LEAST_WAIT_S = 0.25
"""Shortest interval between two renewals [s], whatever the certificates' lifetimes."""

TRIES = 20
"""Attempts within the lifetime of a certificate: the wait after a failed one is lifetime / TRIES, with jitter."""

TIMEOUT_S = 30.0

Renew = Callable[[bytes, bytes], Awaitable[tuple[bytes, bytes, bytes]]]
"""Function that exchanges a request and the older key's consent for the certificate, the authorities, and the
certificates in which older authorities vouch for newer ones, all PEM.

Raises MembershipEnded if no further attempt can succeed, or NotRenewed.
"""


class MembershipEnded(CredentialError):
    """End of a membership: the identity is revoked or its certificate has expired; joining needs a new join code."""


class NotRenewed(OSError):
    """Error: a renewal failed, and is repeated."""


async def keep_renewed(
    keeper: Keeper, renew: Renew, *, rng: random.Random, check: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Renew the keeper's credential whenever it is due, or not valid yet, until cancelled.

    Args:
        keeper: the keeper of the credential.
        renew: asks for a certificate.
        rng: source of the jitter.
        check: after a failure, waits while the credential may still be renewed, and raises CredentialError once it has
            expired; None: the authority renews expired credentials, too.

    Raises:
        MembershipEnded: the identity is revoked, or the credential has expired.
        OSError: the folder cannot be written.
    """
    jitter, complaint = rng.random(), ""
    while True:
        mine = keeper.current
        wait = mine.renew_at(jitter) - (now := time.time())
        if wait > 0 and not mine.is_early(now):  # it is early if made by a clock that was ahead
            await asyncio.sleep(min(wait, LOOK_S))
            continue
        try:
            keeper.replace(await renew_once(mine, renew))
            logger.info("the certificate of %s is renewed", mine.identity)
            jitter, complaint, wait = rng.random(), "", LEAST_WAIT_S
        except NotRenewed as error:
            if check is not None:
                await _alive(check)
            level, complaint = (logging.WARNING if str(error) != complaint else logging.DEBUG), str(error)
            logger.log(level, "the certificate of %s is not renewed yet: %s; trying again", mine.identity, error)
            life = mine.leaf.expires_at - mine.leaf.issued_at
            wait = min(RETRY_MAX_S, max(LEAST_WAIT_S, life / TRIES)) * rng.uniform(0.5, 1.0)
        await asyncio.sleep(wait)


async def renew_once(mine: Credential, renew: Renew) -> Credential:
    """Return a newer credential for the same identity.

    Raises:
        MembershipEnded: no further attempt can succeed.
        NotRenewed: the attempt failed, or the answer does not match the request.
    """
    key = new_key()
    request = make_request(key)
    certificate_pem, ca_pem, cross_pem = await renew(request, consent(mine.key, request))
    try:
        newer = Credential(key_to_pem(key), certificate_pem, vouched(ca_pem, cross_pem, mine.ca_pem))
    except (CertificateError, CredentialError) as error:
        raise NotRenewed(f"the answer does not fit: {error}") from None
    if newer.identity != mine.identity:
        raise NotRenewed(f"the answer is for {newer.identity}")
    return newer


def over(channel: Callable[[], grpc.aio.Channel]) -> Renew:
    """Return the function that renews at the coordinator, over a new channel each time."""

    async def renew(request: bytes, signature: bytes) -> tuple[bytes, bytes, bytes]:
        async with channel() as opened:
            try:
                renewal = pb.RenewRequest(request=request, signature=signature)
                answer: pb.Certificate = await rpc.Stub(opened, "Membership").Renew(renewal, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise refusal_of(error) from None
        return answer.certificate_pem, answer.ca_pem, answer.cross_pem

    return renew


def refusal_of(error: grpc.aio.AioRpcError) -> MembershipEnded | NotRenewed:
    """Return the error that a failed renewal call means for the member."""
    detail = f"{error.code().name}: {error.details()}"
    if is_end(error.code()):
        return MembershipEnded([f"{error.details()}: this needs a new join code"])
    return NotRenewed(with_clock_hint(detail))


def is_end(code: grpc.StatusCode) -> bool:
    """Return whether a status code means that this certificate is never accepted again."""
    return code in (grpc.StatusCode.UNAUTHENTICATED,)


async def _alive(check: Callable[[], Awaitable[None]]) -> None:
    try:
        await check()
    except CredentialError as error:
        raise MembershipEnded(error.faults) from None
