"""A run or a round in progress, for `--follow`."""

from collections.abc import Iterator
from pathlib import Path

from atoll.cli.printing import as_json_line, clock, note, say
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.following import TERMINAL, Document, items
from atoll.operations.views import read_view
from atoll.protocol.paging import Paging


def follow_run(run: str, state: Path, database: str = "", *, after: int | None = None, json: bool = False) -> None:
    """Print the lines of the coordinator's log about a run, or its items as JSON, until the run has ended.

    Args:
        run: id or name of the run.
        state: the coordinator's state directory.
        database: URL of the PostgreSQL database to read instead of the one that the state directory names.
        after: the entry after which to continue; None: begin with the open round.
        json: whether to print each item as JSON.
    """
    name, is_placed = run, False
    for item in items(run, state, database, after):
        if json:
            as_json_line(item)
        elif item["kind"] == "began":
            name = item["run"]["run"]
            if not is_placed:  # not after a broken call, which resumes at its entry
                say(_standing(item["run"]))
            is_placed = True
        elif item["kind"] == "event":
            for line in item["lines"]:
                say(f"{clock(item['at'])} {name}: {line}")
        else:
            is_placed &= item["kind"] != "jumped"
            note_trouble(item)


def follow_round(number: int | None, run: str, state: Path, database: str = "", *, json: bool = False) -> None:
    """Print the sentences about a round as they come, or its record as JSON, until it has ended.

    Args:
        number: the round, which may come later; None: the newest one.
        run: id or name of the run; empty: the newest run.
        state: the coordinator's state directory.
        database: as in `follow_run`.
        json: whether to print the record as JSON whenever it has changed.

    Raises:
        CommandError: the run has ended before such a round.
    """
    seen: set[str] = set()
    for record in _records(number or _newest(run, state, database), run, state, database):
        if json:
            as_json_line(record)
            continue
        for sentence in record["sentences"]:
            if sentence not in seen:
                seen.add(sentence)
                say(sentence)


def _records(number: int, run: str, state: Path, database: str) -> Iterator[Document]:
    """Yield the record of a round whenever it has changed, until the round has ended."""
    for item in items(run, state, database):
        note_trouble(item)
        here: Document = item.get("run") or {}
        if item["kind"] == "began" and number < here["next_round"] and number != here["open_round"]:
            record = read_view("round", state, database, run=here["run"], number=number)
            if record["ended_at"] is not None:  # otherwise it is one of several exchanges that are open
                yield record
                return
        for record in (*item.get("records", ()), *filter(None, [item.get("record")])):
            if record["round_id"] == number:
                yield record
                if record["ended_at"] is not None:
                    return
        if here and here["state"] in TERMINAL:
            raise CommandError(f"run {here['run']} has ended without a round {number}: {_standing(here)}")


def _newest(run: str, state: Path, database: str) -> int:
    rows = read_view("rounds", state, database, run=run, paging=Paging(1, last=True))["rows"]
    return int(rows[-1]["round"]) if rows else 1


def _standing(run: Document) -> str:
    cause = f": {run['cause']}" if run["cause"] else ""
    exchanges = run.get("exchanges")  # an older coordinator elsewhere has no such runs
    progress = f"version {run['version']} of {run['rounds']}" if exchanges is None else count_of(exchanges, "exchange")
    return f"{run['run']} is {run['state']}, {progress}{cause}"


def note_trouble(item: Document) -> None:
    """Note a gap in what was read, or the reason for a wait, on standard error."""
    if item["kind"] in ("jumped", "waiting") and item["why"]:
        note(item["why"])
