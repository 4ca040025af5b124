"""The start of a PostgreSQL session: the checks of the server's guarantees, and the exclusive lock of the schema."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from atoll.server.errors import DatabaseAway, StateInUse, StateUnusable

OLDEST = 14
"""Oldest supported version of PostgreSQL: the oldest one that its project still maintains."""

LOCK = 0x41544F4C << 32
"""Key of the advisory lock, "ATOL", to which the schema's number is added."""

FREE_S = 5
"""Seconds that a lost session of this process may take to end."""

SETTINGS = {
    "extra_float_digits": "1",  # floats are returned exactly
    "statement_timeout": "0",  # a server's limit on long queries must not end a commit
    "lock_timeout": "0",
    "transaction_timeout": "0",
    "idle_session_timeout": "0",  # the lock ends with the session
    "idle_in_transaction_session_timeout": "0",
}
"""Settings of a session, each applied if the server knows it."""


@dataclass(frozen=True, slots=True)
class Server:
    """Properties of a server and of the schema that the URL names."""

    version: int  # such as 150018
    encoding: str
    synchronous_commit: str
    fsync: str
    full_page_writes: str
    is_standby: bool
    schema: str | None
    may_create: bool | None


@dataclass(frozen=True, slots=True)
class Session:
    """Server's process of a session. Process ids are reused; the pair with the start time is unique."""

    pid: int
    begun: str


def faults_of(server: Server, *, read_only: bool = False) -> Iterator[str]:
    """Yield the reasons why this server is unfit for a coordinator, or (`read_only`) for reading its history."""
    if server.version < OLDEST * 10_000:
        yield f"its version is {server.version // 10_000}; allowed: PostgreSQL {OLDEST} or later"
    if server.encoding != "UTF8":
        yield f"its encoding is {server.encoding}; allowed: UTF8 (CREATE DATABASE ... ENCODING 'UTF8')"
    if server.schema is None:
        yield "its search path names no existing schema: CREATE SCHEMA it, or name another in the URL"
    if read_only:
        return
    if server.is_standby:
        yield "it is a standby, which is read-only: name the primary"
    if server.synchronous_commit not in ("on", "remote_apply"):
        yield (
            f"synchronous_commit is {server.synchronous_commit}; allowed: on | remote_apply: a confirmed commit must "
            "be on disk (ALTER ROLE ... SET synchronous_commit = on)"
        )
    for name in ("fsync", "full_page_writes"):
        if getattr(server, name) != "on":
            yield f"{name} is {getattr(server, name)}; allowed: on: a power cut would destroy the database"
    if server.may_create is False:
        yield f"the role may not create tables in the schema {server.schema}: GRANT CREATE, USAGE ON SCHEMA ... TO it"


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Apply `SETTINGS` to a session."""
    for name, value in SETTINGS.items():
        connection.execute("SELECT set_config(name, %s, false) FROM pg_settings WHERE name = %s", (value, name))


def check_server(connection: psycopg.Connection[Any], name: str, *, read_only: bool) -> None:
    """Check the server and the schema, and fix the durability of commits for the whole session.

    Raises:
        StateUnusable: the server is unfit; the message has one line for each fault.
    """
    server = Server(*connection.execute(_LOOK).fetchone() or ())
    if faults := [f"{name}: {fault}" for fault in faults_of(server, read_only=read_only)]:
        raise StateUnusable("\n".join(faults))
    connection.execute("SELECT set_config('synchronous_commit', %s, false)", (server.synchronous_commit,))


_LOOK = """
SELECT current_setting('server_version_num')::int, current_setting('server_encoding'),
       current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes'),
       pg_is_in_recovery(), current_schema(), has_schema_privilege(current_schema(), 'CREATE')
"""


def take_lock(connection: psycopg.Connection[Any], name: str, before: Session | None) -> Session:
    """Take the exclusive lock of the schema, which ends with the session.

    Args:
        connection: the session.
        name: the name of the database in messages.
        before: the earlier session of this process, which the server may still consider alive.

    Returns:
        The session that has the lock.

    Raises:
        StateInUse: another coordinator has the lock; the message names it.
        DatabaseAway: the earlier session of this process has the lock and does not end: try again.
    """
    if not _try_lock(connection):
        held_by = connection.execute(_HOLDER, {"lock": LOCK}).fetchone()
        if held_by is not None and before == Session(*held_by):
            connection.execute("SELECT pg_terminate_backend(%s, %s)", (before.pid, FREE_S * 1000))
            if not _try_lock(connection):
                raise DatabaseAway(f"{name}: the session that was lost (process {before.pid}) has not ended yet")
        else:
            pid = held_by[0] if held_by else "unknown"
            raise StateInUse(
                f"{name} is in use by {_holder(connection)} (the server's process {pid}): stop that coordinator, or "
                "name another database or schema"
            )
    return Session(*connection.execute(_MYSELF).fetchone() or ())


def is_locked(connection: Any) -> bool:
    """Return whether another session holds the lock of the schema, asked over `connection`."""
    return connection.execute(_HOLDER, {"lock": LOCK}).fetchone() is not None


_TRY = "SELECT pg_try_advisory_lock(%(lock)s + current_schema()::regnamespace::oid::bigint)"
_HOLDER = """
SELECT l.pid, coalesce(a.backend_start::text, '') FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.classid::bigint = %(lock)s >> 32 AND l.objid = current_schema()::regnamespace::oid
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
_MYSELF = "SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()"


def _try_lock(connection: psycopg.Connection[Any]) -> bool:
    row = connection.execute(_TRY, {"lock": LOCK}).fetchone()
    return bool(row and row[0])


def _holder(connection: psycopg.Connection[Any]) -> str:
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'holder'").fetchone()
    except psycopg.Error:
        row = None
    return str(row[0]) if row else "another coordinator"
