"""Certificates for the processes of a measurement, signed by the authority without join codes."""

import time
from pathlib import Path

from atoll.protocol.identity.membership import Membership
from atoll.protocol.identity.names import Identity, Role
from atoll.server.identity.authority import Authority
from atoll.server.identity.setup import AUTHORITY, identity_folder

YEAR_S = 365 * 86400.0


def equip(coordinator_state: Path, state: Path, identity: Identity) -> Path:
    """Give the process with this state directory a credential, unless it has one; return the credential's folder.

    Before the first start of the coordinator the authority is made; the coordinator then uses it.
    """
    folder = identity_folder(state)
    if not (folder / "key.pem").exists():
        place = identity_folder(coordinator_state) / AUTHORITY
        authority = Authority.open_or_create(place, f"Measurement of {time.strftime('%Y-%m-%d')}", YEAR_S)
        authority.credential(identity).store(folder)
    return folder


async def member(coordinator_state: Path, state: Path, name: str, address: str) -> Membership:
    """Return the membership of a client that runs in this process."""
    identity = Identity(Role.CLIENT, name)
    return await Membership.take(equip(coordinator_state, state, identity), identity, coordinator=address)
