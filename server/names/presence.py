"""The clients that are connected to a running coordinator, and the updates that arrive, for commands.

presence.json     in the coordinator's state directory (`shown_file`): the open control streams, before, between and
                  after runs, and the arriving updates
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "presence.json"


@dataclass(frozen=True, slots=True)
class Present:
    """Connected client."""

    client: str
    since: float
    """The begin of its control stream [s since the epoch]."""
    address: str
    software: str
    clock_offset: float | None
    """Its clock minus this one's, including the delay of its message [s]; None: an older agent does not report it."""
    certificate_until: float | None
    """The end of the certificate that it has connected with [s since the epoch]; None: it has none (`--insecure`)."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """Arriving update."""

    run: str
    round: int
    client: str
    num_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Presence:
    """Connected clients and arriving updates at one moment."""

    clients: tuple[Present, ...] = ()
    arriving: tuple[Arriving, ...] = ()

    def of(self, client: str) -> Present | None:
        """Return a client's connection; None: it is not connected."""
        return next((each for each in self.clients if each.client == client), None)


def presence_shown(folder: Path) -> Presence | None:
    """Return the presence shown by the running coordinator; None: the file is missing or unreadable."""
    try:
        rows: dict[str, Any] = json.loads((folder / FILE).read_text())
        return Presence(
            tuple(Present(**row) for row in rows["clients"]), tuple(Arriving(**row) for row in rows["arriving"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
