"""The recovery of runs at the start of a coordinator: their machines, losses on disk, and the downtime."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection

from atoll.ground.printable import some_of
from atoll.protocol.vocabulary import Digest, RoundId, RunId, Version
from atoll.server.errors import OperatorError
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import RunRow
from atoll.server.required.losses import WAY_OUT, Loss, lines_of, losses_of
from atoll.server.required.needs import Need, need_of_messages, need_of_rounds
from atoll.server.rounds.events import FilesLost
from atoll.server.rounds.run_machine import RunMachine

BUSY_S = 60.0
"""Longest time by which a running coordinator applies a deadline late [s]."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Run of an earlier process after the last entry of its journal."""

    row: RunRow
    machine: RunMachine | ExchangeMachine
    seq: int
    faults: tuple[str, ...]
    """Faults of newer, damaged snapshots."""

    @classmethod
    def of(cls, journal: Journal, row: RunRow) -> "Replayed":
        """Replay the journal of a run; raises StoreCorrupted."""
        if row.config.is_of_messages:
            of_messages = journal.load_exchanges(row.run_id)
            machine = of_messages.replayed(ExchangeMachine(row.config.exchange_rules, of_messages.ledger))
            return cls(row, machine, of_messages.seq, of_messages.faults)
        recovered = journal.load(row.run_id)
        return cls(row, recovered.replay(row.rules), recovered.seq, recovered.faults)

    def need(self, connection: Connection) -> Need:
        """Return the files that the run needs."""
        if isinstance(self.machine, RunMachine):
            return need_of_rounds(connection, self.row.run_id, self.row.config, self.machine, loads_code=True)
        return need_of_messages(connection, self.row.run_id, self.machine)

    def down_since(self, alive: float) -> float:
        """Return since when the run has stood still [s since the epoch].

        A running coordinator applies each deadline. So if a deadline passed long before the process was last alive, but
        its event is missing in the journal, then the journal is an older copy, and the run has stood still since its
        last entry.

        Args:
            alive: the last time at which a process noted that it was alive.
        """
        deadline = self.machine.deadline
        is_older = deadline is not None and alive > deadline + BUSY_S
        return self.machine.ledger.now if is_older else max(alive, self.machine.ledger.now)


def losses_at_start(path: Path, journal: Journal, runs: Sequence[Replayed]) -> list[Loss]:
    """Return the files that the runs rely on and that are missing or damaged.

    Sizes are checked at once, and so are the bytes of the current versions; the bytes of updates are checked before
    use.
    """
    return losses_of(path, journal.read(lambda connection: [run.need(connection) for run in runs]), reads="model")


def check_losses(losses: Sequence[Loss], *, accept: bool) -> None:
    """Check that no open run lacks a file, unless the operator accepts this.

    Raises:
        OperatorError: an open run lacks a file; the message lists all losses, their consequences, and the remedy.
    """
    if not accept and (found := [loss for loss in losses if loss.is_open]):
        raise OperatorError("\n".join([*lines_of(found), WAY_OUT]))


def files_lost(losses: Iterable[Loss], run_id: RunId) -> FilesLost | None:
    """Return the event of a run's losses, or None."""
    of_run = [loss for loss in losses if loss.run_id == run_id]
    if not of_run:
        return None
    updates, versions, contents = (
        {item for loss in of_run for item in getattr(loss, kind)} for kind in ("updates", "versions", "contents")
    )
    detail = some_of((f"{loss.path.name} {loss.fault}" for loss in of_run), 3, "; ")
    return FilesLost(tuple(sorted(updates)), tuple(sorted(versions)), tuple(sorted(contents)), detail)


def check_has_model(path: Path, run: RunDriver) -> None:
    """Check that the files of a run's current version exist, before it is resumed.

    Raises:
        OperatorError: a file is missing or truncated.
    """
    ledger = run.machine.ledger
    digests = {Version(0): Digest(""), ledger.version: ledger.model_digest}
    slots = run.reducer.method.slots if ledger.version else ()
    need = Need(run.run_id, ledger.state, ledger.version, RoundId(ledger.next_round), digests, slots=slots)
    if losses := losses_of(path, [need], reads="sizes"):
        raise OperatorError("\n".join([*lines_of(losses), "put these files back from a backup, and resume it then"]))
