"""The membership in a federation: the coordinator's address, the way to dial it, and the credential."""

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from atoll.ground.backoff import delay
from atoll.protocol.identity.credential import CredentialError
from atoll.protocol.identity.dialer import Dialer, InsecureDialer, MutualDialer
from atoll.protocol.identity.enrolling import Place, Unreachable, enrol, is_enrolled
from atoll.protocol.identity.expiry import wait_until_valid
from atoll.protocol.identity.join_code import JoinCode, JoinCodeError
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, Identity, Wanted
from atoll.protocol.identity.renewal import keep_renewed, over
from atoll.protocol.settings import ConfigError
from atoll.protocol.signals import call_at_end

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:7070"
"""Default address of an insecure coordinator."""

AGAIN_S = (0.5, 15.0)
"""First and longest wait between two attempts to enrol while the coordinator does not answer [s]."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Membership of one process; `take` makes it."""

    address: str
    """Address of the coordinator."""
    dialer: Dialer
    keeper: Keeper | None
    """Keeper of the credential; None: the connection is insecure, and neither end proves its identity."""

    @classmethod
    async def take(
        cls, folder: Path, identity: Identity, *, join: str = "", coordinator: str = "", insecure: bool = False
    ) -> "Membership":
        """Enrol with a join code, or continue with the credential in the folder.

        Args:
            folder: the folder of the credential.
            identity: the identity that the process must have.
            join: the join code; ignored when it was used here before.
            coordinator: its address; empty: the address from the enrolment.
            insecure: connect without credentials, on this machine only.

        Raises:
            ConfigError: there is neither a credential nor a join code, the credential is for another identity or has
                expired, or the invitation is refused.
        """
        if insecure:
            return cls(coordinator or DEFAULT_ADDRESS, InsecureDialer(), None)
        if join:
            await _enrol(_parsed(join), folder, Wanted((identity.role,), identity.name))
        keeper = Keeper(folder)
        address = coordinator or Place.load(folder).address
        if keeper.identity != identity:
            raise CredentialError([f"{folder} holds the credential of {keeper.identity}, and this is {identity}"])
        await wait_until_valid(keeper, address)
        return cls(address, MutualDialer(keeper), keeper)

    async def keep(self) -> None:
        """Renew the credential whenever it is due, until cancelled; without one, return at once.

        Raises:
            MembershipEnded: the identity is revoked, or the credential has expired.
            OSError: the folder cannot be written.
        """
        if self.keeper is not None:
            renew = over(lambda: self.dialer.channel(self.address, COORDINATOR))
            check = partial(wait_until_valid, self.keeper, self.address)
            await keep_renewed(self.keeper, renew, rng=random.Random(), check=check)


async def unless_stopped(taking: Coroutine[Any, Any, Membership]) -> Membership | None:
    """Wait for the membership; None: a signal ended the wait for the coordinator.

    The signal handlers stay installed; the caller replaces them.
    """
    task = asyncio.ensure_future(taking)
    call_at_end(task.cancel, "stopped by %s before it was enrolled")
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    return None if task.cancelled() else task.result()


async def _enrol(code: JoinCode, folder: Path, wanted: Wanted) -> None:
    """Enrol, and wait for an absent coordinator: a supervisor may start both in any order."""
    attempt, complaint, rng = 0, "", random.Random()
    while not is_enrolled(folder, code, time.time()):
        try:
            credential = await enrol(code, folder, wanted)
        except Unreachable as error:
            if str(error) != complaint:
                logger.warning("%s; trying again", error)
            complaint = str(error)
            await asyncio.sleep(delay(attempt, *AGAIN_S, rng))
            attempt += 1
        else:
            logger.info("enrolled as %s", credential.identity)


def _parsed(join: str) -> JoinCode:
    try:
        return JoinCode.parse(join)
    except JoinCodeError as error:
        raise ConfigError([f"join: {error}"]) from None
