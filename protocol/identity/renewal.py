"""Renewal: a new key and a certificate for it before the old one runs out, for as long as the process lives."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol.identity.certificates import consent, key_to_pem, make_request, new_key
from atoll.protocol.identity.credential import Credential, CredentialError
from atoll.protocol.identity.keeper import Keeper

logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""Seconds between two looks at the clock on the wall, which may be set, or have gone on while the machine slept."""

LEAST_WAIT_S = 0.25
"""Between two renewals, whatever the certificates say."""

TRIES = 20
"""In which the life of a certificate is divided: after a failure a part of it passes before the next try."""

TIMEOUT_S = 30.0

Renew = Callable[[bytes, bytes], Awaitable[tuple[bytes, bytes]]]
"""From a request and the older key's word for it to the certificate and the trusted authorities, both PEM.

Raises MembershipEnded; what else it raises is tried again.
"""


class MembershipEnded(CredentialError):
    """This identity is revoked, or its certificate has run out: only a new join code helps."""


class NotRenewed(OSError):
    """It did not work this time."""


async def keep_renewed(keeper: Keeper, renew: Renew, *, rng: random.Random) -> None:
    """Renew what is kept whenever it is time, until cancelled.

    Raises:
        MembershipEnded: it is revoked, or could not be renewed in time.
        OSError: the folder cannot be written.
    """
    jitter, complaint = rng.random(), ""
    while True:
        mine = keeper.current
        wait = mine.renew_at(jitter) - time.time()
        if wait > 0:
            await asyncio.sleep(min(wait, LOOK_S))
            continue
        try:
            keeper.replace(await renew_once(mine, renew))
            logger.info("the certificate of %s is renewed", mine.identity)
            jitter, complaint, wait = rng.random(), "", LEAST_WAIT_S
        except NotRenewed as error:
            _check_alive(keeper)
            level, complaint = (logging.WARNING if str(error) != complaint else logging.DEBUG), str(error)
            logger.log(level, "the certificate of %s is not renewed yet: %s; trying again", mine.identity, error)
            life = mine.leaf.expires_at - mine.leaf.issued_at
            wait = min(LOOK_S, max(LEAST_WAIT_S, life / TRIES)) * rng.uniform(0.5, 1.0)
        await asyncio.sleep(wait)


async def renew_once(mine: Credential, renew: Renew) -> Credential:
    """A newer credential for the same identity.

    Raises:
        MembershipEnded, NotRenewed: see `Renew`; also when the answer does not fit.
    """
    key = new_key()
    request = make_request(key)
    certificate_pem, ca_pem = await renew(request, consent(mine.key, request))
    try:
        newer = Credential(key_to_pem(key), certificate_pem, ca_pem)
    except CredentialError as error:
        raise NotRenewed(f"the answer does not fit: {error}") from None
    if newer.identity != mine.identity:
        raise NotRenewed(f"the answer is for {newer.identity}")
    return newer


def over(channel: Callable[[], grpc.aio.Channel]) -> Renew:
    """Renew at the coordinator, over a channel of its own each time."""

    async def renew(request: bytes, signature: bytes) -> tuple[bytes, bytes]:
        async with channel() as opened:
            try:
                asked = pb.RenewRequest(request=request, signature=signature)
                answer: pb.Certificate = await rpc.MembershipStub(opened).Renew(asked, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise refusal_of(error) from None
        return answer.certificate_pem, answer.ca_pem

    return renew


def refusal_of(error: grpc.aio.AioRpcError) -> MembershipEnded | NotRenewed:
    """What a failed call means for whoever wants to stay a member."""
    detail = f"{error.code().name}: {error.details()}"
    if is_end(error.code()):
        return MembershipEnded([f"{error.details()}: this takes a new join code"])
    return NotRenewed(detail)


def is_end(code: grpc.StatusCode) -> bool:
    """Whether a refusal says that this certificate will never be believed again."""
    return code in (grpc.StatusCode.UNAUTHENTICATED,)


def _check_alive(keeper: Keeper) -> None:
    try:
        keeper.check()
    except CredentialError as error:
        raise MembershipEnded(error.faults) from None
