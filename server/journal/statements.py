"""The SQL statements of the journal, in the dialect of its database."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from sqlalchemy import Executable, Table, bindparam, delete, select

from atoll.server.journal.schema import (
    EVALUATIONS,
    JOURNAL,
    MEMBERS,
    PARTICIPATIONS,
    ROUNDS,
    RUNS,
    SNAPSHOTS,
    SUMMARIES,
    UPDATES,
    VERSIONS,
)

SELECT_UPDATES = select(UPDATES).where(
    UPDATES.c.run_id == bindparam("run_id"), UPDATES.c.digest.in_(bindparam("digests", expanding=True))
)
DELETE_UPDATE = delete(UPDATES).where(UPDATES.c.run_id == bindparam("run"), UPDATES.c.digest == bindparam("dead"))


@dataclass(frozen=True, slots=True)
class Statements:
    """Statements that write rows, given as dictionaries; those in plain SQL text take tuples of columns."""

    insert_entry: str
    upsert_participation: str
    insert_update: Executable
    upsert_run: Executable
    upsert_round: Executable
    upsert_summary: Executable
    upsert_snapshot: Executable
    upsert_page: Executable
    upsert_version: Executable
    upsert_evaluation: Executable


@cache
def statements(dialect: Literal["sqlite", "postgresql"]) -> Statements:
    """Return the statements in a dialect."""
    if dialect == "sqlite":
        from sqlalchemy.dialects import sqlite as module
    else:
        from sqlalchemy.dialects import postgresql as module  # type: ignore[no-redef]
    insert: Any = module.insert
    return Statements(
        insert_entry=_insert(dialect, JOURNAL),  # no upsert: writing an entry twice is a bug
        upsert_participation=_insert(dialect, PARTICIPATIONS) + _ON_CONFLICT,
        insert_update=insert(UPDATES).on_conflict_do_nothing(),  # the same digest means the same bytes
        upsert_run=_upsert(insert, RUNS),
        upsert_round=_upsert(insert, ROUNDS),
        upsert_summary=_upsert(insert, SUMMARIES),
        upsert_snapshot=_upsert(insert, SNAPSHOTS),
        upsert_page=_upsert(insert, MEMBERS),
        upsert_version=_upsert(insert, VERSIONS),
        upsert_evaluation=_upsert(insert, EVALUATIONS),
    )


def _upsert(insert: Any, table: Table) -> Executable:
    statement = insert(table)
    keys = {column.name for column in table.primary_key}
    rest = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in keys}
    found: Executable = statement.on_conflict_do_update(index_elements=sorted(keys), set_=rest)
    return found


_ON_CONFLICT = (
    " ON CONFLICT (run_id, client_id, round_id) DO UPDATE SET "
    "fate = excluded.fate, invited = excluded.invited, used = excluded.used"
)


def _insert(dialect: str, table: Table) -> str:
    columns = table.columns.keys()
    places = ", ".join(["?" if dialect == "sqlite" else "%s"] * len(columns))
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({places})"
