"""The journal of a run of messages: its entries, from the first one on, and the machine that they make.

Such a run has no snapshots, and nothing of it is pruned: a new process of its program needs every exchange.
"""

from typing import Any, get_args

from sqlalchemy import Connection, select

from atoll.protocol.vocabulary import RunId
from atoll.server.errors import StoreCorrupted
from atoll.server.exchanges.events import Event
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.journal import checksums
from atoll.server.journal.codec import decode
from atoll.server.journal.schema import JOURNAL

_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


def replay_exchanges(connection: Connection, run_id: RunId, rules: ExchangeRules) -> tuple[ExchangeMachine, int]:
    """Return the machine of a run of messages after its last entry, and the number of that entry.

    Raises:
        StoreCorrupted: an entry is missing or damaged.
    """
    machine, seq = ExchangeMachine(rules), 0
    rows = select(JOURNAL).where(JOURNAL.c.run_id == run_id).order_by(JOURNAL.c.seq)
    for row in connection.execute(rows):
        where = f"run {run_id}, entry {row.seq}"
        if row.seq != seq + 1:
            raise StoreCorrupted(f"run {run_id}: entry {seq + 1} is missing before {row.seq}")
        if checksums.of_entry(row.seq, row.at, row.kind, row.body) != row.checksum:
            raise StoreCorrupted(f"{where}: its checksum is wrong")
        if row.kind not in _EVENTS:
            raise StoreCorrupted(f"{where}: unknown kind {row.kind!r}; known: {', '.join(sorted(_EVENTS))}")
        machine.receive(decode(_EVENTS[row.kind], row.body, where), row.at)
        seq = row.seq
    return machine, seq
