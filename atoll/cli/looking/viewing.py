"""What the showing commands read: the state directory, read-only, while a coordinator runs or after it died; or, where
there is none, what the coordinator elsewhere shows to whom `atoll join` has made somebody.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.faults import CommandError
from atoll.protocol.secrets import without_password

if TYPE_CHECKING:
    from atoll.server.views.history import History


def look(view: str, state: Path, database: str = "", *, run: str = "", number: int = 0) -> Any:
    """One of `server.views`; the arguments are those of its `look`.

    Raises:
        CommandError: there is no such run or round, or nobody answers; the message says what is possible.
        OSError: there is no state directory, or it is damaged, or too new.
    """
    from atoll.cli.looking import admin

    if not database and admin.is_elsewhere(state):
        return admin.look(state, view, run, number)
    from atoll.server.views import views

    with history_of(state, database) as history:
        return views.look(history, views.View(view), run, number)


@contextmanager
def history_of(state: Path, database: str = "") -> "Iterator[History]":
    """The history of a state directory, or of a database; what is not in it is the operator's fault.

    Raises:
        CommandError: there is no such run or round; the message says which there are.
        OSError: there is no state directory, or it is damaged, or too new.
    """
    from atoll.server.config.database_url import check_url
    from atoll.server.views.history import History

    try:
        url = check_url(database)
    except ValueError as error:
        raise CommandError(f"--database: got {without_password(database)!r}: {error}") from error
    try:
        yield History(state, url)
    except LookupError as error:
        if type(error) is not LookupError:
            raise  # a KeyError or an IndexError is ours
        raise CommandError(*str(error).splitlines()) from error


def in_words(measured: dict[str, dict[str, Any]]) -> str:
    """The metrics of one version in one cell: `accuracy 0.93, loss 0.21; clients: accuracy 0.91`."""
    parts = []
    for source, metrics in sorted(measured.items(), reverse=True):  # the server's own first
        listed = ", ".join(f"{name} {_word(value)}" for name, value in metrics.items())
        parts.append(listed if source == "server" else f"{source}: {listed}")
    return "; ".join(parts)


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "undefined" if value is None else str(value)
