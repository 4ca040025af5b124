"""The register of members: invitations, issued certificates, revoked identities. It is in the state's database.

An invitation is one secret for one identity. Only the secret's hash is stored; it is valid once, for one key, until it
expires or five wrong secrets were tried. An enrolment under a name takes that name: it revokes its older certificates.
"""

import hashlib
import hmac
import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    MetaData,
    Select,
    Table,
    Text,
    and_,
    func,
    inspect,
    select,
)

from atoll.protocol.identity.names import ANYBODY, Identity, Role, Wanted
from atoll.server.journal.database import Database

if TYPE_CHECKING:  # the views read members without loading cryptography
    from atoll.protocol.identity.certificates import Leaf

WRONG_TRIES_MAX = 5
ID_BYTES, SECRET_BYTES = 8, 16

CERTIFICATES_MAX = 32
"""Number of certificates stored for one identity. A member that renews twice a second would otherwise fill the disk
within the month until the first one expires; an honest member has two or three, plus some whose answers were lost."""


class Revocations:
    """Identities that were ever revoked, each with the serials that are valid nevertheless.

    A revoked identity's only valid certificates are those recorded as issued since. So a certificate that a remote
    authority has signed without reporting it here is not valid either. It is in memory, where every call looks it up.
    """

    def __init__(self, standing: Mapping[Identity, Iterable[int]] | None = None) -> None:
        self._standing = {identity: set(serials) for identity, serials in (standing or {}).items()}

    def is_revoked(self, identity: Identity, serial: int) -> bool:
        """Return whether this certificate is no longer valid."""
        standing = self._standing.get(identity)
        return standing is not None and serial not in standing

    def is_refused(self, leaf: "Leaf") -> bool:
        """Return whether this certificate, given as a leaf, is no longer valid."""
        return self.is_revoked(leaf.identity, leaf.serial)

    def revoke(self, identity: Identity) -> None:
        """Revoke all certificates of an identity."""
        self._standing[identity] = set()

    def issued(self, identity: Identity, serial: int) -> None:
        """Record a new certificate: it is valid, although older ones were revoked."""
        if identity in self._standing:
            self._standing[identity].add(serial)

    def forgotten(self, identity: Identity, serials: Iterable[int]) -> None:
        """Record that certificates are no longer stored: if their identity was ever revoked, they become invalid."""
        if identity in self._standing:
            self._standing[identity].difference_update(serials)

    def standing(self) -> Mapping[Identity, frozenset[int]]:
        """Return the identities that were ever revoked, and the serials that are valid nevertheless."""
        return {identity: frozenset(serials) for identity, serials in self._standing.items()}


metadata = MetaData()
INVITATIONS = Table(
    "invitations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("role", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("secret_sha256", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("wrong_tries", Integer, nullable=False),
    Column("key_sha256", Text),  # the fingerprint of the key that has used it
)
CERTIFICATES = Table(
    "certificates",
    metadata,
    Column("serial", Text, primary_key=True),
    Column("role", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("issued_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("is_revoked", Boolean, nullable=False),
    Column("key_sha256", Text, nullable=False),
    Column("pem", Text, nullable=False),
)
REVOKED = Table(
    "revoked",
    metadata,
    Column("role", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("at", Float, nullable=False),
)


class Refused(Exception):
    """Error: the invitation or certificate is not valid for this request; the text has the reason, for its holder."""


class Voided(Refused):
    """Error: too many wrong secrets were tried, and the invitation is void now.

    Args:
        identity: the invited identity.
    """

    def __init__(self, identity: Identity) -> None:
        super().__init__(f"the invitation's secret is wrong, and after {WRONG_TRIES_MAX} wrong tries it is void")
        self.identity = identity


class Standing(StrEnum):
    """Standing of a name in the register of members."""

    INVITED = "invited"
    MEMBER = "member"
    LAPSED = "lapsed"
    """The certificate has expired: a new invitation is needed."""
    REVOKED = "revoked"
    BY_HAND = "by hand"
    """`atoll authority issue` has made the certificate: it is not in the register before its first renewal."""
    VOID = "void"
    """Wrong secrets were tried with the join code: a new invitation is needed."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Content of a join code except the addresses and the authority's fingerprint."""

    identity: Identity
    id: bytes
    secret: bytes
    expires_at: float


@dataclass(frozen=True, slots=True)
class Member:
    """Row of `atoll client members`. Times are seconds since the epoch."""

    identity: Identity
    standing: Standing
    since: float
    """The time of the invitation, the enrolment or renewal, or the revocation."""
    expires_at: float | None
    """The expiry of the invitation, or of the certificate."""


class Register:
    """Register of members. Every call is one transaction, and waits for no network except the database's.

    Args:
        database: the database of the state directory.
    """

    def __init__(self, database: Database) -> None:
        self._database, self._lock = database, threading.Lock()
        with database.transaction() as connection:
            metadata.create_all(connection)
            self.revocations = Revocations(_standing(connection))

    # ------------------------------------------------------------ invitations

    def invite(self, identity: Identity, *, now: float, lifetime_s: float) -> Invitation:
        """Make an invitation that is valid for `lifetime_s` [s]; it voids an earlier one of the same identity."""
        invitation = Invitation(
            identity, secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES), now + lifetime_s
        )
        with self._database.transaction() as connection:
            connection.execute(INVITATIONS.delete().where(_of(INVITATIONS, identity)))
            connection.execute(INVITATIONS.delete().where(INVITATIONS.c.expires_at < now))
            row = {
                "id": invitation.id.hex(),
                "role": identity.role.value,
                "name": identity.name,
                "secret_sha256": hashlib.sha256(invitation.secret).hexdigest(),
                "created_at": now,
                "expires_at": invitation.expires_at,
                "wrong_tries": 0,
            }
            connection.execute(INVITATIONS.insert().values(row))
        return invitation

    def redeem(self, id: bytes, secret: bytes, key_sha256: str, wanted: Wanted = ANYBODY, *, now: float) -> Identity:
        """Bind an invitation to a key and return its identity.

        The same key may be used again until the invitation expires.

        Raises:
            Refused: the invitation is unknown, expired, void or used by another key, or the secret is wrong; or it is
                for an identity that the caller does not want, and remains valid.
            Voided: the secret is wrong, and the invitation is now void.
        """
        refusal: Refused | None = None
        with self._database.transaction() as connection:  # a wrong try counts: refuse after the commit
            row = connection.execute(select(INVITATIONS).where(INVITATIONS.c.id == id.hex())).one_or_none()
            if row is None or row.expires_at < now:
                raise Refused("there is no such invitation: it has expired, was replaced by a newer one, or never was")
            identity, this = Identity(Role(row.role), row.name), INVITATIONS.update().where(INVITATIONS.c.id == row.id)
            if row.wrong_tries >= WRONG_TRIES_MAX:
                refusal = Refused(f"the invitation is void after {WRONG_TRIES_MAX} wrong tries: ask for a new one")
            elif not hmac.compare_digest(hashlib.sha256(secret).hexdigest(), row.secret_sha256):
                connection.execute(this.values(wrong_tries=row.wrong_tries + 1))
                is_last = row.wrong_tries + 1 >= WRONG_TRIES_MAX
                refusal = Voided(identity) if is_last else Refused("the invitation's secret is wrong")
            elif row.key_sha256 not in (None, key_sha256):
                refusal = Refused("the invitation has been used, by another key: ask for a new one")
            elif not wanted.fits(identity):
                refusal = Refused(f"the invitation is for {identity}, and not for {wanted}; it remains valid")
            else:
                connection.execute(this.values(key_sha256=key_sha256))
        if refusal is not None:
            raise refusal
        return identity

    # ------------------------------------------------------------ certificates

    def enrolled(self, id: bytes, leaf: "Leaf", key_sha256: str, pem: bytes, *, now: float) -> bytes:
        """Store the certificate of the key that redeemed an invitation; revoke older certificates of its name.

        Returns:
            The valid certificate: for a repeated key the first one.

        Raises:
            Refused: the invitation has become void.
        """
        identity = leaf.identity
        with self._lock:
            with self._database.transaction() as connection:
                if (first := _counting(connection, identity, key_sha256, now)) is not None:
                    return first
                i = INVITATIONS.c
                used = select(i.id).where(i.id == id.hex(), i.key_sha256 == key_sha256)
                if connection.execute(used).one_or_none() is None:
                    raise Refused("the invitation is void: it was revoked, or replaced by a newer one")
                if has_older := _revoke_certificates(connection, identity, now):
                    _mark(connection, identity, now)
                connection.execute(CERTIFICATES.insert().values(_row(leaf, key_sha256, pem)))
            if has_older:
                self.revocations.revoke(identity)
            self.revocations.issued(identity, leaf.serial)
        return pem

    def issued_to(self, identity: Identity, key_sha256: str, *, now: float) -> bytes | None:
        """Return the valid certificate that was issued to this key, if any."""
        with self._database.transaction() as connection:
            return _counting(connection, identity, key_sha256, now)

    def renewed(self, older_serial: int | None, leaf: "Leaf", key_sha256: str, pem: bytes, *, now: float) -> None:
        """Store a further certificate of a member. `older_serial` None: the coordinator's.

        Beyond CERTIFICATES_MAX the oldest other certificates of the identity are forgotten, and become invalid if it
        was ever revoked.

        Raises:
            Refused: the older certificate has been revoked.
        """
        with self._lock:
            if older_serial is not None and self.revocations.is_revoked(leaf.identity, older_serial):
                raise Refused(f"{leaf.identity} has been revoked")
            gone = and_(_of(CERTIFICATES, leaf.identity), CERTIFICATES.c.expires_at < now)
            with self._database.transaction() as connection:
                connection.execute(CERTIFICATES.delete().where(gone))
                connection.execute(CERTIFICATES.insert().values(_row(leaf, key_sha256, pem)))
                forgotten = _forget_beyond(connection, leaf, older_serial)
            self.revocations.issued(leaf.identity, leaf.serial)
            self.revocations.forgotten(leaf.identity, forgotten)

    # ------------------------------------------------------------ revocation

    def revoke(self, identity: Identity, *, now: float) -> None:
        """Revoke all certificates of an identity, even unknown ones, and all its invitations."""
        with self._lock:
            with self._database.transaction() as connection:
                connection.execute(INVITATIONS.delete().where(_of(INVITATIONS, identity)))
                _revoke_certificates(connection, identity, now)
                _mark(connection, identity, now)
            self.revocations.revoke(identity)  # only after the transaction is committed: the disk may be full

    # ------------------------------------------------------------ listing

    def members(self, *, now: float) -> list[Member]:
        """List all identities that were ever invited or have a certificate, in order of role and name."""
        with self._database.transaction() as connection:
            return members_in(connection, now=now)


def members_in(connection: Connection, *, now: float) -> list[Member]:
    """List the identities of a register, in order of role and name; a database without a register has none."""
    found: dict[Identity, Member] = {}
    if not inspect(connection).has_table(CERTIFICATES.name):
        return []
    for row in connection.execute(select(INVITATIONS).where(INVITATIONS.c.expires_at >= now)):
        identity = Identity(Role(row.role), row.name)
        standing = Standing.VOID if row.wrong_tries >= WRONG_TRIES_MAX else Standing.INVITED
        found[identity] = Member(identity, standing, row.created_at, row.expires_at)
    for row in connection.execute(select(REVOKED)):
        identity = Identity(Role(row.role), row.name)
        found.setdefault(identity, Member(identity, Standing.REVOKED, row.at, None))
    for row in connection.execute(_newest_certificates()):
        identity = Identity(Role(row.role), row.name)
        standing = Standing.LAPSED if row.expires_at <= now else Standing.MEMBER
        found[identity] = Member(identity, standing, row.issued_at, row.expires_at)
    return in_order(found.values())


def is_revoked_in(connection: Connection, identity: Identity, serial: int) -> bool:
    """Return what `Revocations.is_revoked` returns at the coordinator, read from a register."""
    if connection.scalar(select(REVOKED.c.at).where(_of(REVOKED, identity))) is None:
        return False
    c = CERTIFICATES.c
    standing = and_(_of(CERTIFICATES, identity), c.serial == f"{serial:x}", ~c.is_revoked)
    return connection.scalar(select(c.serial).where(standing)) is None


def ends_of_processes(connection: Connection) -> list[tuple[str, float]]:
    """Return the coordinator and the ranks, each with the end of its newest certificate [s since the epoch]."""
    if not inspect(connection).has_table(CERTIFICATES.name):
        return []
    of_processes = CERTIFICATES.c.role.in_((Role.COORDINATOR.value, Role.AGGREGATOR.value))
    rows = connection.execute(_newest_certificates().where(of_processes))
    return [*{str(Identity(Role(row.role), row.name)): float(row.expires_at) for row in rows}.items()]


def in_order(members: Iterable[Member]) -> list[Member]:
    """Return members in order of role and name."""
    return sorted(members, key=lambda member: (member.identity.role, member.identity.name))


def _of(table: Table, identity: Identity) -> Any:
    return and_(table.c.role == identity.role.value, table.c.name == identity.name)


def _row(leaf: "Leaf", key_sha256: str, pem: bytes) -> dict[str, Any]:
    return {
        "serial": f"{leaf.serial:x}",
        "role": leaf.identity.role.value,
        "name": leaf.identity.name,
        "issued_at": leaf.issued_at,
        "expires_at": leaf.expires_at,
        "is_revoked": False,
        "key_sha256": key_sha256,
        "pem": pem.decode("ascii"),
    }


def _counting(connection: Connection, identity: Identity, key_sha256: str, now: float) -> bytes | None:
    c = CERTIFICATES.c
    counts = and_(_of(CERTIFICATES, identity), c.key_sha256 == key_sha256, c.expires_at > now, ~c.is_revoked)
    pem = connection.scalar(select(c.pem).where(counts).order_by(c.expires_at.desc()).limit(1))
    return None if pem is None else str(pem).encode()


def _revoke_certificates(connection: Connection, identity: Identity, now: float) -> bool:
    """Revoke every certificate of an identity; return True if one of them was valid."""
    counting = and_(_of(CERTIFICATES, identity), ~CERTIFICATES.c.is_revoked, CERTIFICATES.c.expires_at > now)
    num = connection.scalar(select(func.count()).select_from(CERTIFICATES).where(counting))
    connection.execute(CERTIFICATES.update().where(_of(CERTIFICATES, identity)).values(is_revoked=True))
    return bool(num)


def _forget_beyond(connection: Connection, newest: "Leaf", older_serial: int | None) -> list[int]:
    """Delete the oldest certificates of an identity beyond CERTIFICATES_MAX, except the one that it still uses."""
    c, spared = CERTIFICATES.c, [f"{serial:x}" for serial in (newest.serial, older_serial) if serial is not None]
    others = select(c.serial).where(_of(CERTIFICATES, newest.identity), c.serial.not_in(spared))
    newest_first = others.order_by(c.is_revoked, c.expires_at.desc(), c.issued_at.desc(), c.serial)
    serials = list(connection.scalars(newest_first.offset(CERTIFICATES_MAX - len(spared))))
    connection.execute(CERTIFICATES.delete().where(c.serial.in_(serials)))
    return [int(serial, 16) for serial in serials]


def _mark(connection: Connection, identity: Identity, now: float) -> None:
    connection.execute(REVOKED.delete().where(_of(REVOKED, identity)))
    connection.execute(REVOKED.insert().values(role=identity.role.value, name=identity.name, at=now))


def _standing(connection: Connection) -> dict[Identity, list[int]]:
    """Return every identity that was ever revoked, with the serials of its certificates that are valid nevertheless."""
    standing: dict[Identity, list[int]] = {}
    for row in connection.execute(select(REVOKED)):
        standing[Identity(Role(row.role), row.name)] = []
    both = and_(CERTIFICATES.c.role == REVOKED.c.role, CERTIFICATES.c.name == REVOKED.c.name)
    rows = select(CERTIFICATES.c.role, CERTIFICATES.c.name, CERTIFICATES.c.serial)
    for row in connection.execute(rows.join(REVOKED, both).where(~CERTIFICATES.c.is_revoked)):
        standing[Identity(Role(row.role), row.name)].append(int(row.serial, 16))
    return standing


def _newest_certificates() -> Select[Any]:
    """Select all certificates that are not revoked, the newest of each identity last."""
    return select(CERTIFICATES).where(~CERTIFICATES.c.is_revoked).order_by(CERTIFICATES.c.expires_at)
