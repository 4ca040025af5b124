"""The setup of a coordinator's identity: its credential, listener and dialer, its members and their enrolment."""

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.protocol.identity.certificates import read_certificates
from atoll.protocol.identity.credential import AUTHORITIES, KEY, Credential, CredentialError
from atoll.protocol.identity.dialer import Dialer, InsecureDialer, MutualDialer
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, Identity, aggregator
from atoll.protocol.settings import ConfigError
from atoll.server.config.process import CoordinatorConfig
from atoll.server.identity.authority import Authority, Signer
from atoll.server.identity.enrolments import Enrolments
from atoll.server.identity.own_certificates import OWNER, OwnCertificates
from atoll.server.identity.register import Register
from atoll.server.identity.remote_signer import RemoteSigner
from atoll.server.identity.signing import Signer as Publisher
from atoll.server.identity.signing import publisher_key
from atoll.server.journal.clock_note import ClockNote
from atoll.server.journal.placement import state_of_rank
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.transport.listener import InsecureListener, Listener, MutualListener

ALIVE_S = 1.0
"""Time for which a coordinator may have run after it last recorded that it is alive [s]."""

AUTHORITY, MINE, OWNERS = "authority", "coordinator", "owner"
ELSEWHERE = "elsewhere"

_NO_CREDENTIAL = (
    "the authority is on another machine, and {0} holds no certificate of this coordinator: make a request with "
    "`atoll authority request {0}`, let the authority sign it (`atoll authority issue`), and put the answer there with "
    "`atoll authority install {0} ANSWER`"
)
_NOT_OURS = (
    "coordinator.authority: {0} holds {1}, and {2} belongs to one already, which its members trust: mount it, name its "
    "directory (`elsewhere`: its key is on another machine), or move {3} away and let all members enrol "
    "again"
)


@dataclass(frozen=True, slots=True)
class Members:
    """Members of a coordinator that authenticates them."""

    enrolments: Enrolments
    keeper: Keeper
    """Keeper of the coordinator's credential."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Means by which a coordinator authenticates itself and its peers."""

    dialer: Dialer
    listener: Listener
    is_revoked: Callable[[Identity, int], bool] = lambda identity, serial: False
    members: Members | None = None
    """The members; None: nothing is authenticated (`--insecure`)."""
    signer: Signer | None = None
    own_certificates: OwnCertificates | None = None


@asynccontextmanager
async def gate_of(config: CoordinatorConfig, state: StateDirectory) -> AsyncIterator[Gate]:
    """Set up the gate of a coordinator, whose certificates are made at its first start and renewed within the block.

    Raises:
        ConfigError: a certificate or the authority is damaged, or the authority is not where the settings name it.
        AuthorityAway, NotSigned: a certificate is needed, and the authority issues none.
    """
    if config.insecure:
        yield Gate(InsecureDialer(), InsecureListener())
        return
    folder = identity_folder(state.path)
    register, signer = Register(state.database), _signer(config, folder)
    certificates = OwnCertificates(register, signer)
    try:
        keeper = await certificates.keeper(folder / MINE, COORDINATOR)
        certificates.keep(keeper)
        if isinstance(signer, Authority):
            certificates.keep(await certificates.keeper(folder / OWNERS, OWNER))
        else:  # a remote authority issues owners' first certificates by hand
            certificates.keep_what_is_put_into(folder / OWNERS)
        enrolments, is_revoked = Enrolments(register, signer, _place(config, folder)), register.revocations.is_revoked
        members = Members(enrolments, keeper)
        yield Gate(MutualDialer(keeper), MutualListener(keeper), is_revoked, members, signer, certificates)
    finally:
        await certificates.close()


async def equip_rank(gate: Gate, config: CoordinatorConfig, rank: int) -> None:
    """Give a rank that this machine starts a certificate unless it has a valid one, which it renews while it runs.

    Raises:
        ConfigError, AuthorityAway, NotSigned: a certificate cannot be made.
    """
    if gate.own_certificates is not None:
        folder = identity_folder(state_of_rank(config.state, rank, config.aggregators))
        await gate.own_certificates.keeper(folder, aggregator(rank))


def publisher(gate: Gate, state: StateDirectory) -> Publisher | None:
    """Make the signer of messages to clients, which uses the true time; None if nothing is authenticated.

    Raises:
        StoreCorrupted: its key is damaged, or others may read it.
    """
    if gate.members is None:
        return None
    keeper, note = gate.members.keeper, ClockNote.read(state.path)
    last = (state.last_alive() or 0.0) if note is None else note.signed
    key = publisher_key(identity_folder(state.path))
    return Publisher(key, lambda: keeper.current, time.time, not_before=last + ALIVE_S if last else 0.0)


def identity_folder(state: Path) -> Path:
    """Return the folder of a state directory with the credentials of its process."""
    return state / "identity"


def owner_folder(state: Path) -> Path:
    """Return the folder of a state directory with the owner's credential."""
    return identity_folder(state) / OWNERS


def _signer(config: CoordinatorConfig, folder: Path) -> Signer:
    if config.authority == ELSEWHERE:
        try:
            return RemoteSigner((folder / MINE / AUTHORITIES).read_bytes())
        except FileNotFoundError:
            raise CredentialError([_NO_CREDENTIAL.format(folder / MINE)]) from None
    place = _place(config, folder)
    assert place is not None
    if (folder / MINE / KEY).exists():
        return _known_authority(place, folder, config.certificate_lifetime)
    return Authority.open_or_create(place, f"Atoll, begun {time.strftime('%Y-%m-%d')}", config.certificate_lifetime)


def _place(config: CoordinatorConfig, folder: Path) -> Path | None:
    """Return the directory of the authority; None: it is on another machine."""
    if config.authority == ELSEWHERE:
        return None
    return _named_place(config.authority) if config.authority else folder / AUTHORITY


def _named_place(name: str) -> Path:
    """Check the directory named by the operator; its parent is never created: it may be an unmounted volume."""
    place = Path(name)
    if os.path.lexists(place) and not place.is_dir():
        raise ConfigError([f"coordinator.authority: {place} is not a directory; allowed: an authority's directory"])
    if not place.parent.is_dir():
        what = f"{place} cannot be made, as there is no directory {place.parent}: mount it, or make it"
        raise ConfigError([f"coordinator.authority: {what}"])
    return place


def _known_authority(place: Path, folder: Path, lifetime_s: float) -> Authority:
    """Open the authority that has signed this coordinator's certificate: any other one would lock out all members."""
    if not (place / KEY).exists():
        raise CredentialError([_NOT_OURS.format(place, "no authority", folder.parent, folder)])
    authority = Authority.open(place, lifetime_s, begins=True)
    mine = read_certificates(Credential.load(folder / MINE).ca_pem)
    if not {*read_certificates(authority.ca_pem)} & {*mine}:
        raise CredentialError([_NOT_OURS.format(place, "another authority", folder.parent, folder)])
    return authority
