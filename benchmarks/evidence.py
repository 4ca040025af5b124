"""The evidence about a run in its state directory: accepted updates, counted updates, and those that are missing.

An update is promised once the coordinator's disk has it as accepted, or an agent's log calls it accepted. From then on
it must be in exactly one committed model, whichever process dies.
"""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from atoll.protocol.vocabulary import ClientId, Phase, RunState
from atoll.server.rounds.record import RoundRecord
from atoll.server.views.history import History

Promise = tuple[int, str]
"""Round and client of an accepted update."""

_ACCEPTED = re.compile(r"the update of round (\d+) of \S+ is accepted")


@dataclass(frozen=True, slots=True)
class Ledger:
    """The state of a run at one moment."""

    state: RunState = RunState.QUEUED
    cause: str = ""
    records: tuple[RoundRecord, ...] = ()
    models: dict[int, str] = field(default_factory=dict)  # digest of each version, the initial one too

    @property
    def num_committed(self) -> int:
        """The number of committed rounds."""
        return sum(record.phase is Phase.COMMITTED for record in self.records)

    @property
    def accepted(self) -> dict[Promise, str]:
        """The digests of the updates that the records call accepted, by round and client."""
        return {
            (record.round_id, client_id): client.digest
            for record in self.records
            for client_id, client in record.clients.items()
            if client.digest is not None
        }

    @property
    def counted(self) -> Counter[str]:
        """The number of committed models that contain an update, by its digest."""
        counts: Counter[str] = Counter()
        for record in self.records:
            if record.phase is Phase.COMMITTED:
                counts.update(c.digest for c in record.clients.values() if c.used_in == record.round_id and c.digest)
                counts.update(carried.digest for carried in record.carried)
        return counts

    def explained(self, promise: Promise) -> bool:
        """Return whether the record has a reason why no model contains an accepted update."""
        round_id, client_id = promise
        return any(
            record.round_id == round_id
            and (client := record.clients.get(ClientId(client_id)))
            and client.unused_because
            for record in self.records
        )


def look(state: Path) -> Ledger:
    """Read the state on disk, with or without a running coordinator; an empty ledger before the first run."""
    with suppress(OSError, LookupError):
        history = History(state)
        run = history.runs()[-1]
        versions = {int(row.version): str(row.digest) for row in history.versions(run.run_id)}
        return Ledger(run.state, run.cause, tuple(history.rounds(run.run_id)), versions)
    return Ledger()


def accepted_in_logs(logs: Iterable[tuple[str, Path]]) -> set[Promise]:
    """Return the updates that the agents' logs call accepted; `logs` has (site, log) of each agent."""
    return {
        (int(round_id), site)
        for site, path in logs
        if path.exists()
        for round_id in _ACCEPTED.findall(path.read_text(errors="replace"))
    }


@dataclass(slots=True)
class Verdict:
    """The faults of an ended run; empty: none."""

    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    is_same: bool = True  # set by a caller that knows the undisturbed run
    faults: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the faults as one line."""
        wrong = [f"lost {update}" for update in self.lost] + [f"counted twice: {update}" for update in self.twice]
        return "; ".join([*wrong, *self.faults, *([] if self.is_same else ["other bits"])]) or "well"


def judge(end: Ledger, promised: Iterable[tuple[Promise, str]], in_logs: set[Promise]) -> Verdict:
    """Check the end of a run against all promises made before.

    Args:
        end: the ledger at the end.
        promised: (round, client) and digest of each update that an earlier ledger called accepted.
        in_logs: the updates that the agents' logs call accepted.
    """
    verdict, counted, accepted = Verdict(), end.counted, end.accepted
    for promise, digest in sorted({*promised, *accepted.items()}):
        if not counted[digest] and not end.explained(promise):
            verdict.lost.append(f"{digest[:12]} of {promise[1]} in round {promise[0]}")
    for promise in sorted(in_logs - accepted.keys()):
        verdict.lost.append(f"round {promise[0]} of {promise[1]}, accepted by its log")
    verdict.twice = [f"{digest[:12]} ({count} times)" for digest, count in counted.items() if count > 1]
    if end.state is not RunState.FINISHED:
        verdict.faults.append(f"the run is {end.state} ({end.cause})")
    verdict.faults += [
        f"round {record.round_id} is {record.phase}: {record.abandon_reason} {record.detail}"
        for record in end.records
        if record.phase is not Phase.COMMITTED
    ]
    return verdict
