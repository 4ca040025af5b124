"""The holders of names with the coordinator's clock and log, and the file that shows the conflicts to commands.

conflicts.json    in the coordinator's state directory (`shown_file`): the names that two processes use at once
"""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.server.names.conflicts import Claimant, NameConflicts
from atoll.server.names.shown_file import ShownFile

logger = logging.getLogger(__name__)

FILE = "conflicts.json"
CLIENT, RANK = "client", "rank"

Rows = list[dict[str, Any]]


class Places:
    """Places of all clients and ranks of a coordinator.

    Args:
        folder: the state directory; None: nothing is shown to commands.
        now: the clock [s since the epoch].
    """

    def __init__(self, folder: Path | None, now: Callable[[], float]) -> None:
        self.now = now
        self._kinds = {
            CLIENT: NameConflicts(
                CLIENT, "stop one of the two, or give it another name and credential (atoll client invite NAME)"
            ),
            RANK: NameConflicts(RANK, "stop one of the two, or start it as another rank"),
        }
        self.on_line: list[Callable[[str, str, str], None]] = []
        """Functions that receive the log lines about conflicts: the kind, the name and the line."""
        path = folder / FILE if folder is not None else None
        self._shown = ShownFile(path, "the names that are used twice", absent=[])

    def enter(self, kind: str, name: str, claimant: Claimant, holder: Claimant | None, heard_at: float) -> str:
        """Return the reason why a process does not get the place of a name; empty: it does.

        Args:
            kind: CLIENT or RANK.
            name: the name; for a rank its number.
            claimant: the process that has connected.
            holder: the process that has the place now, if any.
            heard_at: the instant of the holder's last message [s since the epoch].
        """
        entry = self._kinds[kind].enter(name, claimant, holder, heard_at=heard_at, now=self.now())
        if entry.line:
            logger.warning("%s", entry.line, extra={"site": name} if kind == CLIENT else {})
            for listener in self.on_line:
                listener(kind, name, entry.line)
        self._show()
        return entry.refusal

    def leave(self, kind: str, name: str, *, for_good: bool = False) -> None:
        """Record the end of the stream of a place; `for_good`: its process has left cleanly."""
        self._kinds[kind].leave(name, self.now(), for_good=for_good)
        self._show()

    def sentence(self, kind: str, name: str) -> str:
        """Return the conflict about a name in words; empty: none."""
        found = self._kinds[kind].current(self.now())
        return next((conflict.sentence for conflict in found if conflict.name == name), "")

    def _show(self) -> None:
        now = self.now()
        rows: Rows = [{"kind": kind, **asdict(c)} for kind, names in self._kinds.items() for c in names.current(now)]
        self._shown.show(rows)


def conflicts_shown(folder: Path, now: float) -> Rows:
    """Return the conflicts that the running coordinator shows; empty if the file is missing or unreadable.

    Args:
        folder: its state directory.
        now: the time [s since the epoch].
    """
    try:
        rows = json.loads((folder / FILE).read_text())
        return [row for row in rows if row["until"] > now]
    except (OSError, ValueError, KeyError, TypeError):
        return []
