"""The identities of members: a role and a name, as in a certificate's subject alternative name.

`atoll://client/north` is the client north. Only this name counts, neither a name in a message nor the subject's common
name.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

NAME_ALLOWED = "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or a digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_SCHEME = "atoll://"

PLACE = "place.json"
"""File beside a member's credential with the addresses of its coordinator."""


class Role(StrEnum):
    """Role of a member; `server/identity/rules` lists the rights of each."""

    OWNER = "owner"
    """Grants roles, and has all rights of an operator."""
    OPERATOR = "operator"
    """Starts and stops runs, invites and revokes clients."""
    AUDITOR = "auditor"
    """Reads members, ranks and manifests, and changes nothing."""
    CLIENT = "client"
    """Takes part in rounds, under this name only."""
    COORDINATOR = "coordinator"
    """Serves clients, ranks and commands, which dial it."""
    AGGREGATOR = "aggregator"
    """Serves as an aggregation rank; its name is its number."""
    AUTHORITY = "authority"
    """Signs certificates on another machine; its certificate is self-signed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a member: a role and a name.

    Raises:
        ValueError: the name does not have the allowed form.
    """

    role: Role
    name: str

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"name {self.name[:80]!r}: allowed are {NAME_ALLOWED}")

    @property
    def uri(self) -> str:
        """Identity in the form of certificates, `atoll://ROLE/NAME`."""
        return f"{_SCHEME}{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> "Identity":
        """Read the URI of a certificate.

        Raises:
            ValueError: its form or role is not allowed.
        """
        role, slash, name = uri.removeprefix(_SCHEME).partition("/")
        if not (uri.startswith(_SCHEME) and slash and role in set(Role)):
            raise ValueError(f"{uri[:120]!r} is not an identity; allowed: {_SCHEME}ROLE/NAME, ROLE one of {_roles()}")
        return cls(Role(role), name)

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Identities that an enrolling process accepts."""

    roles: tuple[str, ...] = ()
    """Accepted roles; empty: any."""
    name: str = ""
    """Accepted name; empty: any."""

    def fits(self, identity: Identity) -> bool:
        """Return whether an identity is accepted."""
        return (not self.roles or identity.role in self.roles) and self.name in ("", identity.name)

    def __str__(self) -> str:
        *others, last = self.roles or ("member",)
        roles = f"{', '.join(others)} or {last}" if others else last
        return f"{roles} {self.name}".strip()


ANYBODY = Wanted()


def is_name(text: str) -> bool:
    """Return whether a member may have this name."""
    return _NAME.fullmatch(text) is not None


def _roles() -> str:
    return ", ".join(Role)


COORDINATOR = Identity(Role.COORDINATOR, "main")
"""Identity of the single coordinator of a federation."""


def aggregator(rank: int) -> Identity:
    """Return the identity of an aggregation rank."""
    return Identity(Role.AGGREGATOR, str(rank))
