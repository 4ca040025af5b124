"""The tables of the journal and the records, the same in SQLite and in PostgreSQL.

Numbers that may exceed 2^31 are 64 bits wide in both. Free text of an operator or a client is stored without the
character U+0000, which PostgreSQL cannot store; all other text is JSON, where it is escaped.
"""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    inspect,
    select,
)

from atoll.server.errors import StoreCorrupted

SCHEMA_VERSION = 4


class StateTooNew(OSError):
    """Error: a later Atoll has written a state directory or a database."""


class _FreeText(TypeDecorator[str]):
    """Column for free text of an operator or a client."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return value if value is None else value.replace("\0", "\ufffd")


class _JsonAsText(TypeDecorator[Any]):
    """Column for JSON with NaN and the infinities, which PostgreSQL's JSON type refuses."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


metadata = MetaData()
_INTEGER = BigInteger().with_variant(Integer(), "sqlite")
_JSON = JSON(none_as_null=True).with_variant(_JsonAsText(), "postgresql")
_NULLABLE = frozenset({"ended_at", "version", "statistics", "data"})


def _table(name: str, keys: Mapping[str, Any], columns: Mapping[str, Any], **options: Any) -> Table:
    return Table(
        name,
        metadata,
        *(Column(key, kind, primary_key=True, autoincrement=False) for key, kind in keys.items()),
        *(Column(column, kind, nullable=column in _NULLABLE) for column, kind in columns.items()),
        **options,
    )


_RUN, _SEQ, _VERSION = {"run_id": Text}, {"run_id": Text, "seq": _INTEGER}, {"run_id": Text, "version": _INTEGER}
_SETTINGS = {"name": Text, "task": _FreeText, "config": Text, "rules": Text, "created_at": Float, "order": _INTEGER}

META = _table("meta", {"key": Text}, {"value": Text})
RUNS = _table("runs", _RUN, {**_SETTINGS, "state": Text, "cause": _FreeText, "ended_at": Float})
_ENTRY = {"at": Float, "kind": Text, "body": Text, "checksum": _INTEGER}
JOURNAL = _table("journal", _SEQ, _ENTRY, sqlite_with_rowid=False)
_MEMBERS_OF = {"first": _INTEGER, "num_members": _INTEGER}  # 0: the members are in the body, as in schema 2
SNAPSHOTS = _table("snapshots", _SEQ, {"at": Float, "body": Text, "checksum": _INTEGER, **_MEMBERS_OF})
MEMBERS = _table("members", {**_SEQ, "page": _INTEGER}, {"body": Text, "checksum": _INTEGER})
ROUNDS = _table("rounds", {**_RUN, "round_id": _INTEGER}, {"phase": Text, "version": _INTEGER, "record": Text})
SUMMARIES = _table("summaries", {**_RUN, "round_id": _INTEGER}, {"summary": Text}, sqlite_with_rowid=False)
_PART = {"fate": Text, "invited": _INTEGER, "used": _INTEGER}  # of messages: the number of messages and of replies
_PART_KEYS = {**_RUN, "client_id": Text, "round_id": _INTEGER}
PARTICIPATIONS = _table("participations", _PART_KEYS, _PART, sqlite_with_rowid=False)
VERSIONS = _table("versions", _VERSION, {"digest": Text, "num_bytes": _INTEGER, "created_at": Float})
_MEASURE = {"statistics": _JSON, "values": _JSON, "num_clients": _INTEGER, "detail": _FreeText, "at": Float}
UPDATES = _table("updates", {**_RUN, "digest": Text}, {"meta": Text, "data": LargeBinary})
EVALUATIONS = _table("evaluations", {**_VERSION, "source": Text}, _MEASURE)

MEMBERS_BY_PAGE = Index("members_by_page", MEMBERS.c.run_id, MEMBERS.c.page, MEMBERS.c.seq)
PARTICIPATIONS_BY_ROUND = Index("participations_by_round", PARTICIPATIONS.c.run_id, PARTICIPATIONS.c.round_id)


def create(connection: Connection) -> None:
    """Create every table in an empty database."""
    metadata.create_all(connection)
    connection.execute(META.insert().values(key="schema_version", value=str(SCHEMA_VERSION)))


def check_version(connection: Connection, where: object) -> int:
    """Check the schema version of an open database, and return it; `where` is its name in messages.

    Raises:
        StateTooNew: the version is newer than this Atoll knows.
        StoreCorrupted: the database has no schema version.
    """
    names = inspect(connection).get_table_names()
    value = read_meta(connection, "schema_version") if "meta" in names else None
    if value is None or not value.isdecimal():
        raise StoreCorrupted(f"{where}: no database of Atoll: it has no schema version")
    if int(value) > SCHEMA_VERSION:
        raise StateTooNew(
            f"{where} has schema version {value}, this Atoll knows up to {SCHEMA_VERSION}: use the Atoll that wrote "
            "it or a later one, or choose another state directory"
        )
    return int(value)


def read_meta(connection: Connection, key: str) -> str | None:
    """Return the value of a key of the table `meta`; None: there is none."""
    return connection.scalar(select(META.c.value).where(META.c.key == key))


def write_meta(connection: Connection, key: str, value: str) -> None:
    """Set the value of a key of the table `meta`."""
    if not connection.execute(META.update().values(value=value).where(META.c.key == key)).rowcount:
        connection.execute(META.insert().values(key=key, value=value))
