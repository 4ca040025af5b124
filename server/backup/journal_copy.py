"""The copy of a journal as of one instant, from its file or from a server's schema, and its move into a schema.

A copy is always a file: the tables are the same in both. So a backup of either can be restored as either.
"""

import sqlite3
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, inspect, select

from atoll.server.backup.contents import BackupFailed
from atoll.server.identity import register
from atoll.server.journal import schema
from atoll.server.journal.binding import Binding, binding_of, note, open_database, open_server
from atoll.server.journal.schema import META, SCHEMA_VERSION, check_version, read_meta, write_meta
from atoll.server.journal.sqlite import SqliteDatabase

OF_THE_SERVER = frozenset({"directory", "holder", "writer"})
"""Keys of the table `meta` that bind a schema to a directory and to a process."""

ROWS_AT_ONCE = 500

TABLES = {**schema.metadata.tables, **register.metadata.tables}
"""Tables of a journal, and of the register of members beside them."""


def copy_journal(state: Path, copy: Path, database: str, on_instant: Callable[[], None]) -> str:
    """Copy the journal of a state directory into a file, even while a coordinator writes to it.

    Args:
        state: the directory.
        copy: the new file.
        database: the URL of the journal; empty: the URL that the directory names.
        on_instant: called after the instant of the copy; later writes are not in it.

    Returns:
        The name of the server's database; empty: the journal is a file.

    Raises:
        BackupFailed: the journal is damaged, belongs to an earlier release or another directory, or there is no room
            for its copy.
        DatabaseAway: the server does not answer.
        StateUnusable: the server refuses.
    """
    if binding_of(state) is None:
        _copy_file(state / "state.db", copy)
        on_instant()
        return ""
    return _copy_schema(state, copy, database, on_instant)


def _copy_file(database: Path, copy: Path) -> None:
    with (
        closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=60.0)) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        try:
            source.backup(target)  # in one step: one read transaction
            _in_one_file(target)
        except sqlite3.Error as error:
            raise BackupFailed(f"{database} cannot be copied to {copy}: {error}") from error


def _in_one_file(target: sqlite3.Connection) -> None:
    """Merge the write-ahead log into the copy; the next writer turns it on again."""
    target.execute("PRAGMA journal_mode = DELETE")


def _copy_schema(state: Path, copy: Path, database: str, on_instant: Callable[[], None]) -> str:
    opened, bound = open_database(state, database, read_only=True), binding_of(state)
    target = SqliteDatabase(copy)
    try:
        with opened.transaction() as source:
            if (version := check_version(source, opened.name)) != SCHEMA_VERSION:  # the first query fixes the instant
                what = f"{opened.name} has schema version {version}, this Atoll writes {SCHEMA_VERSION}"
                raise BackupFailed(f"{what}: start the coordinator with this release first")
            if bound is None or read_meta(source, "directory") != bound.number:
                raise BackupFailed(f"{opened.name} is not the database of {state}: name the right one with --database")
            on_instant()
            with target.transaction() as connection:
                _copy_tables(source, connection)
    finally:
        opened.close()
        target.close()
    with closing(sqlite3.connect(copy)) as whole:
        _in_one_file(whole)
    return opened.name


def _copy_tables(source: Connection, target: Connection) -> None:
    """Copy every table into an empty database, except for the keys that bind a schema to its directory.

    Raises:
        BackupFailed: there is a table that this Atoll does not know.
    """
    names = sorted(inspect(source).get_table_names())
    if unknown := [name for name in names if name not in TABLES]:
        raise BackupFailed(f"the journal has a table {unknown[0]!r}, which this Atoll does not know: use a later one")
    for table in (TABLES[name] for name in names):
        table.create(target)
        wanted = select(table)
        if table is META:
            wanted = wanted.where(META.c.key.notin_(sorted(OF_THE_SERVER)))
        rows = source.execution_options(stream_results=True, max_row_buffer=ROWS_AT_ONCE).execute(wanted).mappings()
        for some in rows.partitions(ROWS_AT_ONCE):
            target.execute(table.insert(), [dict(row) for row in some])


def move_into_schema(copy: Path, state: Path, url: str) -> None:
    """Move the journal of a restored state directory from its file into a server's schema, and bind the two.

    Raises:
        BackupFailed: the schema has tables, or the backup comes from an earlier release.
        DatabaseAway: the server does not answer.
        StateUnusable: the server is unfit for a coordinator, or refuses.
        StateInUse: a coordinator uses the schema.
    """
    target, source, number = open_server(url, state), SqliteDatabase(copy, read_only=True), uuid.uuid4().hex
    try:
        with target.transaction() as connection, source.transaction() as rows:
            if inspect(connection).get_table_names():
                raise BackupFailed(f"{target.name} has tables: name a database or a schema without any")
            if (version := check_version(rows, copy)) != SCHEMA_VERSION:
                what = f"the backup has schema version {version}, this Atoll writes {SCHEMA_VERSION}"
                raise BackupFailed(
                    f"{what}: restore it into a file, start a coordinator on it once, and restore a backup of that"
                )
            _copy_tables(rows, connection)
            write_meta(connection, "directory", number)
    finally:
        target.close()
        source.close()
    note(state, Binding(url, number))
    copy.unlink()
