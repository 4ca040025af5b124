"""One's place in a federation: who one is there, where the coordinator is, and how it is dialled."""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.protocol.backoff import delay
from atoll.protocol.identity.credential import CredentialError
from atoll.protocol.identity.dialer import Dialer, InsecureDialer, MutualDialer
from atoll.protocol.identity.enrolling import Place, Unreachable, enrol, is_enrolled
from atoll.protocol.identity.join_code import JoinCode, JoinCodeError
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, Identity, Wanted
from atoll.protocol.identity.renewal import keep_renewed, over
from atoll.protocol.settings import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:7070"
"""Where an insecure coordinator is when nothing is said."""

AGAIN_S = (0.5, 15.0)
"""Seconds between two attempts to enrol while nobody answers: at first, and at most."""


@dataclass(frozen=True, slots=True)
class Membership:
    """See the module docstring; `take` makes one."""

    address: str
    """Of the coordinator."""
    dialer: Dialer
    keeper: Keeper | None
    """Of one's own credential; None: nobody proves anything."""

    @classmethod
    async def take(
        cls, folder: Path, identity: Identity, *, join: str = "", coordinator: str = "", insecure: bool = False
    ) -> "Membership":
        """Enrol with a join code, or go on with the credential that is in the folder already.

        Args:
            folder: of the credential.
            identity: who one is to be.
            join: the join code; one that has been used here means nothing more.
            coordinator: its address, when it is not where it said at enrolment.
            insecure: prove nothing, within this machine.

        Raises:
            ConfigError: no credential and no join code, one for somebody else, one that has expired, or the
                invitation is refused.
        """
        if insecure:
            return cls(coordinator or DEFAULT_ADDRESS, InsecureDialer(), None)
        if join:
            await _enrol(_parsed(join), folder, Wanted((identity.role,), identity.name))
        keeper = Keeper(folder)
        keeper.check()
        if keeper.identity != identity:
            raise CredentialError([f"{folder} holds the credential of {keeper.identity}, and this is {identity}"])
        return cls(coordinator or Place.load(folder).address, MutualDialer(keeper), keeper)

    async def keep(self) -> None:
        """Renew the credential whenever it is time, until cancelled; at once done when there is none.

        Raises:
            MembershipEnded: it is revoked, or could not be renewed in time.
            OSError: the folder cannot be written.
        """
        if self.keeper is not None:
            renew = over(lambda: self.dialer.channel(self.address, COORDINATOR))
            await keep_renewed(self.keeper, renew, rng=random.Random())


async def unless_stopped(
    taking: Coroutine[Any, Any, Membership], signals: Iterable[signal.Signals]
) -> Membership | None:
    """The membership; None: one of these signals has ended the wait for it, which is long while nobody answers.

    Whoever calls this puts its own handlers in the place of those that stay behind.
    """
    task = asyncio.ensure_future(taking)
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    return None if task.cancelled() else task.result()


async def _enrol(code: JoinCode, folder: Path, wanted: Wanted) -> None:
    """Wait for the coordinator when it is away: who supervises both may start them in any order."""
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
