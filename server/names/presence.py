"""The file that shows to commands who is connected to a running coordinator, and what arrives.

presence.json     in the coordinator's state directory: the open control streams, before, between and after runs, and
                  the updates on their way in. It says how things are at this moment, so it is neither synced nor part
                  of a backup
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.protocol.durable import write_atomically

logger = logging.getLogger(__name__)

FILE = "presence.json"


@dataclass(frozen=True, slots=True)
class Present:
    """A connected client."""

    client: str
    since: float
    """The begin of its control stream [s since the epoch]."""
    address: str
    software: str
    clock_offset: float | None
    """Its clock less this one, with the way of its message [s]; None: an older agent does not say."""
    certificate_until: float | None
    """The end of the certificate that it has connected with [s since the epoch]; None: it has none (`--insecure`)."""


@dataclass(frozen=True, slots=True)
class Arriving:
    """An update on its way in."""

    run: str
    round: int
    client: str
    num_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Presence:
    """The clients that are connected, and the updates that arrive, at one moment."""

    clients: tuple[Present, ...] = ()
    arriving: tuple[Arriving, ...] = ()

    def of(self, client: str) -> Present | None:
        """Return a client's connection; None: it is not connected."""
        return next((each for each in self.clients if each.client == client), None)


class PresenceFile:
    """The file of one coordinator, written when something has changed.

    Args:
        folder: the state directory.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._shown, self._has_failed = folder / FILE, Presence(), False
        self._path.unlink(missing_ok=True)  # of an earlier process

    def show(self, clients: Iterable[Present], arriving: Iterable[Arriving]) -> None:
        """Write what has changed; a failure is logged once in a row."""
        now = Presence(tuple(clients), tuple(arriving))
        if now == self._shown and self._path.exists():
            return
        try:
            write_atomically(self._path, json.dumps(asdict(now)).encode(), is_durable=False)
            self._shown, self._has_failed = now, False
        except OSError as error:
            if not self._has_failed:
                logger.warning("who is connected cannot be shown to commands: %s", error)
            self._has_failed = True


def presence_shown(folder: Path) -> Presence | None:
    """Return what the running coordinator shows; None: the file is absent or illegible."""
    try:
        rows: dict[str, Any] = json.loads((folder / FILE).read_text())
        return Presence(
            tuple(Present(**row) for row in rows["clients"]), tuple(Arriving(**row) for row in rows["arriving"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
