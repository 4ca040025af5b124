"""The run of `million` by hand: `python -m benchmarks.tight_million FOLDER CLIENTS COHORT ROUNDS`.

The same entries with the same bodies, in commits of the same size; a dict of what is known of each client; after each
round its record and the pages of the members that it has changed (after the first: of all), and the entries that these
have replaced are deleted. In a folder that a killed process has left behind the members are read back from their pages
and from the entries behind these, each checked. JSON, dicts and `sqlite3`: no rules, and no values that are checked.
Each line of the output is one JSON object with the names that `million` uses.
"""

import gc
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from benchmarks.tight_journal import Entry, Page, TightJournal

ENTRIES_A_COMMIT = 2_000
MEMBERS_A_PAGE = 500
SHARE_BACK = 0.1


class TightMillion:
    """One process: the members, and their journal."""

    def __init__(self, folder: Path, cohort: int, rounds: int) -> None:
        self._journal = TightJournal(folder / "state.db")
        self._cohort, self._rounds, self._rng = cohort, rounds, random.Random(0)
        self.members: dict[str, dict[str, Any]] = {}
        self.connected: list[str] = []
        self.version = self._seq = self._paged = self._paged_before = 0
        self._changed: set[str] = set()
        self._entries: list[Entry] = []

    # ------------------------------------------------------------ the journal

    def _add(self, kind: str, body: dict[str, Any]) -> None:
        self._seq += 1
        self._entries.append((self._seq, time.time(), kind, to_json(body).decode()))
        if len(self._entries) >= ENTRIES_A_COMMIT:
            self._commit()

    def _commit(self, pages: Iterable[Page] = (), record: tuple[int, str] | None = None) -> None:
        entries, self._entries = self._entries, []
        self._journal.commit(entries, pages=pages, record=record)

    def recover(self) -> int:
        """Read everything back; return how many entries were behind the last page."""
        for seq, body in self._journal.pages():
            self.members |= from_json(body)
            self._paged = seq
        self._seq, count = self._paged, 0
        for seq, _, kind, body in self._journal.entries(after=self._paged):
            self._seq, count = seq, count + 1
            self._replay(kind, from_json(body))
        self.version = self._journal.num_records()
        self._paged_before = self._paged
        return count

    def _replay(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "ClientJoined":
            self._join(body["client_id"], body)
        elif kind == "UpdateReceived":
            self._report(body["update"])

    # ------------------------------------------------------------ the run

    def join(self, numbers: Iterable[int], session: str) -> None:
        """Register clients as members."""
        for number in numbers:
            name = f"client-{number:07d}"
            profile = {"num_examples": 10 + number % 90, "label": "ab"[number % 2]}
            body = {"client_id": name, "session": f"{session}-{number:07d}", "profile": profile, "working_on": []}
            self._join(name, body)
            self.connected.append(name)
            self._add("ClientJoined", body)

    def _join(self, name: str, body: dict[str, Any]) -> None:
        self.members[name] = {"profile": body["profile"], "session": body["session"]}
        self._changed.add(name)

    def _report(self, update: dict[str, Any]) -> None:
        name, number = update["client_id"], update["round_id"]
        seconds = {"download_seconds": 0.0, "train_seconds": 0.0, "upload_seconds": 0.0}
        self.members[name] |= {**seconds, "counted_round": number, "last_round": number, "times_chosen": 1}
        self._changed.add(name)

    def run(self) -> None:
        """Run all rounds that are left."""
        while self.version < self._rounds:
            self._round(self.version + 1)
            say(committed=self.version)
        say(ended="finished")

    def _round(self, number: int) -> None:
        opened_at = time.time()
        self._add("RoundDue", {})
        self._commit()
        cohort = self._rng.sample(self.connected, self._cohort)
        self._add("CohortDrawn", {"round_id": number, "clients": cohort})
        self._commit()
        clients = {}
        for name in cohort:
            update = _update(name, number)
            self._report(update)
            clients[name] = _client(update, opened_at)
            self._add("UpdateReceived", {"update": update})
        self._commit()
        self._add("Aggregated", {"round_id": number, "model_digest": f"{number:064x}"})
        record = {"round_id": number, "opened_at": opened_at, "ended_at": time.time(), "clients": clients}
        self._commit(self._pages(), (number, to_json(record).decode()))
        self._journal.prune(self._paged_before)
        self._paged_before, self._paged = self._paged, self._seq
        self.version = number

    def _pages(self) -> Iterator[Page]:
        """Make the pages of the members that have changed since the last ones."""
        names = sorted(self._changed)
        self._changed = set()
        for page, begin in enumerate(range(0, len(names), MEMBERS_A_PAGE)):
            members = {name: self.members[name] for name in names[begin : begin + MEMBERS_A_PAGE]}
            yield self._seq, page, to_json(members).decode()


def _update(name: str, number: int) -> dict[str, Any]:
    digest = f"{number:032x}{int(name[7:]):032x}"
    of_what = {"client_id": name, "round_id": number, "base_version": number - 1, "digest": digest}
    sizes = {"num_examples": 10, "work": 1.0, "num_bytes": 1000, "statistics": {}}
    return {**of_what, **sizes, "download_seconds": 0.0, "train_seconds": 0.0, "plain_bytes": 0}


def _client(update: dict[str, Any], at: float) -> dict[str, Any]:
    """Return the part of one client in a round's record."""
    fate = {"invited_at": at, "fate": "reported", "fate_at": time.time(), "reason": "", "detail": ""}
    link = {"disconnected_at": None, "num_reconnects": 0, "upload_begun_at": None, "digest": update["digest"]}
    sizes = {"num_examples": 10, "work": 1.0, "num_bytes": 1000, "download_seconds": 0.0, "train_seconds": 0.0}
    use = {"used_in": update["round_id"], "unused_because": "", "plain_bytes": 0, "deadline": None, "extended": 0.0}
    return {**fate, **link, **sizes, **use}


def say(**what: Any) -> None:
    """Print one line."""
    print(json.dumps({**what, "cpu_s": round(time.process_time(), 3)}), flush=True)


def main() -> None:
    """Run the first process, or the one that recovers."""
    gc.disable()  # nothing here is in a cycle
    folder, (clients, cohort, rounds) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    begun, is_new = time.perf_counter(), not folder.exists()
    folder.mkdir(exist_ok=True)
    million = TightMillion(folder, cohort, rounds)
    if is_new:
        million.join(range(clients), "first")
        say(joined=len(million.members), seconds=time.perf_counter() - begun)
    else:
        entries = million.recover()
        found = {"members": len(million.members), "version": million.version}
        say(recovered=found, entries=entries, seconds=time.perf_counter() - begun)
        begun = time.perf_counter()
        million.join(range(int(clients * SHARE_BACK)), "again")
        say(back=len(million.connected), seconds=time.perf_counter() - begun)
    million.run()


if __name__ == "__main__":
    main()
