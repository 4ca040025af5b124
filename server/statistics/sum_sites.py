"""The sites of the newest secure sums of each task's statistics, and the newest number of a request, in one file.

A site that has signed a sum of a task's statistics signs no sum over other sites. So the coordinator asks the same ones
again, in the same sessions, also after a crash: the number of a request is durable before any site is asked, and the
sites of a session before any of them is told who is in its sum.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from atoll.ground.durable import write_atomically
from atoll.ground.folders import sync_folder
from atoll.server.errors import OperatorError
from atoll.server.statistics.results import FOLDER

FILE = "secure.json"
TASKS_MAX = 1000
"""Most tasks whose sites are remembered: the newest ones."""


Sessions = tuple[tuple[str, ...], ...]
"""The sites of each session, sorted."""


class SumSites:
    """Record of secure sums of statistics in a coordinator's state directory.

    Args:
        state: the state directory.
    """

    def __init__(self, state: Path) -> None:
        self._state, self._path = state, state / FOLDER / FILE

    def newest(self) -> int:
        """Return the number of the newest request; 0: there was none; errors as `sessions_of`."""
        return self._read()[0]

    def sessions_of(self, task: str) -> Sessions:
        """Return the sites of each session of the newest request for a task's statistics; empty: there was none.

        Raises:
            OperatorError: the file is damaged.
        """
        return self._read()[1].get(task, ())

    def begin(self, number: int) -> None:
        """Make the number of a request durable.

        Raises:
            OperatorError: the file is damaged.
            OSError: it cannot be written.
        """
        self._write(number, self._read()[1])

    def keep(self, task: str, sessions: Iterable[Iterable[str]]) -> None:
        """Make the sites of a request's sessions durable; errors as `begin`."""
        newest, known = self._read()
        sites = tuple(sorted(tuple(sorted(names)) for names in sessions))
        if known.get(task) != sites:
            others = {name: names for name, names in known.items() if name != task}
            self._write(newest, dict([*others.items(), (task, sites)][-TASKS_MAX:]))

    def _read(self) -> tuple[int, dict[str, Sessions]]:
        try:
            found = json.loads(self._path.read_bytes())
            known = {str(task): _sessions(names) for task, names in found["sites"].items()}
            return int(found["newest"]), known
        except FileNotFoundError:
            return 0, {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise OperatorError(
                f"{self._path} is damaged: put it back from a backup, or delete it and name the sites of the sums so "
                "far with secure.statistics.sites"
            ) from None

    def _write(self, newest: int, sites: Mapping[str, Sessions]) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self._state)
        write_atomically(self._path, json.dumps({"newest": newest, "sites": sites}, indent=1).encode())


def _sessions(names: list[object]) -> Sessions:
    """Read the sites of a task's sessions; those of one session may be a list by themselves, from an older version."""
    each = names if all(isinstance(name, list) for name in names) else [names]
    return tuple(tuple(map(str, of_session)) for of_session in each)  # type: ignore[call-overload]
