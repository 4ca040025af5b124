"""What the showing commands read: the state directory, read-only, while a coordinator runs or after it died."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.cli.faults import CommandError
from atoll.protocol.secrets import without_password

if TYPE_CHECKING:
    from atoll.protocol.vocabulary import RunId
    from atoll.server.history import History
    from atoll.server.journal import EvaluationRow, RunRow


@contextmanager
def history_of(state: Path, database: str = "") -> "Iterator[History]":
    """The history of a state directory, or of a database; what is not in it is the operator's fault.

    Raises:
        CommandError: there is no such run or round; the message says which there are.
        OSError: there is no state directory, or it is damaged, or too new.
    """
    from atoll.server.history import History
    from atoll.server.postgres_url import check_url

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


def run_of(history: "History", name: str) -> "RunRow":
    """The run with this id or name; without a name the one that was asked for last.

    Raises:
        CommandError: there is none at all.
        LookupError: there is none of that name.
    """
    if name:
        return history.run(name)
    runs = history.runs()
    if not runs:
        raise CommandError(f"{history.path} knows no run yet")
    return runs[-1]


def newest_version(history: "History", run_id: "RunId") -> int:
    """The global model as it stands; 0 is the initial one."""
    return max((row.version for row in history.versions(run_id)), default=0)


def measures(evaluations: "Iterable[EvaluationRow]") -> dict[int, dict[str, dict[str, Any]]]:
    """By version and source ("server" or "clients"): the values of the metrics.

    The task's own metrics have said what their sums mean; until they have, two sums are total and count, and any
    others are shown as they are.
    """
    from atoll.parallel.metrics import values

    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in evaluations:
        if row.statistics is not None:
            plain = values({}, row.statistics)
            raw = {name: plain[name] if len(sums) == 2 else list(sums) for name, sums in row.statistics.items()}
            found.setdefault(row.version, {})[row.source] = raw | dict(row.values)
    return found


def unmeasured(evaluations: "Iterable[EvaluationRow]") -> list[dict[str, Any]]:
    """The versions for which there are no metrics, with the reason."""
    return [
        {"version": row.version, "source": row.source, "reason": row.detail}
        for row in evaluations
        if row.statistics is None
    ]


def in_words(measured: dict[str, dict[str, Any]]) -> str:
    """The metrics of one version in one cell: `accuracy 0.93, loss 0.21; clients: accuracy 0.91`."""
    parts = []
    for source, metrics in sorted(measured.items(), reverse=True):  # the server's own first
        listed = ", ".join(f"{name} {_word(value)}" for name, value in metrics.items())
        parts.append(listed if source == "server" else f"{source}: {listed}")
    return "; ".join(parts)


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "undefined" if value is None else str(value)
