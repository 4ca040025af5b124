"""The ledger of a site's budgets in `policy.db`: it is read, checked and charged in one write transaction of SQLite.

So two agents of one site that share a ledger never spend more than the budget, and a charge is durable before the first
step of what it is for. A ledger that is damaged, was put back from an older copy, or cannot be read allows nothing.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from atoll.client.policy.budgets.account import Accounts
from atoll.client.policy.budgets.anchor import NAME, Anchor, read_anchor, write_anchor
from atoll.client.policy.budgets.entries import GENESIS, Charged, Closed, Entry, extended, read_chain, text_of
from atoll.client.policy.database import HistoryUnusable, PolicyDatabase
from atoll.client.policy.decisions import charges_in_log
from atoll.ground.folder_id import FILE as FOLDER_ID
from atoll.ground.folders import in_words
from atoll.ground.printable import count_of

WAY_OUT = (
    "put the newer copy back, or close the names of its data sets with `atoll site accept-rollback --budgets`, after "
    "which each needs a new name in the policy"
)

Change = Callable[[Accounts], tuple[list[Entry], str]]
"""A function of the accounts that returns new entries, or the sentence why there are none."""


class Ledger:
    """The open ledger.

    Args:
        database: of the ledger.
        folder: the agent's state directory, with its memory of the ledger.

    Raises:
        HistoryUnusable: from every method, when the file cannot be used.
    """

    def __init__(self, database: PolicyDatabase, folder: Path) -> None:
        self._database, self._folder = database, folder
        self._accounts, self._ends, self._seen = Accounts([]), [GENESIS], -1
        self._has_charged: bool | None = None  # whether this agent has, so that there is a memory; None: not known
        self.fault = ""
        """Sentence about a ledger that allows nothing; empty: it is whole."""
        self.read()

    def read(self) -> Accounts:
        """Return the accounts as they are now; they are empty while there is a fault."""
        if (seen := self._database.change) != self._seen:
            with self._database.faults():
                self._load()
            self._seen = seen
        return self._accounts

    def change(self, change: Change) -> tuple[list[Entry], str]:
        """Add the entries that a function of the newest accounts returns; they are durable on return.

        Returns:
            The new entries, or the sentence why there are none.
        """
        self._seen = -1  # what is in memory counts again when all is durable
        with self._database.faults():
            with self._database.transaction():
                self._load()
                if self.fault:
                    return [], self.fault
                entries, fault = change(self._accounts)
                if entries and read_anchor(self._folder)[0] == Anchor():
                    self._remember(is_first=True)
                self._write(entries)
            self._seen = self._database.change
        self._remember()
        return entries, fault

    def close_names(self, names: Iterable[str], at: float) -> list[str]:
        """Begin again after a loss: close the given names, the remembered ones, and those of a damaged ledger.

        A ledger that is whole keeps its entries; a damaged one loses them, and closes every name that can be read.

        Args:
            names: of data sets, such as those of the policy.
            at: seconds since the epoch.

        Returns:
            The names that are closed now.
        """
        self._seen = -1
        with self._database.faults(), self._database.transaction():
            anchor, _ = read_anchor(self._folder)
            self._load(is_trusted=True)
            found = {*names, *anchor.names}
            if self.fault:
                rows = self._database.execute("SELECT data FROM budgets").fetchall()
                found |= {name for (name,) in rows if isinstance(name, str) and name.isprintable() and name}
                self._database.execute("DELETE FROM budgets")
                self._accounts, self._ends, self.fault = Accounts([]), [GENESIS], ""
            closed = [name for name in sorted(found) if not self._accounts.account(name).is_closed]
            self._write([Entry(name, Closed(at)) for name in closed])
        self._remember()
        return closed

    def _load(self, *, is_trusted: bool = False) -> None:
        """Read and check all entries.

        Args:
            is_trusted: leave out the comparison with the agent's memory.
        """
        rows = self._database.execute("SELECT number, kind, data, content, hash FROM budgets ORDER BY number")
        entries, hashes, fault = read_chain(rows.fetchall())
        accounts = Accounts(entries)
        fault = fault or accounts.fault
        if not fault and not is_trusted:
            fault = self._fault_of_memory(entries, hashes)
        self._accounts, self._ends = (Accounts([]), [GENESIS]) if fault else (accounts, [GENESIS, *hashes])
        self.fault = f"{self._database.path}: {fault}: nothing is allowed; {WAY_OUT}" if fault else ""

    def _fault_of_memory(self, entries: Iterable[Entry], hashes: list[bytes]) -> str:
        anchor, fault = read_anchor(self._folder)
        if not fault and anchor == Anchor() and self._is_expected(entries):
            return f"this agent has charged its budgets, and its memory of them, {self._folder / NAME}, was removed"
        self._has_charged = self._has_charged or anchor != Anchor()
        if not fault and not anchor.count and not hashes and anchor != Anchor() and charges_in_log(self._folder):
            return f"this agent has charged its budgets, and neither {self._folder / NAME} nor the file has an entry"
        if fault or not anchor.count:
            return fault
        if len(hashes) >= anchor.count and hashes[anchor.count - 1].hex() == anchor.hash:
            return ""
        have = "none" if not hashes else f"{len(hashes)}, or others"
        seen = count_of(anchor.count, "entry", "entries")
        return (
            f"this agent has seen {seen} of its budgets and the file has {have}: it was put back from an older copy, "
            "or removed"
        )

    def _is_expected(self, entries: Iterable[Entry]) -> bool:
        """Return whether this agent has charged anything, so that it has a memory: by the ledger or its log."""
        if self._has_charged is None:
            self._has_charged = charges_in_log(self._folder)
        path = self._folder / FOLDER_ID
        agent = path.read_text(errors="replace").strip() if path.exists() else ""
        charges = (entry.content for entry in entries if isinstance(entry.content, Charged))
        return self._has_charged or any(charged.work.agent == agent for charged in charges)

    def _write(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            number = len(self._ends)
            hash_ = extended(self._ends[-1], number, entry)
            row = (number, entry.kind, entry.data, text_of(entry.content), hash_)
            self._database.execute("INSERT INTO budgets VALUES (?, ?, ?, ?, ?)", row)
            self._accounts.add(entry)
            self._ends.append(hash_)

    def _remember(self, *, is_first: bool = False) -> None:
        """Make the agent's memory of the ledger durable; of an empty ledger before the first charge alone."""
        if len(self._ends) == 1 and not is_first:
            return
        anchor = Anchor(len(self._ends) - 1, self._ends[-1].hex(), tuple(self._accounts.names()))
        try:
            if read_anchor(self._folder)[0] != anchor:
                write_anchor(self._folder, anchor)
            self._has_charged = True
        except OSError as error:
            unusable = HistoryUnusable(f"the memory of the budgets cannot be written: {in_words(error)}")
            unusable.errno = error.errno
            raise unusable from error
