"""The gathering of one update's parts: which are kept, when together they must be judged, and the one verdict. Pure.

Each part comes on a stream of its own. A part that is kept is durable; the update is decided about once, when all are.
Nothing here outlives the process: kept parts are found on disk again, and the update's digest makes the verdict one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Verdict = TypeVar("Verdict")


@dataclass(slots=True)
class Gathering(Generic[Verdict]):
    """The parts of one update.

    Args:
        num_parts: the number that the root lists.
        kept: those that are durable.
    """

    num_parts: int
    kept: set[int]
    coming: set[int] = field(default_factory=set)
    """The parts on a stream now."""
    covers: bool = False
    """All parts together were found to cover the model: that depends on the root's digest alone."""
    verdict: Verdict | None = None
    """The verdict on the update, once there is one."""

    def begin(self, index: int) -> bool:
        """Note the stream of a part; return whether its bytes are wanted."""
        self.coming.add(index)
        return index not in self.kept

    def keep(self, index: int) -> None:
        """Note that a part is durable."""
        self.kept.add(index)

    def end(self, index: int) -> None:
        """Note the end of a part's stream, whatever it has brought."""
        self.coming.discard(index)

    @property
    def must_be_covered(self) -> bool:
        """Return whether the manifests of all parts are known and have not been judged together."""
        return not self.covers and len(self.kept | self.coming) == self.num_parts

    @property
    def is_whole(self) -> bool:
        """Return whether every part is durable: then, and not before, the update may be decided about."""
        return self.covers and len(self.kept) == self.num_parts


def newest_first(partial: Iterable[str], begun: str, most: int) -> tuple[list[str], list[str]]:
    """Return a client's partial uploads after one has begun or continues, and those that must go: the oldest.

    A partial upload is an update, however many parts of it are here.

    Args:
        partial: the digests, the newest first.
        begun: the digest of the one that begins or continues.
        most: the number of partial uploads of one client.
    """
    order = [begun, *(digest for digest in partial if digest != begun)]
    return order[:most], order[most:]
