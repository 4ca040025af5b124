"""The server's errors whose messages an operator reads."""

from collections.abc import Iterable

from atoll.ground.durable import DiskFull
from atoll.ground.printable import instead_of
from atoll.protocol.vocabulary import Digest


class OperatorError(RuntimeError):
    """A request of the operator that cannot be met; the message names what is allowed."""


class UnknownRun(OperatorError):
    """A run id or name that this coordinator does not know."""

    @classmethod
    def among(cls, run_id: str, known: Iterable[str]) -> "UnknownRun":
        """Return the error that names the known runs."""
        return cls(f"there is no run {run_id!r}{instead_of(run_id, known)}")


class DatabaseFull(DiskFull):
    """A database server without room, on its own disk."""


class StoreCorrupted(OSError):
    """Data on disk that differ from what was written; the message says what, where, and the way out."""


class UpdateDamaged(StoreCorrupted):
    """An accepted update whose file is missing or damaged; the others of its round are not."""

    def __init__(self, digest: Digest, what: str) -> None:
        super().__init__(what)
        self.digest = digest


class StateUnusable(OSError):
    """A path or a database that a coordinator cannot use as its state."""


class StateInUse(OSError):
    """A state directory or database that another coordinator holds."""


class DatabaseAway(StateUnusable):
    """A database server that does not answer, or not now."""
