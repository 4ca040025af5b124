"""Where a simulated run stands between two rounds, so that an interrupted one goes on from there."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.parallel.task.metrics import Statistics, as_statistics
from atoll.protocol.durable import write_atomically
from atoll.server.errors import StoreCorrupted
from atoll.server.journal.codec import decode, decode_ledger, encode, encode_ledger
from atoll.server.rounds.ledger import Ledger
from atoll.simulations.federation.updates import Kept

STATE = "state.json"

SHARE = 0.01
"""Of the real time that may go into saving. A round that was not saved is computed again, with the same outcome."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the next rounds begin with, beside the models and what clients keep; work under way is lost."""

    ledger: Ledger
    totals: Mapping[str, Any]
    sites: Mapping[str, tuple[float, str, int]]
    """By client: how long its uploads took, the version that it has, how often it has connected."""
    engine: str
    """The kind of engine with which it was begun."""
    round_due: float | None = None
    """When the next round begins [virtual s]; None: at once, or never."""
    updates: tuple[Kept, ...] = ()
    """That are accepted, and wait for a fold."""
    train: Mapping[str, Statistics] = field(default_factory=dict)
    """What their trainings have measured, by digest."""
    own: Sequence[str] = ()
    """The files of what clients keep."""


class Keeper:
    """Writes and finds it.

    Args:
        folder: of the run.
        clock: real seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = folder / STATE, clock
        self._due = 0.0

    def load(self) -> Snapshot | None:
        """What an earlier process has left; None: nothing.

        Raises:
            StoreCorrupted: the file is damaged.
        """
        if not self._path.exists():
            return None
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            ledger = decode_ledger(found["ledger"], where=str(self._path))
            sites = {name: tuple(site) for name, site in found["sites"].items()}
            updates = tuple(decode(Kept, text, str(self._path)) for text in found.get("updates", ()))
            train = {digest: as_statistics(sums) for digest, sums in found.get("train", {}).items()}
            due = found.get("round_due")
            return Snapshot(ledger, found["totals"], sites, found["engine"], due, updates, train, found["own"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreCorrupted(f"{self._path}: not the state of a simulated run: {error}") from error

    def save_if_due(self, snapshot: Callable[[], Snapshot], *, always: bool) -> bool:
        """Save when little time has gone into it so far; whether it did."""
        now = self._clock()
        if not always and now < self._due:
            return False
        self.save(snapshot())
        took = self._clock() - now
        self._due = now + took / SHARE
        return True

    def save(self, snapshot: Snapshot) -> None:
        """Whole, or as before."""
        text = json.dumps(
            {
                "ledger": encode_ledger(snapshot.ledger),
                "totals": snapshot.totals,
                "sites": snapshot.sites,
                "engine": snapshot.engine,
                "round_due": snapshot.round_due,
                "updates": [encode(update) for update in snapshot.updates],
                "train": snapshot.train,
                "own": snapshot.own,
            }
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, text.encode(), is_durable=False)
