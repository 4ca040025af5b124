"""What a simulated run leaves in its folder for a reader: one line for each round, and how it all ended.

    rounds.jsonl   see `line_of`
    result.json    the state, the cause, the totals

A metric is the task's own value of the sums over all examples, never a mean of values.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from atoll.parallel.task.metrics import Metrics, Statistics, merge, values
from atoll.protocol.durable import write_atomically
from atoll.protocol.vocabulary import Fate, RoundId
from atoll.server.errors import StoreCorrupted
from atoll.server.rounds.record import ClientRecord, RoundRecord

FATES_MAX = 1000
"""A round with more invitations than that is reported by its numbers alone; of failures, no more are written."""

REASON_MAX = 200
"""Characters of what a failed client says."""

ROUNDS, RESULT = "rounds.jsonl", "result.json"

Json = dict[str, Any]


@dataclass(slots=True)
class Measured:
    """What was measured of one version."""

    server: Statistics | None = None
    clients: Mapping[str, Statistics] = field(default_factory=dict)

    def values(self, metrics: Metrics, *, with_clients: bool) -> Json:
        """What the line of its round says of it; by client, when these are few."""
        line: Json = {}
        if self.server is not None:
            line["server"] = values(metrics, self.server)
        if self.clients:
            line["clients"] = values(metrics, merge(self.clients.values()))
            if with_clients:
                line["client_values"] = {name: values(metrics, sums) for name, sums in sorted(self.clients.items())}
        return line


def line_of(
    record: RoundRecord,
    metrics: Metrics,
    *,
    train: Iterable[Statistics],
    totals: Mapping[str, Any],
) -> Json:
    """One round.

    Args:
        record: of the machine.
        metrics: of the task.
        train: what the clients have measured while they trained.
        totals: what else the line says: seconds and bytes since the begin of the run.

    Returns:
        The line; `fates` by client only in a round of few invitations, `failures` by client only when some have failed.
    """
    fates = Counter(client.fate for client in record.clients.values())
    in_time = fates[Fate.REPORTED] if record.mode == "sync" else len(record.buffer)
    line: Json = {
        "round": int(record.round_id),
        "version": None if record.version is None else int(record.version),
        "state": str(record.phase),
        "why": str(record.close_reason or record.abandon_reason or ""),
        "detail": record.detail,
        "opened_s": record.opened_at,
        "round_s": (record.ended_at or record.opened_at) - record.opened_at,
        "invited": len(record.clients),
        "reported": in_time,
        "late": len(record.carried),
        "counted": 0 if record.version is None else in_time + len(record.carried),
        "lost": fates[Fate.LOST],
        "failed": fates[Fate.FAILED],
        "refused": fates[Fate.REFUSED],
        "stragglers": fates[Fate.STRAGGLER] + fates[Fate.LATE] + fates[Fate.CARRIED],
        "released": fates[Fate.RELEASED],
        **totals,
        "train": values(metrics, sums) if (sums := merge(train)) else None,
        "server": None,
        "clients": None,
    }
    if len(record.clients) <= FATES_MAX:
        line["fates"] = {name: str(client.fate) for name, client in sorted(record.clients.items())}
    if fates[Fate.FAILED]:
        failed = islice(record.with_fate(Fate.FAILED), FATES_MAX)
        line["failures"] = {name: _reason_of(client) for name, client in failed}
    return line


def _reason_of(client: ClientRecord) -> str:
    """The word for it, and what the client said beside it."""
    return f"{client.reason}: {client.detail}"[:REASON_MAX] if client.detail else client.reason


class RunFolder:
    """The files of one run.

    Args:
        folder: of the run.
        num_rounds: lines that stand; those after them are of rounds that are begun again.

    Raises:
        StoreCorrupted: some of these are not there, or nobody can read them.
    """

    def __init__(self, folder: Path, num_rounds: RoundId | int = 0) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ROUNDS
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        kept = [line for line in lines if _is_round_up_to(line, num_rounds)]
        if len(kept) < num_rounds:
            raise StoreCorrupted(f"{path}: {len(kept)} of the {num_rounds} rounds that have ended have a line here")
        if kept != lines:
            write_atomically(path, "".join(f"{line}\n" for line in kept).encode())
        self._rounds = path.open("a", encoding="utf-8")

    def add(self, line: Json) -> None:
        """One more round."""
        self._rounds.write(json.dumps(line) + "\n")
        self._rounds.flush()

    def finish(self, result: Json) -> None:
        """The run is over, for now."""
        text = json.dumps(result, indent=2) + "\n"
        (self._folder / RESULT).write_text(text, encoding="utf-8")

    def close(self) -> None:
        """No more lines come."""
        self._rounds.close()


def _is_round_up_to(line: str, num_rounds: int) -> bool:
    try:
        return int(json.loads(line)["round"]) <= num_rounds
    except (ValueError, KeyError, TypeError):
        return False  # cut off by an interruption
