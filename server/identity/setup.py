"""How a coordinator meets the others: who it is itself, who may come to it, and where one becomes a member."""

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.identity.credential import AUTHORITIES, KEY, Credential, CredentialError
from atoll.protocol.identity.dialer import Dialer, InsecureDialer, MutualDialer
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, Identity, aggregator
from atoll.protocol.settings import ConfigError
from atoll.server.clock import Clock
from atoll.server.config.process import CoordinatorConfig
from atoll.server.identity.authority import Authority, Signer
from atoll.server.identity.enrolments import Enrolments
from atoll.server.identity.own_certificates import OWNER, Household
from atoll.server.identity.register import Register
from atoll.server.identity.remote_signer import RemoteSigner
from atoll.server.identity.signing import Signer as Publisher
from atoll.server.identity.signing import publisher_key
from atoll.server.journal.placement import state_of_rank
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.transport.listener import InsecureListener, Listener, MutualListener

ALIVE_S = 1.0
"""Since a coordinator last said that it lives, it may have lived for so long."""

AUTHORITY, MINE, OWNERS = "authority", "coordinator", "owner"
ELSEWHERE = "elsewhere"

_NO_CREDENTIAL = (
    "the authority is elsewhere, and {0} holds no certificate of this coordinator: make a request with `atoll "
    "authority request {0}`, let the authority sign it (`atoll authority issue`), and put the answer there with `atoll "
    "authority install {0} ANSWER`"
)
_NOT_OURS = (
    "coordinator.authority: {0} holds {1}, and {2} belongs to one already, which its members trust: mount it, name its "
    "directory (`elsewhere`: its key is on another machine), or move {3} away to begin anew, and all enrol again"
)


@dataclass(frozen=True, slots=True)
class Members:
    """What a coordinator has that knows its members."""

    enrolments: Enrolments
    keeper: Keeper
    """Of the coordinator's own credential."""


@dataclass(frozen=True, slots=True)
class Gate:
    """See the module docstring."""

    dialer: Dialer
    listener: Listener
    is_revoked: Callable[[Identity, int], bool] = lambda identity, serial: False
    members: Members | None = None
    """None: nobody proves anything (`--insecure`)."""
    signer: Signer | None = None
    household: Household | None = None


@asynccontextmanager
async def gate_of(config: CoordinatorConfig, state: StateDirectory) -> AsyncIterator[Gate]:
    """The gate of a coordinator; its certificates are made at its first start, and renewed while the block lasts.

    Raises:
        ConfigError: a certificate or the authority is damaged, or the authority is not where the settings say.
        AuthorityAway, NotSigned: a certificate has to be made, and the authority does not.
    """
    if config.insecure:
        yield Gate(InsecureDialer(), InsecureListener())
        return
    folder = identity_folder(state.path)
    register, signer = Register(state.database), _signer(config, folder)
    household = Household(register, signer)
    try:
        own = await household.keeper(folder / MINE, COORDINATOR)
        household.keep(own)
        if isinstance(signer, Authority):
            household.keep(await household.keeper(folder / OWNERS, OWNER))
        else:  # one elsewhere gives owners their first one by hand
            household.keep_what_is_put_into(folder / OWNERS)
        members, is_revoked = Members(Enrolments(register, signer), own), register.revocations.is_revoked
        yield Gate(MutualDialer(own), MutualListener(own), is_revoked, members, signer, household)
    finally:
        await household.close()


async def equip_ranks(gate: Gate, config: CoordinatorConfig) -> None:
    """Give each rank that this machine starts its first certificate; then it renews its own.

    Raises:
        ConfigError, AuthorityAway, NotSigned: one cannot be had.
    """
    if gate.household is not None:
        for rank in range(config.aggregators):
            place = identity_folder(state_of_rank(config.state, rank, config.aggregators))
            await gate.household.keeper(place, aggregator(rank))


def publisher(gate: Gate, state: StateDirectory, clock: Clock) -> Publisher | None:
    """Who signs what is pushed to clients; None when nobody proves anything.

    Raises:
        StoreCorrupted: its key is damaged, or may be read by others.
    """
    if gate.members is None:
        return None
    keeper, last = gate.members.keeper, (state.last_alive() or 0.0) + ALIVE_S
    return Publisher(publisher_key(identity_folder(state.path)), lambda: keeper.current, clock.now, not_before=last)


def identity_folder(state: Path) -> Path:
    """Where a process with this state directory keeps who it is."""
    return state / "identity"


def owner_folder(state: Path) -> Path:
    """The credential of whoever may read a coordinator's state directory."""
    return identity_folder(state) / OWNERS


def _signer(config: CoordinatorConfig, folder: Path) -> Signer:
    if config.authority == ELSEWHERE:
        try:
            return RemoteSigner((folder / MINE / AUTHORITIES).read_bytes())
        except FileNotFoundError:
            raise CredentialError([_NO_CREDENTIAL.format(folder / MINE)]) from None
    place = _named_place(config.authority) if config.authority else folder / AUTHORITY
    if (folder / MINE / KEY).exists():
        return _known_authority(place, folder, config.certificate_lifetime)
    return Authority.open_or_create(place, f"Atoll, begun {time.strftime('%Y-%m-%d')}", config.certificate_lifetime)


def _named_place(name: str) -> Path:
    """The directory that the operator has named; the one above it is never made, as it may be a volume to mount."""
    place = Path(name)
    if os.path.lexists(place) and not place.is_dir():
        raise ConfigError([f"coordinator.authority: {place} is no directory; allowed: the directory of an authority"])
    if not place.parent.is_dir():
        what = f"{place} cannot be made, as there is no directory {place.parent}: mount it, or make it"
        raise ConfigError([f"coordinator.authority: {what}"])
    return place


def _known_authority(place: Path, folder: Path, lifetime_s: float) -> Authority:
    """The authority that has signed this coordinator's certificate: any other one would lock every member out."""
    if not (place / KEY).exists():
        raise CredentialError([_NOT_OURS.format(place, "no authority", folder.parent, folder)])
    authority = Authority.open(place, lifetime_s)
    if authority.ca_pem != Credential.load(folder / MINE).ca_pem:
        raise CredentialError([_NOT_OURS.format(place, "another authority", folder.parent, folder)])
    return authority
