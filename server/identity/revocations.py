"""Whom the certificates no longer let in: kept in memory, asked at every call. Pure.

Once an identity has been revoked, no certificate of it counts but those that are named as issued since: also not one
that an authority elsewhere has signed and nobody here has heard of.
"""

from collections.abc import Iterable, Mapping

from atoll.protocol.identity.certificates import Leaf
from atoll.protocol.identity.names import Identity


class Revocations:
    """Which certificates are revoked."""

    def __init__(self, standing: Mapping[Identity, Iterable[int]] | None = None) -> None:
        self._standing = {identity: set(serials) for identity, serials in (standing or {}).items()}

    def is_revoked(self, identity: Identity, serial: int) -> bool:
        """Whether this certificate no longer counts."""
        standing = self._standing.get(identity)
        return standing is not None and serial not in standing

    def is_refused(self, leaf: Leaf) -> bool:
        """The same, for a certificate that is at hand."""
        return self.is_revoked(leaf.identity, leaf.serial)

    def revoke(self, identity: Identity) -> None:
        """From now on none of its certificates counts."""
        self._standing[identity] = set()

    def issued(self, identity: Identity, serial: int) -> None:
        """A new certificate of it counts, whatever became of older ones."""
        if identity in self._standing:
            self._standing[identity].add(serial)

    def forgotten(self, identity: Identity, serials: Iterable[int]) -> None:
        """These are no longer kept: of an identity that was ever revoked they count no more."""
        if identity in self._standing:
            self._standing[identity].difference_update(serials)

    def standing(self) -> Mapping[Identity, frozenset[int]]:
        """Who has ever been revoked, and which serials count all the same."""
        return {identity: frozenset(serials) for identity, serials in self._standing.items()}
