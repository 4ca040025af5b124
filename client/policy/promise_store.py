"""The durable promises of a site and the remembered chains of its peers, in `policy.db`.

The promises are a hash chain (`secure/promises`): each row holds its content and the chain's hash after it. A chain
that is broken (a row that is missing, changed or out of order) allows nothing until the operator accepts the loss with
`atoll site accept-rollback --new-key`.
"""

from collections.abc import Iterable

from atoll.client.policy.database import PolicyDatabase
from atoll.client.secure.promises import Kind, PeerChains, Promise, Promises, extended
from atoll.protocol.secure.messages import Chain
from atoll.protocol.secure.site_key import KEY_BYTES

_HASH_BYTES = 32
_End = tuple[bytes, int, bytes]

WAY_OUT = "put the state directory back from a newer copy, or begin again with `atoll site accept-rollback --new-key`"


class PromiseStore:
    """Promises and peers' chains, read from the file once and written through.

    Args:
        database: of the site's records.

    Raises:
        HistoryUnusable: from every method, when the file cannot be used.
    """

    def __init__(self, database: PolicyDatabase) -> None:
        self._database = database
        self.promises, self.peers = Promises(base_repeats_max=1), PeerChains()
        self.num_promises = 0
        self._durable_ends: set[_End] = set()
        self._durable_forks: set[bytes] = set()
        self.fault = ""
        """Sentence about a broken chain; empty: it is whole."""
        with database.faults():
            key = database.execute("SELECT key FROM site_key").fetchone()
            promises = database.execute(f"SELECT * FROM promises {_IN_ORDER}").fetchall()
            ends = database.execute("SELECT key, count, hash FROM peer_chains ORDER BY key, count").fetchall()
            self._durable_forks |= {bytes(key) for (key,) in database.execute("SELECT key FROM forked_peers")}
        self.peers.forked |= self._durable_forks
        self.site_key = b"" if key is None else bytes(key[0])
        """Raw public key to which the promises belong; empty: this site has never had one."""
        self._read_promises(promises)
        self._read_ends(ends)

    def _read_promises(self, rows: Iterable[tuple[object, ...]]) -> None:
        for index, (number, *content, hash_) in enumerate(rows, 1):
            promise = _promise(content)
            if number != index or promise is None or extended(self.promises.chain, promise).hash != hash_:
                self._break(f"promise {index} is missing or has been changed")
                return
            self._give(promise)
        if self.num_promises and not self.site_key:
            self._break("the site key of its promises is missing")

    def _read_ends(self, rows: Iterable[_End]) -> None:
        for key, count, hash_ in rows:
            if (len(key), len(hash_)) != (KEY_BYTES, _HASH_BYTES) or count < 0:
                self._break("the end of a peer's chain has been changed")
                return
            self.peers.remember(key, Chain(count, hash_))
            self._durable_ends.add((key, count, hash_))

    def _give(self, promise: Promise) -> None:
        self.promises.add(promise)
        self.num_promises += 1

    def _break(self, what: str) -> None:
        self.fault = f"{self._database.path}: {what}: nothing is allowed; {WAY_OUT}"

    def keep(self, promise: Promise) -> None:
        """Give a promise: durable when the call returns, with all ends of peers' chains that were learned before.

        Giving it again changes nothing; another promise of its kind in the same session is an error of the file.
        """
        row = _row(self.num_promises + 1, promise, extended(self.promises.chain, promise))
        with self._database.faults(), self._database.transaction():
            if not (is_given := self._database.execute(_SAME, row[1:-1]).fetchone() is not None):
                self._database.execute(_INSERT, row)
            learned = self._write_peers()
        self._durable_ends, self._durable_forks = learned
        if not is_given:
            self._give(promise)

    def remember_peers(self) -> None:
        """Make durable what was learned of peers' chains since the last call."""
        ends = {(key, chain.count, chain.hash) for key, chain in self.peers.items()}
        if (ends, self.peers.forked) == (self._durable_ends, self._durable_forks):
            return
        with self._database.faults(), self._database.transaction():
            learned = self._write_peers()
        self._durable_ends, self._durable_forks = learned

    def begin(self, site_key: bytes) -> None:
        """Record the site key to which the promises belong; promises before it still bind, under the new key's chain.

        A broken chain is cut into its readable promises, in order, and continues from them.
        """
        with self._database.faults(), self._database.transaction():
            rows = self._database.execute(f"SELECT * FROM promises {_IN_ORDER}").fetchall()
            kept = [promise for _, *content, _ in rows if (promise := _promise(content)) is not None]
            self._database.execute("DELETE FROM promises")
            promises = Promises(self.promises.base_repeats_max)
            for number, promise in enumerate(kept, 1):
                promises.add(promise)
                self._database.execute(_INSERT, _row(number, promise, promises.chain))
            self._database.execute("INSERT OR REPLACE INTO site_key VALUES (1, ?)", (site_key,))
            self._database.execute(
                "DELETE FROM peer_chains WHERE length(key) != ? OR length(hash) != ? OR count < 0",
                (KEY_BYTES, _HASH_BYTES),
            )
        self.promises, self.num_promises, self.site_key, self.fault = promises, len(kept), site_key, ""

    def _write_peers(self) -> tuple[set[_End], set[bytes]]:
        """Write the changed ends and the new forks, within a transaction, and return all."""
        ends = {(key, chain.count, chain.hash) for key, chain in self.peers.items()}
        gone, new = self._durable_ends - ends, ends - self._durable_ends
        self._database.execute_each("DELETE FROM peer_chains WHERE key = ? AND count = ?", (end[:2] for end in gone))
        self._database.execute_each("INSERT OR REPLACE INTO peer_chains VALUES (?, ?, ?)", new)
        forks = {*self.peers.forked}
        self._database.execute_each(
            "INSERT INTO forked_peers VALUES (?)", ((key,) for key in forks - self._durable_forks)
        )
        return ends, forks


_IN_ORDER = "ORDER BY number"
_INSERT = "INSERT INTO promises VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SAME = (
    "SELECT 1 FROM promises WHERE kind = ? AND run = ? AND purpose = ? AND round = ? AND attempt = ? AND session = ? "
    "AND base = ? AND survivors = ?"
)


def _row(number: int, promise: Promise, chain: Chain) -> tuple[object, ...]:
    where = promise.run, promise.purpose, promise.round, promise.attempt, promise.session
    return (number, str(promise.kind), *where, promise.base, promise.survivors, chain.hash)


def _promise(fields: list[object]) -> Promise | None:
    """Return the promise in the fields of a row; None: they are none."""
    kind, run, purpose, round_id, attempt, session, base, survivors = fields
    try:
        return Promise(Kind(kind), run, purpose, round_id, attempt, session, base, survivors)  # type: ignore[arg-type]
    except ValueError:
        return None
