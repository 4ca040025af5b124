"""Views of a coordinator's state, read from its state directory or asked of a coordinator on another machine.

A state directory is opened read-only, while its coordinator runs or after that process has died.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.ground.process.loading import loading
from atoll.operations.faults import CommandError
from atoll.operations.place import is_elsewhere
from atoll.operations.reporter import waiting_for
from atoll.protocol.paging import ALL, COUNT_MAX, Paging
from atoll.protocol.secrets import without_password

if TYPE_CHECKING:
    from atoll.server.views.history import History


def read_view(
    view: str, state: Path, database: str = "", *, run: str = "", number: int = 0, paging: Paging = ALL
) -> Any:
    """Return a view of `server.views`, from the state directory or, where there is none, from the joined coordinator.

    Args:
        view: the name of the view.
        state: the coordinator's state directory.
        database: URL of the PostgreSQL database to read instead of the one that the state directory names.
        run: id or name of a run; empty: the newest run.
        number: the number of a round; 0: the newest round.
        paging: a page of the rows of `rounds`, `clients` or `versions`.

    Raises:
        CommandError: no such run, round or page, or no answer; the message says which ones exist.
        OSError: the state directory is missing, damaged, or of a newer version of Atoll.
    """
    if faults := [*paging.faults(view)]:
        raise CommandError(*faults)
    if not database and is_elsewhere(state):
        from atoll.operations import admin

        return admin.read_view(state, view, run, number, paging)
    with loading():
        from atoll.server.views import views

    with open_history(state, database) as history, reading(state, database):
        return views.look(history, views.View(view), run, number, paging)


def read_pages(
    view: str, state: Path, database: str = "", *, run: str = "", paging: Paging = ALL, most: int | None = None
) -> Any:
    """Return the rows of a view, read page by page, as one answer; arguments and errors as for `read_view`.

    A coordinator elsewhere of an earlier Atoll gives all rows at once, unless the page limits them.

    Args:
        view: the name of the view.
        state: the coordinator's state directory.
        database: URL of the PostgreSQL database.
        run: id or name of a run; empty: the newest run.
        paging: where the rows begin, and which ones count.
        most: the largest number of rows; None: all.

    Returns:
        The answer with at most `most` rows, and as `next` the cursor of the rows behind them; None: there are none.
    """
    rows: list[Any] = []
    after = paging.after
    while True:
        count = COUNT_MAX if most is None else min(COUNT_MAX, most - len(rows))
        seen = read_view(view, state, database, run=run, paging=paging.beginning_at(after, count))
        run, found, after = seen["run"], seen["rows"], seen["next"]
        rows = [*found, *rows] if paging.last else [*rows, *found]
        if after is None or (most is not None and len(rows) >= most):
            most = most or len(rows)
            return seen | {"rows": rows[-most:] if paging.last else rows[:most]}  # an earlier Atoll gives all at once


@contextmanager
def reading(state: Path, database: str = "") -> Iterator[None]:
    """Print, when the block takes long, that a state directory's database is being read."""
    where = f"the database {without_password(database)}" if database else f"the database of {state}"
    with waiting_for(where, "it is read, and a long journal takes seconds"):
        yield


@contextmanager
def open_history(state: Path, database: str = "") -> "Iterator[History]":
    """Open the history of a state directory or a database; a run or round that it lacks is the operator's mistake.

    Raises:
        CommandError: a wrong URL, or no such run or round; the message says which ones exist.
        OSError: the state directory is missing, damaged, or of a newer version of Atoll.
    """
    from atoll.server.views.history import History

    url = checked_url(database)
    try:
        with reading(state, url):
            history = History(state, url)
        yield history
    except LookupError as error:
        if type(error) is not LookupError:
            raise  # a KeyError or an IndexError is a bug of Atoll's
        raise CommandError(*str(error).splitlines()) from error


def checked_url(database: str, what: str = "--database") -> str:
    """Return the URL of a PostgreSQL database; empty: none is named.

    Args:
        database: the URL.
        what: the argument that has it.

    Raises:
        CommandError: it is none; the message has no password.
    """
    from atoll.server.config.database_url import check_url

    try:
        return check_url(database)
    except ValueError as error:
        raise CommandError(f"{what}: got {without_password(database)!r}: {error}") from error
