"""A PostgreSQL schema as the journal's database, with a file's guarantees over a connection that may break.

One session writes. It holds an advisory lock of the server during its whole life, and marks every transaction: the row
`writer` of the table `meta` has the session's name and the number of its transactions. So

* a second coordinator is refused, and the message names the first;
* a session that has lost its lock can no longer write;
* if the connection breaks during a commit, the number shows afterwards whether the commit took place. So `write` is
  idempotent: it applies its work once, returns when the work is on the server's disk, and waits while the server is
  away;
* a server that has lost transactions which it had confirmed is detected and refused.
"""

import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, NullPool, StaticPool, create_engine
from sqlalchemy.exc import DBAPIError

from atoll.ground.printable import count_of, span
from atoll.protocol.secrets import without_password
from atoll.server.errors import DatabaseAway, DatabaseFull, StateInUse, StateUnusable, StoreCorrupted
from atoll.server.journal.database import Database
from atoll.server.journal.postgres_session import Session, check_server, is_locked, prepare, take_lock
from atoll.server.journal.schema import META, read_meta, write_meta

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S = 0.5
SAY_AGAIN_S = 30.0
"""Seconds between two log lines about an absent server."""

PARAMETERS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Defaults of libpq's parameters, which the URL may override: a silent server is detected within half a minute."""

_FULL = "53100"
_DAMAGED = ("XX001", "XX002")
_NOT_ALLOWED = ("25006", "42501")  # read-only; no privilege
_AWAY = ("08", "53", "57P", "58")  # connection, resources, shutdown, the server's disk


_AGAIN = (
    "If its host or port is mistyped, correct --database or coordinator.database; else a service manager starts the "
    "coordinator again by itself (exit code 75)"
)


class PostgresDatabase(Database):
    """Database in the first schema of the URL's search path.

    Args:
        url: the URL of the database; libpq takes a missing password from PGPASSWORD, PGPASSFILE or ~/.pgpass.
        state: the state directory, named in the message to a second coordinator.
        read_only: open only for reading; takes no lock.
    """

    dialect = "postgresql"
    restore = "restore that schema from a backup, or use another schema and another directory"

    def __init__(self, url: str, *, state: str = "", read_only: bool = False) -> None:
        self.name = without_password(url)
        self._url, self._read_only = url, read_only
        self._holder = f"a coordinator on {socket.gethostname()} with its state in {state}"
        self._lock = threading.RLock()  # all threads share the one session
        self._closing = threading.Event()
        self._writer, self._count = "", 0  # the mark of the last confirmed transaction
        self._in_doubt = False  # whether one more transaction may have been committed
        self._session: Session | None = None
        self._engine = create_engine(
            "postgresql+psycopg://",
            creator=self._connect,
            poolclass=NullPool if read_only else StaticPool,
            use_native_hstore=False,
        )

    # ------------------------------------------------------------ transactions

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Run the content of the context as one transaction; a reader sees the state of one instant.

        Raises:
            DatabaseFull: the transaction was rolled back.
            DatabaseAway: the connection broke, perhaps after the commit: `write` finds out.
            StateInUse: another coordinator holds the schema.
            StoreCorrupted: the server found damage.
            StateUnusable: the server is unfit for a coordinator, or refuses the connection.
        """
        with self._transaction(is_signed=not self._read_only) as connection:
            yield connection

    def write(self, work: Callable[[Connection], None]) -> None:
        """Apply `work` in one transaction exactly once, although `work` may be called again; raises as `transaction`.

        The call waits while the server is away, and blocks all other writers meanwhile.
        """
        with self._lock:
            number = self._count + 1

            def once() -> None:
                with self.transaction() as connection:
                    if self._count < number:  # otherwise the connection broke after the commit
                        work(connection)

            self._retry_while_away(once)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Return the result of a read-only `work` in one transaction; raises the errors of `transaction`."""

        def look() -> T:
            with self._transaction(is_signed=False) as connection:
                return work(connection)

        if self._read_only:
            return look()
        with self._lock:
            return self._retry_while_away(look)

    def _retry_while_away(self, work: Callable[[], T]) -> T:
        waited = 0.0
        while True:
            try:
                found = work()
                if waited:
                    logger.warning("%s is back after %s; no data was lost", self.name, span(waited))
                return found
            except DatabaseAway as error:
                if waited % SAY_AGAIN_S == 0.0:
                    logger.error("the journal waits for its database: %s", error)
                waited += RETRY_S
                if self._closing.wait(RETRY_S):
                    raise

    @contextmanager
    def _transaction(self, *, is_signed: bool) -> Iterator[Connection]:
        with self._lock:
            try:
                with self._named_errors(), self._engine.begin() as connection:
                    yield connection
                    if is_signed and self._writer:
                        self._sign(connection)
                        self._in_doubt = True
                if self._in_doubt:
                    self._count, self._in_doubt = self._count + 1, False
            except DatabaseAway as error:
                self.away = str(error)
                raise
            self.away = ""

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            self._raise_named(error)
            raise

    def _raise_named(self, error: DBAPIError) -> None:
        """Raise this module's error for a driver's error, if there is one.

        After a lost connection the last transaction remains in doubt until the next session has checked it.
        """
        state: str = getattr(error.orig, "sqlstate", None) or ""
        what = _one_line(error.orig)
        if error.connection_invalidated or (state != _FULL and state.startswith(_AWAY)) or not state:
            self._engine.dispose()
            raise DatabaseAway(f"{self.name}: {what}") from error
        self._in_doubt = False  # the session lives, so the transaction was rolled back
        if state == _FULL:
            raise DatabaseFull(f"{self.name}: no room: {what}") from error
        if state in _DAMAGED:
            raise StoreCorrupted(f"{self.name}: damaged: {what}") from error
        if state in _NOT_ALLOWED:
            raise StateUnusable(f"{self.name}: {what}") from error

    # ------------------------------------------------------------ the session

    def _connect(self) -> psycopg.Connection[Any]:
        """Open a session; a writer's takes the lock of the schema and checks the transaction in doubt."""
        try:
            parameters: dict[str, Any] = {**PARAMETERS, **conninfo_to_dict(self._url), "client_encoding": "utf8"}
        except psycopg.ProgrammingError as error:
            raise StateUnusable(f"{self.name}: {without_password(_one_line(error))}") from error
        parameters.setdefault("application_name", "atoll history" if self._read_only else "atoll coordinator")
        try:
            connection = psycopg.connect(**parameters, autocommit=True)
            try:
                self._make_ready(connection)
            except BaseException:
                connection.close()
                raise
        except psycopg.OperationalError as error:
            what = f"{self.name} cannot be reached: {_one_line(error)}"
            raise DatabaseAway(f"{what}. {_AGAIN}" if not self._read_only else what) from error
        except psycopg.Error as error:
            raise StateUnusable(f"{self.name}: {_one_line(error)}") from error
        return connection

    def _make_ready(self, connection: psycopg.Connection[Any]) -> None:
        prepare(connection)
        check_server(connection, self.name, read_only=self._read_only)
        if not self._read_only:
            self._session = take_lock(connection, self.name, self._session)
            if self._writer:
                self._check_last_transaction(connection)
        connection.autocommit = False
        connection.read_only = self._read_only
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ if self._read_only else None

    def settle(self, connection: Connection) -> None:
        """Mark all transactions of this process from now on."""
        writer = uuid.uuid4().hex
        write_meta(connection, "holder", self._holder)
        write_meta(connection, "writer", f"{writer} 0")
        self._writer, self._count, self._in_doubt = writer, 0, False

    def _sign(self, connection: Connection) -> None:
        last, this = (f"{self._writer} {number}" for number in (self._count, self._count + 1))
        mine = META.update().where(META.c.key == "writer", META.c.value == last).values(value=this)
        if connection.execute(mine).rowcount != 1:
            raise self._taken_over(read_meta(connection, "holder"))

    def _check_last_transaction(self, connection: psycopg.Connection[Any]) -> None:
        """Find out whether the transaction during which the connection broke was committed.

        Raises:
            StateInUse: another coordinator has written since.
            StoreCorrupted: the server has lost confirmed transactions.
        """
        rows = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('writer', 'holder')").fetchall())
        writer, _, number = rows.get("writer", "").partition(" ")
        if writer != self._writer:
            raise self._taken_over(rows.get("holder"))
        if int(number) not in (self._count, self._count + self._in_doubt):
            raise StoreCorrupted(
                f"{self.name} has {count_of(number, 'transaction')} of this coordinator and had "
                f"confirmed {self._count}: it was "
                "replaced by an older copy, or by a standby that lagged behind"
            )
        self._count, self._in_doubt = int(number), False

    def _taken_over(self, holder: str | None) -> StateInUse:
        return StateInUse(
            f"{self.name} has been taken over by {holder or 'another coordinator'}: this process no longer writes"
        )

    def has_writer(self, connection: Connection) -> bool:
        """Return whether a session holds the lock of the schema."""
        return is_locked(connection.connection.dbapi_connection)

    def check(self, connection: Connection) -> None:
        """Check nothing: the server checks its pages, if it is configured to (`initdb --data-checksums`)."""

    def close(self) -> None:
        """End the session, and with it the lock; calls that wait for the server end with DatabaseAway."""
        self._closing.set()
        with self._lock:
            self._engine.dispose()


def _one_line(error: BaseException | None) -> str:
    return " ".join(str(error).split())
