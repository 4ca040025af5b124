"""The sites of the newest secure sum of each task's statistics, and the newest number of a request, in one file.

A site that has signed a sum of a task's statistics signs no sum over other sites. So the coordinator asks the same ones
again, also after a crash: the number of a request is durable before any site is asked, and the sites of its sum before
any of them is told who is in it.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from atoll.ground.durable import write_atomically
from atoll.ground.folders import sync_folder
from atoll.server.errors import OperatorError
from atoll.server.statistics.results import FOLDER

FILE = "secure.json"
TASKS_MAX = 1000
"""Most tasks whose sites are remembered: the newest ones."""


class SumSites:
    """Record of secure sums of statistics in a coordinator's state directory.

    Args:
        state: the state directory.
    """

    def __init__(self, state: Path) -> None:
        self._state, self._path = state, state / FOLDER / FILE

    def newest(self) -> int:
        """Return the number of the newest request; 0: there was none; errors as `sites_of`."""
        return self._read()[0]

    def sites_of(self, task: str) -> tuple[str, ...]:
        """Return the sites of the newest sum of a task's statistics, sorted; empty: there was none.

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

    def keep(self, task: str, sites: tuple[str, ...]) -> None:
        """Make the sites of a sum durable; errors as `begin`."""
        newest, known = self._read()
        if known.get(task) != sites:
            others = {name: names for name, names in known.items() if name != task}
            self._write(newest, dict([*others.items(), (task, tuple(sorted(sites)))][-TASKS_MAX:]))

    def _read(self) -> tuple[int, dict[str, tuple[str, ...]]]:
        try:
            found = json.loads(self._path.read_bytes())
            known = {str(task): tuple(map(str, names)) for task, names in found["sites"].items()}
            return int(found["newest"]), known
        except FileNotFoundError:
            return 0, {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise OperatorError(
                f"{self._path} is damaged: put it back from a backup, or delete it and name the sites of the sums so "
                "far with secure.statistics.sites"
            ) from None

    def _write(self, newest: int, sites: Mapping[str, tuple[str, ...]]) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self._state)
        write_atomically(self._path, json.dumps({"newest": newest, "sites": sites}, indent=1).encode())
