"""The collection of one update's parts: which are kept, when all must be checked together, and the one verdict. Pure.

Each part arrives on a separate stream. A kept part is durable; the update is decided once, when all parts are durable.
Nothing here survives the process: kept parts are found on disk again, and the update's digest ensures that there is one
verdict.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Verdict = TypeVar("Verdict")


@dataclass(slots=True)
class Gathering(Generic[Verdict]):
    """Parts of one update.

    Args:
        num_parts: the number that the root lists.
        kept: the durable parts.
    """

    num_parts: int
    kept: set[int]
    coming: set[int] = field(default_factory=set)
    """Parts that are arriving on a stream now."""
    covers: bool = False
    """Whether all parts together were found to cover the model, which depends only on the root's digest."""
    verdict: Verdict | None = None
    """Verdict on the update, once there is one."""

    def begin(self, index: int) -> bool:
        """Record the stream of a part; return whether its bytes are wanted."""
        self.coming.add(index)
        return index not in self.kept

    def keep(self, index: int) -> None:
        """Record that a part is durable."""
        self.kept.add(index)

    def end(self, index: int) -> None:
        """Record the end of a part's stream, whatever the result."""
        self.coming.discard(index)

    @property
    def must_be_covered(self) -> bool:
        """Return whether the manifests of all parts are known and have not been checked together."""
        return not self.covers and len(self.kept | self.coming) == self.num_parts

    @property
    def is_whole(self) -> bool:
        """Return whether every part is durable: only then may the update be decided."""
        return self.covers and len(self.kept) == self.num_parts


def newest_first(partial: Iterable[str], begun: str, most: int) -> tuple[list[str], list[str]]:
    """Return a client's partial uploads after one has begun or continues, and the oldest ones to delete.

    A partial upload counts as one update, regardless of the number of its parts.

    Args:
        partial: the digests, the newest first.
        begun: the digest of the upload that begins or continues.
        most: the largest number of partial uploads of one client.
    """
    order = [begun, *(digest for digest in partial if digest != begun)]
    return order[:most], order[most:]
