"""The journal of a run of messages: its last good snapshot, the entries since, and the records of its exchanges.

A new process of its program needs all messages and replies of every exchange: the snapshot has the digests of the
messages, the records have the rest, and are read when a call of the program reaches them.
"""

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Row, select

from atoll.protocol.vocabulary import RunId
from atoll.server.exchanges.exchange import Exchange
from atoll.server.exchanges.ledger import Ledger
from atoll.server.journal.codec import decode
from atoll.server.journal.recovery import Base, Recovered, entries_since, newest_base
from atoll.server.journal.schema import ROUNDS

AT_ONCE = 500
"""Largest number of records in one query."""


def read_exchange_base(connection: Connection, run_id: RunId, *, most: int | None = None) -> Base[Ledger]:
    """Read the last good snapshot of a run of messages; see `recovery.newest_base`."""
    return newest_base(connection, run_id, most, Ledger, _read_snapshot)


def recover_exchanges(connection: Connection, run_id: RunId) -> Recovered[Ledger]:
    """Read the last good snapshot of a run of messages and the entries since; raises StoreCorrupted."""
    base = read_exchange_base(connection, run_id)
    return Recovered(base.ledger, base.seq, entries_since(connection, run_id, base), base.faults)


def read_exchanges(
    connection: Connection, run_id: RunId, numbers: Collection[int] | None = None, *, after: int = 0
) -> dict[int, Exchange]:
    """Return closed exchanges of a run by number, in order, from their records.

    Args:
        connection: the transaction's connection.
        run_id: the run.
        numbers: the exchanges; None: all kept ones.
        after: the exchange after which they begin.

    Raises:
        StoreCorrupted: a record cannot be read.
    """
    rows = select(ROUNDS).where(ROUNDS.c.run_id == run_id, ROUNDS.c.round_id > after).order_by(ROUNDS.c.round_id)
    if numbers is None:
        return {row.round_id: _exchange(row) for row in connection.execute(rows)}
    wanted, found = sorted(numbers), dict[int, Exchange]()
    for begin in range(0, len(wanted), AT_ONCE):
        some = rows.where(ROUNDS.c.round_id.in_(wanted[begin : begin + AT_ONCE]))
        found |= {row.round_id: _exchange(row) for row in connection.execute(some)}
    return found


def _exchange(row: Row[Any]) -> Exchange:
    return decode(Exchange, row.record, f"run {row.run_id}, exchange {row.round_id}")


def _read_snapshot(connection: Connection, row: Row[Any], where: str) -> Ledger:
    return decode(Ledger, row.body, where)
