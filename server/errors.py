"""The server's errors whose messages an operator reads."""

from collections.abc import Iterable

from atoll.ground.backoff import Temporary
from atoll.ground.durable import DiskFull
from atoll.ground.printable import instead_of
from atoll.protocol.vocabulary import Digest


class OperatorError(RuntimeError):
    """Error: a request of the operator cannot be met; the message names what is allowed."""


class UnknownRun(OperatorError):
    """Error: this coordinator does not know a run id or name."""

    @classmethod
    def among(cls, run_id: str, known: Iterable[str]) -> "UnknownRun":
        """Return the error that names the known runs."""
        return cls(f"there is no run {run_id!r}{instead_of(run_id, known)}")


class DatabaseFull(DiskFull):
    """Error: a database server has no space left on its disk."""


class StoreCorrupted(OSError):
    """Error: data on disk differ from what was written; the message says what, where, and the remedy."""


class UpdateDamaged(StoreCorrupted):
    """Error: the file of an accepted update is missing or damaged; other updates of its round are intact."""

    def __init__(self, digest: Digest, what: str) -> None:
        super().__init__(what)
        self.digest = digest


class StateUnusable(OSError):
    """Error: a coordinator cannot use a path or a database as its state."""


class StateInUse(OSError):
    """Error: another coordinator holds the state directory or database."""


class DatabaseAway(Temporary, StateUnusable):
    """Error: a database server does not respond, or not now."""
