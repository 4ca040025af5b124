"""The revoked certificates, in memory, where every call looks them up. Pure.

Once an identity has been revoked, none of its certificates counts except those that are noted as issued since: also not
one that an authority elsewhere has signed and that was never reported here.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from atoll.protocol.identity.names import Identity

if TYPE_CHECKING:
    from atoll.protocol.identity.certificates import Leaf


class Revocations:
    """The identities that were ever revoked, each with the serials that count all the same."""

    def __init__(self, standing: Mapping[Identity, Iterable[int]] | None = None) -> None:
        self._standing = {identity: set(serials) for identity, serials in (standing or {}).items()}

    def is_revoked(self, identity: Identity, serial: int) -> bool:
        """Return True when this certificate no longer counts."""
        standing = self._standing.get(identity)
        return standing is not None and serial not in standing

    def is_refused(self, leaf: "Leaf") -> bool:
        """Return True when this certificate, given as a leaf, no longer counts."""
        return self.is_revoked(leaf.identity, leaf.serial)

    def revoke(self, identity: Identity) -> None:
        """Revoke all certificates of an identity."""
        self._standing[identity] = set()

    def issued(self, identity: Identity, serial: int) -> None:
        """Note a new certificate: it counts, although older ones were revoked."""
        if identity in self._standing:
            self._standing[identity].add(serial)

    def forgotten(self, identity: Identity, serials: Iterable[int]) -> None:
        """Note certificates that are no longer stored: those of an identity that was ever revoked stop to count."""
        if identity in self._standing:
            self._standing[identity].difference_update(serials)

    def standing(self) -> Mapping[Identity, frozenset[int]]:
        """Return the identities that were ever revoked, and the serials that count all the same."""
        return {identity: frozenset(serials) for identity, serials in self._standing.items()}
