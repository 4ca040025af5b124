"""Snapshots of a simulated run between two rounds, from which an interrupted run resumes.

state.json    {"sha256": DIGEST, "state": {...}}, the digest of the state, which has those of all files that a resumed
              run reads: versions, slots of the server optimizer, updates, states of clients, the rounds' lines
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from atoll.ground.durable import write_atomically
from atoll.ground.file_digest import Digests, faults_of_files
from atoll.server.errors import StoreCorrupted
from atoll.server.journal.codec import decode, decode_ledger, encode, encode_ledger
from atoll.server.rounds.ledger import Ledger
from atoll.simulations.federation.data_read import Read
from atoll.simulations.federation.updates import SavedUpdate
from atoll.task.metrics import Statistics, as_statistics

STATE = "state.json"

WAY_OUT = "restore it from a backup, or start the run again in another --out"

SHARE = 0.01
"""Maximum share of the real time spent on saving; an unsaved round is repeated with the same outcome."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a run, without its models, the files of client states, and work in progress."""

    ledger: Ledger
    totals: Mapping[str, Any]
    sites: Mapping[str, tuple[float | None, str, int]]
    """Expected duration of an upload [s] (None: not measured), digest of the downloaded version and number of
    connections, by client."""
    engine: str
    """Kind of the engine with which the run began."""
    round_due: float | None = None
    """Beginning of the next round [virtual s]; None: at once, or never."""
    updates: tuple[SavedUpdate, ...] = ()
    """Accepted updates that wait for a fold."""
    train: Mapping[str, Statistics] = field(default_factory=dict)
    """Sums measured in the training of the waiting updates, by digest."""
    client_states: Sequence[str] = ()
    """Names of the files of client states."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of each file that a resumed run reads, by its name in the folder of the run."""
    rounds: str = ""
    """The SHA-256 of the lines of the rounds."""
    data: Read = field(default_factory=dict)
    """Summary of the clients' data."""
    signed: Mapping[str, int] = field(default_factory=dict)
    """Secure sums that each client has signed from the newest version."""


class SnapshotFile:
    """File of a run's last snapshot.

    Args:
        folder: the folder of the run.
        clock: the real time [s].
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = folder / STATE, clock
        self._due = 0.0
        self.digests = Digests(folder)
        """The digests of the run's files, for the next snapshot."""

    def load(self) -> Snapshot | None:
        """Return the snapshot of an earlier process; None: there is none.

        Raises:
            StoreCorrupted: the file is damaged.
        """
        if not self._path.exists():
            return None
        try:
            sealed = json.loads(self._path.read_text(encoding="utf-8"))
            stored = sealed["state"]
            if sealed["sha256"] != _digest_of(json.dumps(stored)):
                raise ValueError("its SHA-256 has changed since it was written")
            ledger = decode_ledger(stored["ledger"], where=str(self._path))
            sites = {name: tuple(site) for name, site in stored["sites"].items()}
            updates = tuple(decode(SavedUpdate, text, str(self._path)) for text in stored["updates"])
            train = {digest: as_statistics(sums) for digest, sums in stored["train"].items()}
            of_files = stored["own"], stored["files"], stored["rounds"], stored["data"]
            due = stored["round_due"]
            signed = stored.get("signed", {})
            return Snapshot(ledger, stored["totals"], sites, stored["engine"], due, updates, train, *of_files, signed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreCorrupted(f"{self._path}: not the state of a simulated run: {error}; {WAY_OUT}") from error

    def load_whole(self) -> Snapshot | None:
        """Load the snapshot like `load`, after checking the digests of all files that a resumed run reads.

        Raises:
            StoreCorrupted: a file is damaged or missing.
        """
        snapshot = self.load()
        if snapshot and (faults := [*faults_of_files(self._path.parent, snapshot.files)]):
            more = f", and {len(faults) - 1} more of the run" if len(faults) > 1 else ""
            raise StoreCorrupted(f"{faults[0]}{more}; {WAY_OUT}")
        return snapshot

    def save_if_due(self, snapshot: Callable[[], Snapshot], *, always: bool) -> bool:
        """Save the snapshot if `SHARE` permits it, or always; return whether it was saved."""
        now = self._clock()
        if not always and now < self._due:
            return False
        self.save(snapshot())
        took = self._clock() - now
        self._due = now + took / SHARE
        return True

    def save(self, snapshot: Snapshot) -> None:
        """Replace the file atomically."""
        state = json.dumps(
            {
                "ledger": encode_ledger(snapshot.ledger),
                "totals": snapshot.totals,
                "sites": snapshot.sites,
                "engine": snapshot.engine,
                "round_due": snapshot.round_due,
                "updates": [encode(update) for update in snapshot.updates],
                "train": snapshot.train,
                "own": snapshot.client_states,
                "files": snapshot.files,
                "rounds": snapshot.rounds,
                "data": snapshot.data,
                "signed": snapshot.signed,
            }
        )
        text = f'{{"sha256": "{_digest_of(state)}", "state": {state}}}'
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, text.encode(), is_durable=False)


def _digest_of(state: str) -> str:
    return sha256(state.encode()).hexdigest()
