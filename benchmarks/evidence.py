"""What a state directory says of a run after the fact: what was counted, what was promised, what is missing.

Promised is what the coordinator's disk held as accepted, or an agent's log calls accepted, at any time: from then
on the update must be in exactly one committed model, whatever died.
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
"""Round and client of an update that was accepted."""

_ACCEPTED = re.compile(r"the update of round (\d+) of \S+ is accepted")


@dataclass(frozen=True, slots=True)
class Ledger:
    """One look at a run."""

    state: RunState = RunState.QUEUED
    cause: str = ""
    records: tuple[RoundRecord, ...] = ()
    models: dict[int, str] = field(default_factory=dict)  # digest of each version, the initial one too

    @property
    def num_committed(self) -> int:
        """Rounds that were committed."""
        return sum(record.phase is Phase.COMMITTED for record in self.records)

    @property
    def accepted(self) -> dict[Promise, str]:
        """The updates that the records call accepted, by round and client, with their digests."""
        return {
            (record.round_id, client_id): client.digest
            for record in self.records
            for client_id, client in record.clients.items()
            if client.digest is not None
        }

    @property
    def counted(self) -> Counter[str]:
        """How often each update is in a committed model, by digest."""
        counts: Counter[str] = Counter()
        for record in self.records:
            if record.phase is Phase.COMMITTED:
                counts.update(c.digest for c in record.clients.values() if c.used_in == record.round_id and c.digest)
                counts.update(carried.digest for carried in record.carried)
        return counts

    def explained(self, promise: Promise) -> bool:
        """Whether the record says why no model holds an update although it was accepted."""
        round_id, client_id = promise
        return any(
            record.round_id == round_id
            and (client := record.clients.get(ClientId(client_id)))
            and client.unused_because
            for record in self.records
        )


def look(state: Path) -> Ledger:
    """Read what is on disk, whether the coordinator lives or not; an empty ledger before there is a run."""
    with suppress(OSError, LookupError):
        history = History(state)
        run = history.runs()[-1]
        versions = {int(row.version): str(row.digest) for row in history.versions(run.run_id)}
        return Ledger(run.state, run.cause, tuple(history.rounds(run.run_id)), versions)
    return Ledger()


def heard(logs: Iterable[tuple[str, Path]]) -> set[Promise]:
    """What the agents were told: (site, log) of each."""
    return {
        (int(round_id), site)
        for site, path in logs
        if path.exists()
        for round_id in _ACCEPTED.findall(path.read_text(errors="replace"))
    }


@dataclass(slots=True)
class Verdict:
    """What is wrong with a run that has ended; empty when nothing is."""

    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    is_same: bool = True  # set by whoever knows the undisturbed run
    faults: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """For a person."""
        wrong = [f"lost {update}" for update in self.lost] + [f"counted twice: {update}" for update in self.twice]
        return "; ".join([*wrong, *self.faults, *([] if self.is_same else ["other bits"])]) or "well"


def judge(end: Ledger, promised: Iterable[tuple[Promise, str]], told: set[Promise]) -> Verdict:
    """Hold the end of a run against everything that was promised on the way.

    Args:
        end: the last look.
        promised: (round, client) and digest of what any earlier look called accepted.
        told: what the agents heard.
    """
    verdict, counted, accepted = Verdict(), end.counted, end.accepted
    for promise, digest in sorted({*promised, *accepted.items()}):
        if not counted[digest] and not end.explained(promise):
            verdict.lost.append(f"{digest[:12]} of {promise[1]} in round {promise[0]}")
    for promise in sorted(told - accepted.keys()):
        verdict.lost.append(f"what {promise[1]} was told of round {promise[0]}")
    verdict.twice = [f"{digest[:12]} ({count} times)" for digest, count in counted.items() if count > 1]
    if end.state is not RunState.FINISHED:
        verdict.faults.append(f"the run is {end.state} ({end.cause})")
    verdict.faults += [
        f"round {record.round_id} is {record.phase}: {record.abandon_reason} {record.detail}"
        for record in end.records
        if record.phase is not Phase.COMMITTED
    ]
    return verdict
