"""The certificates made by the coordinator: its own, the owner's on this machine, and the ranks' that it starts.

They are in the state directory, and the authority signs them without an invitation: a process with access to the
directory is trusted anyway.
"""

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.ground.durable import DiskFull
from atoll.protocol.identity.certificates import (
    CertificateError,
    key_fingerprint,
    key_to_pem,
    make_request,
    new_key,
    read_certificates,
    read_leaf,
    read_request,
    validity_of,
)
from atoll.protocol.identity.clock_hint import instant
from atoll.protocol.identity.credential import Credential, CredentialError
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.identity.renewal import MembershipEnded, NotRenewed, Renew, keep_renewed
from atoll.protocol.threads import on_thread
from atoll.server.identity.authority import AuthorityAway, NotSigned, Renewal, Signer
from atoll.server.identity.register import Register

logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""Interval between two checks for a manually installed credential [s]."""

OWNER = Identity(Role.OWNER, "local")
"""Owner: any process that may read the state directory."""


class OwnCertificates:
    """Maker and renewer of the coordinator's certificates.

    Args:
        register: the register of members, which records them.
        signer: the authority, or the connection to it.
    """

    def __init__(self, register: Register, signer: Signer) -> None:
        self._register, self._signer = register, signer
        self._tasks: set[asyncio.Task[None]] = set()

    async def keeper(self, folder: Path, identity: Identity) -> Keeper:
        """Open the credential in a folder; make one if it is missing, not valid now, or from another authority.

        A revoked credential is not replaced: its identity needs a new join code, even after its certificate has
        expired.

        Raises:
            CredentialError: the credential is damaged, or another identity's.
            AuthorityAway, NotSigned: a new one is needed, and the authority issues none.
        """
        if not (folder / "key.pem").exists():
            await self._make(folder, identity)
        keeper = Keeper(folder)
        if keeper.identity != identity:
            raise CredentialError([f"{folder} holds the credential of {keeper.identity}, not of {identity}"])
        mine, now = keeper.current, time.time()
        is_over = mine.is_expired(now) or mine.is_early(now) or mine.ca_pem != self._signer.ca_pem
        if is_over and not self._register.revocations.is_refused(mine.leaf):
            times, why = validity_of(read_certificates(mine.certificate_pem)[0]), "no longer valid"
            if mine.is_early(now):
                why = f"not valid yet, only {times}, and this machine's clock shows {instant(now)}"
            logger.info("the certificate of %s is %s: a new one is made", identity, why)
            keeper.replace(await self._make(folder, identity))
        return keeper

    async def _make(self, folder: Path, identity: Identity) -> Credential:
        key = new_key()
        pem = await self._sign(make_request(key), identity, None)
        credential = Credential(key_to_pem(key), pem, self._signer.ca_pem)
        credential.store(folder)
        return credential

    async def _sign(self, request: bytes, identity: Identity, renewal: Renewal | None) -> bytes:
        pem = await self._signer.sign(request, identity, renewal)
        leaf, key = read_leaf(pem), key_fingerprint(read_request(request))
        await on_thread(None, lambda: self._register.renewed(None, leaf, key, pem, now=time.time()))
        return pem

    def keep(self, keeper: Keeper) -> None:
        """Renew a credential from now on, until `close`."""
        self._spawn(self._keep(keeper))

    def keep_what_is_put_into(self, folder: Path) -> None:
        """Renew a credential that is put into a folder by hand, now or later, and again after it has expired."""
        self._spawn(self._keep_what_is_put_into(folder))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_what_is_put_into(self, folder: Path) -> None:
        while True:
            with suppress(CredentialError):  # it is missing or incomplete
                keeper = Keeper(folder)
                keeper.check()
                await self._keep(keeper)
            await asyncio.sleep(LOOK_S)

    async def _keep(self, keeper: Keeper) -> None:
        rng = random.Random()
        try:
            await keep_renewed(keeper, self._renew(keeper), rng=rng)
        except (MembershipEnded, OSError) as error:
            logger.error("the certificate of %s is no longer renewed: %s", keeper.identity, error)

    def _renew(self, keeper: Keeper) -> Renew:
        async def renew(request: bytes, signature: bytes) -> tuple[bytes, bytes, bytes]:
            try:
                renewal = Renewal(keeper.current.certificate_pem, signature)
                pem = await self._sign(request, keeper.identity, renewal)
                return pem, self._signer.ca_pem, self._signer.cross_pem
            except (AuthorityAway, NotSigned, CertificateError, DiskFull) as error:
                raise NotRenewed(str(error)) from error

        return renew

    async def close(self) -> None:
        """Stop all renewals."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
