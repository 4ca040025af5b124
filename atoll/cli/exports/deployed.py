"""The source of an export of a deployed run: its rows, read again whenever the run has news."""

import time
from collections.abc import Iterator, Mapping
from contextvars import copy_context
from pathlib import Path
from threading import Event, Thread
from typing import Any

from atoll.cli.printing import note
from atoll.cli.runs.following import note_trouble
from atoll.exports.folders import SITES_MAX, identity, safe
from atoll.exports.rows import About, Row, State, numbers
from atoll.ground.printable import count_of
from atoll.operations import following
from atoll.operations.views import read_view
from atoll.protocol.json_values import flat
from atoll.protocol.paging import Paging

COUNTS = ("invited", "counted", "reported", "released", "lost", "failed", "refused", "too_old", "staleness")
OTHERS = ("candidates", "num_examples", "bytes_saved")
STRAGGLERS = ("straggler", "late", "carried")
OF_MESSAGES = ("nodes", "num_messages", "reported", "failed", "refused", "lost", "missing")
OF_EXCHANGES = (*OF_MESSAGES, "bytes_down", "bytes_up", "seconds")
KINDS = {"evaluation": "sites", "training": "training"}
"""The names in an export of the kinds of measurements by single sites."""


class DeployedRun:
    """A run of a coordinator, in its state directory or on another machine.

    Args:
        run: id or name of the run.
        state: the coordinator's state directory.
        database: the URL of its database; empty: the directory's.
        sites: whether to export the values of each site; None: of at most `SITES_MAX`.
    """

    def __init__(self, run: str, state: Path, database: str = "", *, sites: bool | None = None) -> None:
        self._run, self._state, self._database, self._sites = run, state, database, sites
        self._seen: Mapping[str, Any] = {}

    def about(self) -> About:
        """Return the description of the run."""
        seen = self._look("run")["document"]
        self._run = seen["run"]  # a name may later belong to a newer run
        key = identity(seen["run"], seen["task"], seen["created_at"])
        return About(key, safe(seen["run"]), safe(seen["name"]), seen["created_at"], flat(seen["settings"]))

    def state(self) -> State:
        """Return the state of the run."""
        self._seen = seen = self._look("run")["document"]
        facts = {"cause": seen["cause"], "version": seen["version"]}
        facts |= {} if seen.get("exchanges") is None else {"exchanges": seen["exchanges"]}
        facts |= {f"best_{name}": value for name, value in (seen.get("best") or {}).items()}
        facts |= {} if seen.get("privacy") is None else {"privacy": seen["privacy"]["sentence"]}
        state = str(seen["state"])
        return State(state, facts)

    def rows(self) -> Iterator[Row]:
        """Return the rows of the rounds whose counts are final, and of the measurements of the versions."""
        seen = self._seen or self._look("run")["document"]
        for row in self._look("rounds")["rows"]:
            if "kinds" in row and row["ended_at"] is not None:
                yield row_of_exchange(row)
            elif "kinds" not in row and is_settled(row, seen):
                yield row_of_round(row)
        created = {}
        for row in self._look("versions")["rows"]:
            created[row["version"]] = row["created_at"]
            for source, measured in row["metrics"].items():
                yield Row("version", row["version"], row["created_at"], numbers(measured, f"{source}/"))
        yield from self._rows_of_sites(created)

    def _rows_of_sites(self, created: Mapping[int, float]) -> Iterator[Row]:
        if self._sites is False:
            return
        views = self._look("sites")
        num_sites = len({site for kind in KINDS for site in views[kind]["curves"]})
        if self._sites is None and num_sites > SITES_MAX:
            note(f"{self._run}: leaves out the values of {count_of(num_sites, 'site')}: --sites exports them")
            self._sites = False
            return
        for kind, prefix in KINDS.items():
            for site, curves in views[kind]["curves"].items():
                of_version: dict[int, dict[str, Any]] = {}
                for metric, points in curves.items():
                    for version, value in points:
                        of_version.setdefault(version, {})[metric] = value
                for version, values in of_version.items():
                    yield Row("version", version, created.get(version, 0.0), numbers(values, f"{prefix}/{site}/"))

    def _look(self, view: str) -> Any:
        return read_view(view, self._state, self._database, run=self._run, paging=Paging(whole=True))


def is_settled(row: Mapping[str, Any], run: Mapping[str, Any]) -> bool:
    """Return whether the counts of a round are final: the round has ended, and no update of it can count any more.

    An update that was trained from version b counts in a version after v at most while v - b <= `round.max_staleness`:
    in an asynchronous run, and with late = "next_round".

    Args:
        row: the round, as `atoll round list` has it.
        run: the run, as `atoll run show` has it.
    """
    if row["ended_at"] is None or row["phase"] not in ("committed", "abandoned"):
        return False
    if run["state"] in ("finished", "failed", "stopped"):
        return True
    rules = run["settings"]["round"]
    if rules["mode"] == "sync" and rules["late"] == "discard":
        return True
    return not row["waiting"] and run["version"] - row["base_version"] > rules["max_staleness"]


def row_of_round(row: Mapping[str, Any]) -> Row:
    """Return the row of a round, as `atoll round list` has it, with the names of a simulation as far as they agree."""
    values = {name: row[name] for name in (*COUNTS, *OTHERS)} | {"epsilon": row["epsilon"]}
    values |= {"late": row["carried_in"], "update_bytes": row["num_bytes"], "round_s": row["seconds"]}
    values["committed"] = int(row["phase"] == "committed")
    values["stragglers"] = sum(row[fate] for fate in STRAGGLERS)
    return Row("round", row["round"], row["ended_at"], numbers(values, "round/"))


def row_of_exchange(row: Mapping[str, Any]) -> Row:
    """Return the row of a closed exchange, as `atoll round list` has it: its kinds and causes are parts of names."""
    values = {name: row[name] for name in OF_EXCHANGES}
    values |= {f"kind/{kind}": 1 for kind in row["kinds"]}
    values |= {f"errors/{reason}": number for reason, number in row["errors"].items()}
    return Row("round", row["round"], row["ended_at"], numbers(values, "exchange/"))


class News:
    """The wait for news of a run: a thread follows the run, and `wait` returns when something has happened.

    Args:
        run: id of the run.
        state: the coordinator's state directory.
        database: the URL of its database; empty: the directory's.
    """

    def __init__(self, run: str, state: Path, database: str = "") -> None:
        self._place = (run, state, database)
        self._is_there = Event()
        self._thread: Thread | None = None
        self._fault: BaseException | None = None

    def wait(self, seconds: float) -> None:
        """Wait at least `seconds`, then until something has happened in the run since the last call."""
        if self._thread is None or not self._thread.is_alive():
            self._is_there.set()
            self._thread = Thread(target=copy_context().run, args=(self._follow,), daemon=True)  # with its reporter
            self._thread.start()
        time.sleep(seconds)
        while not self._is_there.wait(1.0):
            pass
        self._is_there.clear()
        if self._fault is not None:
            raise self._fault

    def _follow(self) -> None:
        try:
            for item in following.items(*self._place):
                note_trouble(item)
                if item["kind"] in ("began", "event", "jumped"):
                    self._is_there.set()
        except BaseException as error:
            self._fault = error
        self._is_there.set()
