"""The deletion of a run's rows that are no longer needed."""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, delete, select

from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.server.journal.schema import (
    EVALUATIONS,
    JOURNAL,
    MEMBERS,
    PARTICIPATIONS,
    ROUNDS,
    SNAPSHOTS,
    SUMMARIES,
    UPDATES,
    VERSIONS,
)
from atoll.server.journal.sources import WHOLE
from atoll.server.journal.statements import DELETE_UPDATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """Rows of a run to keep."""

    snapshots: int = 2
    """Number of newest snapshots, with the entries since the oldest of them."""
    since: float | None = None
    """Time since which the run can be followed from any entry [s since the epoch]; None: from those snapshots'
    entries."""
    rounds: int | None = None
    """Number of newest rounds whose records are kept; None: all."""
    live: Container[Digest] | None = None
    """Accepted updates to keep; None: all. Queried within the transaction, when nothing else writes."""
    sites: int | None = None
    """Number of newest versions whose metrics of single sites are kept; None: of all."""
    pinned: Collection[Version] = ()
    """Further versions whose metrics of single sites are kept."""


def prune(connection: Connection, run_id: RunId, stay: Stay) -> None:
    """Delete the unneeded rows of a run. Versions, and evaluations of the server and of all clients, are kept."""
    if stay.live is not None:
        _drop_updates(connection, run_id, stay.live)
    newest_first = select(SNAPSHOTS.c.seq, SNAPSHOTS.c.at).where(SNAPSHOTS.c.run_id == run_id)
    snapshots = connection.execute(newest_first.order_by(SNAPSHOTS.c.seq.desc()))
    kept, begin = kept_snapshots([(row.seq, row.at) for row in snapshots], stay)
    if kept:
        is_kept = SNAPSHOTS.c.seq.in_(kept)
        connection.execute(delete(SNAPSHOTS).where(SNAPSHOTS.c.run_id == run_id, ~is_kept))
    if begin:
        _drop_before(connection, run_id, begin)
    if stay.rounds is not None:
        first = connection.scalar(_nth_newest(ROUNDS, "round_id", run_id, stay.rounds))
        if first is not None:
            for table in (ROUNDS, SUMMARIES, PARTICIPATIONS):
                connection.execute(delete(table).where(table.c.run_id == run_id, table.c.round_id < first))
    if stay.sites:
        first = connection.scalar(_nth_newest(VERSIONS, "version", run_id, stay.sites))
        if first is not None:
            _drop_sites(connection, run_id, first, stay.pinned)


def kept_snapshots(snapshots: Sequence[tuple[int, float]], stay: Stay) -> tuple[list[int], int]:
    """Return the entries of the snapshots to keep, and the one after which entries are kept. Pure.

    Beside the newest snapshots, at most two are kept: the last one taken by `stay.since`, and the first one after it,
    which replaces it later. So the journal reaches back at most twice as far as `since`.

    Args:
        snapshots: entry and time of each snapshot, the newest first.
        stay: the rows to keep.

    Returns:
        The entries of these snapshots, and the oldest of them; 0: all entries are kept.
    """
    newest, older = snapshots[: stay.snapshots], snapshots[stay.snapshots :]
    kept = [seq for seq, _ in newest]
    if len(newest) < stay.snapshots:
        return kept, 0
    if stay.since is None or newest[-1][1] <= stay.since:
        return kept, kept[-1]
    young = [seq for seq, at in older if at > stay.since]
    old = [seq for seq, at in older if at <= stay.since]
    return [*kept, *young[-1:], *old[:1]], old[0] if old else 0


def _drop_sites(connection: Connection, run_id: RunId, first: int, pinned: Collection[Version]) -> None:
    is_of_a_site = EVALUATIONS.c.source.notin_(WHOLE)
    is_old = (EVALUATIONS.c.version < first) & EVALUATIONS.c.version.notin_(sorted(pinned))
    connection.execute(delete(EVALUATIONS).where(EVALUATIONS.c.run_id == run_id, is_of_a_site, is_old))


def _drop_before(connection: Connection, run_id: RunId, oldest: int) -> None:
    """Delete the rows that no snapshot from `oldest` on needs: earlier entries and pages."""
    first = connection.scalar(select(SNAPSHOTS.c.first).where(SNAPSHOTS.c.run_id == run_id, SNAPSHOTS.c.seq == oldest))
    connection.execute(delete(JOURNAL).where(JOURNAL.c.run_id == run_id, JOURNAL.c.seq <= oldest))
    connection.execute(delete(MEMBERS).where(MEMBERS.c.run_id == run_id, MEMBERS.c.seq < first))


def _nth_newest(table: Table, column: str, run_id: RunId, n: int) -> Any:
    assert n >= 1, n
    of_run = select(table.c[column]).where(table.c.run_id == run_id)
    return of_run.order_by(table.c[column].desc()).offset(n - 1).limit(1)


def _drop_updates(connection: Connection, run_id: RunId, live: Container[Digest]) -> None:
    digests = connection.scalars(select(UPDATES.c.digest).where(UPDATES.c.run_id == run_id))
    if dead := [{"run": run_id, "dead": digest} for digest in digests if digest not in live]:
        connection.execute(DELETE_UPDATE, dead)
