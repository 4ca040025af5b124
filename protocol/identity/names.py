"""Who somebody is: a role and a name, as they stand in a certificate's subject alternative name.

`atoll://client/north` is the client north. The name in the certificate counts, not the one in a message, nor the
subject's common name.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

NAME_ALLOWED = "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or a digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_SCHEME = "atoll://"


class Role(StrEnum):
    """What a name may be allowed to do; `server.identity.rules` says what each may."""

    OWNER = "owner"
    """Grants roles, and everything that an operator may."""
    OPERATOR = "operator"
    """Starts and stops runs, invites and revokes clients."""
    AUDITOR = "auditor"
    """Sees members, ranks and manifests, and changes nothing."""
    CLIENT = "client"
    """Takes part in rounds, under its own name only."""
    COORDINATOR = "coordinator"
    """The server that clients dial."""
    AGGREGATOR = "aggregator"
    """A rank of the aggregation; its name is its number."""
    AUTHORITY = "authority"
    """Signs certificates, from another machine; it makes its own."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A role and a name.

    Raises:
        ValueError: the name is not of the allowed form.
    """

    role: Role
    name: str

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"name {self.name[:80]!r}: allowed are {NAME_ALLOWED}")

    @property
    def uri(self) -> str:
        """As it stands in a certificate."""
        return f"{_SCHEME}{self.role}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> "Identity":
        """The identity that a certificate names.

        Raises:
            ValueError: of another form, or an unknown role.
        """
        role, slash, name = uri.removeprefix(_SCHEME).partition("/")
        if not (uri.startswith(_SCHEME) and slash and role in set(Role)):
            raise ValueError(f"{uri[:120]!r} names nobody here: allowed is {_SCHEME}ROLE/NAME, ROLE one of {_roles()}")
        return cls(Role(role), name)

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Who somebody is willing to become."""

    roles: tuple[str, ...] = ()
    """Any of these; none: whichever."""
    name: str = ""
    """Empty: whichever."""

    def fits(self, identity: Identity) -> bool:
        """Whether it is one of these."""
        return (not self.roles or identity.role in self.roles) and self.name in ("", identity.name)

    def __str__(self) -> str:
        *others, last = self.roles or ("anybody",)
        roles = f"{', '.join(others)} or {last}" if others else last
        return f"{roles} {self.name}".strip()


ANYBODY = Wanted()


def is_name(text: str) -> bool:
    """Whether a member may have this name."""
    return _NAME.fullmatch(text) is not None


def _roles() -> str:
    return ", ".join(Role)


COORDINATOR = Identity(Role.COORDINATOR, "main")
"""The one coordinator of a federation."""


def aggregator(rank: int) -> Identity:
    """A rank of the aggregation."""
    return Identity(Role.AGGREGATOR, str(rank))
