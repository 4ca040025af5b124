"""The binding of a state directory to the database of its journal.

Versions and updates are in the directory, whichever database it uses. So directory and database store the same number,
and a coordinator refuses a pair whose numbers differ.

database.json          the URL without its password, and the number; absent: SQLite, in state.db
"""

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Connection, select

from atoll.ground.durable import write_atomically
from atoll.protocol.secrets import without_password
from atoll.server.errors import StateUnusable
from atoll.server.journal.database import Database
from atoll.server.journal.schema import RUNS, read_meta, write_meta
from atoll.server.journal.sqlite import SqliteDatabase

NOTE = "database.json"


@dataclass(frozen=True, slots=True)
class Binding:
    """Database of a state directory: its URL, and the number that both store."""

    url: str
    number: str


def binding_of(path: Path) -> Binding | None:
    """Return the binding of a directory to a server's database; None: it uses a file, or is new.

    Raises:
        StateUnusable: `database.json` is damaged.
    """
    try:
        return Binding(**json.loads((path / NOTE).read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError) as error:
        raise StateUnusable(f"{path / NOTE} is damaged: name the database with --database, and remove it") from error


def has_state(path: Path) -> bool:
    """Return whether the directory is the state of a coordinator."""
    return (path / "state.db").is_file() or binding_of(path) is not None


def open_database(path: Path, url: str = "", *, read_only: bool = False) -> Database:
    """Return the database of a state directory, not yet connected.

    Args:
        path: the state directory; for reading by URL it may be on another machine.
        url: the operator's URL; empty: the URL that the directory names.
        read_only: open it only for reading.

    Raises:
        StateUnusable: the directory has its journal in a file, or the driver is not installed.
    """
    if url and (path / "state.db").is_file():
        raise StateUnusable(
            f"{path} has its journal in state.db, not in {without_password(url)}: choose another state directory, or "
            "leave the database out"
        )
    noted = binding_of(path) if not url else None
    if not url and noted is None:
        return SqliteDatabase(path / "state.db", read_only=read_only)
    return open_server(url or (noted.url if noted else ""), path, read_only=read_only)


def open_server(url: str, path: Path, *, read_only: bool = False) -> Database:
    """Return a server's database for the directory `path`, not yet connected.

    Raises:
        StateUnusable: the driver is not installed.
    """
    try:
        from atoll.server.journal.postgres import PostgresDatabase
    except ImportError as error:
        raise StateUnusable(f"PostgreSQL needs its driver: pip install 'atoll[postgres]' ({error})") from error
    return PostgresDatabase(url, state=str(path), read_only=read_only)


def bind(connection: Connection, path: Path, name: str) -> str:
    """Write the common number into the database of a directory, or check that it is there.

    Returns:
        The number, for `note` after the transaction.

    Raises:
        StateUnusable: the database belongs to another directory, or the directory to another database.
    """
    noted, known = binding_of(path), read_meta(connection, "directory")
    if noted is not None and noted.number == known:
        return noted.number
    if any((path / "runs").iterdir()):
        raise StateUnusable(
            f"{path}/runs holds the files of runs that are not in {name}: name the database of these runs"
        )
    if connection.execute(select(RUNS.c.run_id).limit(1)).first() is not None:
        holder = read_meta(connection, "holder") or "another coordinator"
        raise StateUnusable(
            f"{name} holds the runs of {holder}, whose versions and updates are not in {path}: name that directory, or "
            "another database or schema"
        )
    number = uuid.uuid4().hex
    write_meta(connection, "directory", number)
    return number


def note(path: Path, binding: Binding) -> None:
    """Write the binding into the directory, without the password of the URL."""
    plain = Binding(without_password(binding.url), binding.number)
    if binding_of(path) != plain:
        write_atomically(path / NOTE, json.dumps(asdict(plain)).encode())
