"""The migrations of the journal's tables from each schema version to the next, within the transaction of the start."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, delete, select, update

from atoll.protocol.vocabulary import RunId
from atoll.server.errors import StoreCorrupted
from atoll.server.exchanges.exchange import Exchange
from atoll.server.journal import checksums, schema
from atoll.server.journal.codec import decode, decode_record, encode_ledger_without_members
from atoll.server.journal.member_rows import pages_of
from atoll.server.journal.recovery import newest_snapshot
from atoll.server.journal.rows import ExchangeRow, RecordRow, Snapshot, run_rows, write_summaries
from atoll.server.journal.schema import (
    MEMBERS,
    MEMBERS_BY_PAGE,
    META,
    PARTICIPATIONS,
    ROUNDS,
    SNAPSHOTS,
    SUMMARIES,
    UPDATES,
    check_version,
)
from atoll.server.journal.statements import Statements, statements
from atoll.server.members.member_pages import Unwritten

logger = logging.getLogger(__name__)

RECORDS_AT_ONCE = 200
"""Number of records in memory at one time."""


def migrate(connection: Connection, where: object) -> None:
    """Migrate an open database to the current schema version; raises the errors of `check_version`."""
    for version in range(check_version(connection, where), schema.SCHEMA_VERSION):
        MIGRATIONS[version](connection)
        connection.execute(META.update().values(value=str(version + 1)).where(META.c.key == "schema_version"))


def _put_members_on_pages(connection: Connection) -> None:
    MEMBERS.create(connection)
    for column in ("first", "num_members"):
        connection.exec_driver_sql(f"ALTER TABLE snapshots ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")


def _summarize(connection: Connection) -> None:
    """Add the summaries of the rounds, and write the members of each run's newest snapshot in the order of names."""
    SUMMARIES.create(connection)
    PARTICIPATIONS.create(connection)
    MEMBERS_BY_PAGE.create(connection, checkfirst=True)
    sql = statements(connection.dialect.name)
    for run in run_rows(connection):
        num = _summarize_rounds(connection, sql, run.run_id, run.config.is_of_messages)
        if not run.config.is_of_messages:
            _sort_members(connection, sql, run.run_id)
        logger.info("run %s: the journal has summaries of %d rounds now", run.run_id, num)


def _summarize_rounds(connection: Connection, sql: Statements, run_id: RunId, is_of_messages: bool) -> int:
    after, num = 0, 0
    rows = select(ROUNDS).where(ROUNDS.c.run_id == run_id).order_by(ROUNDS.c.round_id).limit(RECORDS_AT_ONCE)
    while some := connection.execute(rows.where(ROUNDS.c.round_id > after)).all():
        after = some[-1].round_id
        found = [one for row in some if (one := _record_row(row, is_of_messages)) is not None]
        write_summaries(connection, sql, found)
        num += len(found)
    return num


def _record_row(row: Row[Any], is_of_messages: bool) -> RecordRow | ExchangeRow | None:
    """Return a record as it is written; None: it is damaged, as `atoll round show` says too."""
    where = f"run {row.run_id}, round {row.round_id}"
    try:
        if is_of_messages:
            return ExchangeRow.of(row.run_id, decode(Exchange, row.record, where))
        return RecordRow(row.run_id, row.record, decode_record(row.record, where=where))
    except StoreCorrupted as error:
        logger.error("%s; the lists of rounds are without it", error)
        return None


def _sort_members(connection: Connection, sql: Statements, run_id: RunId) -> None:
    """Replace the newest good snapshot by one with a complete set of members, and delete the older ones."""
    base, at = newest_snapshot(connection, run_id)
    membership = base.ledger.membership
    if not base.seq or not membership.members:
        return
    written = Unwritten(membership.members).take(membership.members, base.seq)
    body = encode_ledger_without_members(base.ledger)
    pages = pages_of(run_id, base.seq, written, membership.members)
    connection.execute(delete(MEMBERS).where(MEMBERS.c.run_id == run_id))
    connection.execute(delete(SNAPSHOTS).where(SNAPSHOTS.c.run_id == run_id, SNAPSHOTS.c.seq != base.seq))
    for page in pages:
        values = {"run_id": run_id, "seq": page.seq, "page": page.page, "body": page.body}
        connection.execute(sql.upsert_page, {**values, "checksum": checksums.of_page(page)})
    new = Snapshot(run_id, base.seq, at, body, written.first, written.num_members)
    of_it = (SNAPSHOTS.c.run_id == run_id, SNAPSHOTS.c.seq == base.seq)
    columns = {"body": body, "first": new.first, "num_members": new.num_members, "checksum": checksums.of_snapshot(new)}
    connection.execute(update(SNAPSHOTS).where(*of_it).values(columns))


MIGRATIONS: Mapping[int, Callable[[Connection], None]] = {
    1: lambda connection: UPDATES.create(connection),  # a round that was open then is abandoned, and retried
    2: _put_members_on_pages,
    3: _summarize,
}
"""The migration from each schema version to the next. PostgreSQL began with version 3."""
