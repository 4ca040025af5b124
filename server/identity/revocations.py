"""The revoked certificates, in memory, where every call looks them up. Pure.

Once an identity has been revoked, its only valid certificates are those recorded as issued since. So a certificate that
a remote authority has signed without reporting it here is not valid either.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from atoll.protocol.identity.names import Identity

if TYPE_CHECKING:
    from atoll.protocol.identity.certificates import Leaf


class Revocations:
    """Identities that were ever revoked, each with the serials that are valid nevertheless."""

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
