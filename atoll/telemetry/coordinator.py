"""The readings of a coordinator, and what it counts of group commits while its metrics are on."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from atoll.protocol.identity.names import aggregator
from atoll.protocol.vocabulary import AbandonReason, Phase, RunId
from atoll.server.hosting.coordinator import Coordinator
from atoll.server.hosting.hosted_run import HostedRun
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.journal.rows import Batch, EvaluationRow, RecordRow
from atoll.server.journal.sources import WHOLE
from atoll.server.ports import Ports
from atoll.telemetry import instruments
from atoll.telemetry.instruments import BY_NAME, DROPPED, METRICS_MAX, RUNS_MAX, Attributes, Buckets, Reading
from atoll.telemetry.process import certificate_end, free_bytes

ENDED = (Phase.COMMITTED, Phase.ABANDONED)
"""Phases of a round that has ended."""


class CoordinatorReadings:
    """Readings of one coordinator; all methods run on its event loop.

    Args:
        coordinator: the coordinator, which has started.
        ports: its ports.
    """

    def __init__(self, coordinator: Coordinator, ports: Ports) -> None:
        self._coordinator, self._ports = coordinator, ports
        self._counted = {run_id: _newest_ended(run) for run_id, run in coordinator.runs.items()}
        self._rounds: Counter[tuple[RunId, str, str]] = Counter()
        self._fates: Counter[tuple[RunId, str]] = Counter()
        self._saved: Counter[RunId] = Counter()
        self._durations: dict[tuple[str, RunId], Buckets] = {}
        self._commits = Buckets(BY_NAME["atoll.journal.commit.duration"].bounds)
        self._values: dict[RunId, dict[tuple[str, str], float]] = {}
        self._first_read: dict[RunId, float] = {}
        coordinator.on_commit.append(self._committed)

    # ------------------------------------------------------------ group commits

    def _committed(self, rows: Batch, seconds: float) -> None:
        self._commits.add(seconds)
        for record in rows.records:
            if isinstance(record, RecordRow) and record.phase in ENDED:
                self._ended(record)
        for row in rows.evaluations:
            if row.source in WHOLE:
                self._measured(row)

    def _ended(self, row: RecordRow) -> None:
        """Count a round when its record is first written with its end; later records of it are amended ones."""
        run_id, number = row.run_id, row.round_id
        if number <= self._counted.get(run_id, 0):
            return
        self._counted[run_id] = number
        summary = json.loads(row.summary)
        self._rounds[run_id, str(row.phase), summary["reason"]] += 1
        for _, fate, *_ in row.clients:
            self._fates[run_id, fate] += 1
        self._saved[run_id] += summary["bytes_saved"]
        self._time("atoll.round.duration", run_id, summary["ended_at"] - summary["opened_at"])
        run = self._coordinator.runs.get(run_id)
        if row.phase is Phase.COMMITTED and isinstance(run, RunDriver):
            record = run.machine.ledger.past.get(number)
            if record is not None and record.closed_at is not None:
                self._time("atoll.fold.duration", run_id, summary["ended_at"] - record.closed_at)

    def _time(self, name: str, run_id: RunId, seconds: float) -> None:
        if (name, run_id) not in self._durations:
            self._durations[name, run_id] = Buckets(BY_NAME[name].bounds)
        self._durations[name, run_id].add(max(0.0, seconds))

    def _measured(self, row: EvaluationRow) -> None:
        kept = self._values.setdefault(row.run_id, {})
        for name, value in row.values.items():
            if value is not None:
                kept[row.source, name] = value

    # ------------------------------------------------------------ a reading

    def read(self) -> Reading:
        """Return the values of now."""
        coordinator = self._coordinator
        shown = dict(list(coordinator.runs.items())[-RUNS_MAX:])
        self._forget_deleted(coordinator.runs)
        found: Reading = {
            "atoll.client.connected": [({}, len(coordinator.attendance.hub))],
            "atoll.journal.commit.duration": [({}, self._commits.copy())],
            "atoll.journal.away": [({}, int(bool(coordinator.state.database.away)))],
            "atoll.disk.reserve": [({}, coordinator.config.disk_free_min)],
        }
        for run_id, run in shown.items():
            for name, attributes, value in self._of_run(run_id, run):
                found.setdefault(name, []).append((attributes, value))
        for name, attributes, counted in self._of_tallies(shown):
            found.setdefault(name, []).append((attributes, counted))
        dropped = self._of_metrics(shown, found)
        left_out = len(coordinator.runs) - len(shown)
        kinds = (("run", left_out), ("metric", dropped))
        found[DROPPED] = [({instruments.LEFT_OUT: kind}, number) for kind, number in kinds]
        found |= certificate_end(self._ports.keeper)
        self._of_ranks(found)
        return found

    def read_elsewhere(self) -> Reading:
        """Return the values that are read from the disk; on any thread."""
        return free_bytes(self._coordinator.state.path)

    def _forget_deleted(self, runs: Mapping[RunId, HostedRun]) -> None:
        """Forget what was counted of runs that were deleted."""
        gone = {run_id for run_id in (*self._counted, *self._values, *self._first_read) if run_id not in runs}
        if not gone:
            return
        for run_id in gone:
            self._counted.pop(run_id, None)
            self._saved.pop(run_id, None)
            self._values.pop(run_id, None)
            self._first_read.pop(run_id, None)
        self._rounds = Counter({key: number for key, number in self._rounds.items() if key[0] not in gone})
        self._fates = Counter({key: number for key, number in self._fates.items() if key[0] not in gone})
        self._durations = {key: buckets for key, buckets in self._durations.items() if key[1] not in gone}

    def _of_run(self, run_id: RunId, run: HostedRun) -> Iterator[tuple[str, Attributes, float]]:
        ledger, of_run = run.machine.ledger, {instruments.RUN: run_id}
        yield "atoll.run.state", {**of_run, instruments.STATE: str(ledger.state)}, 1
        if isinstance(run, RunDriver):
            membership = run.machine.ledger.membership
            yield "atoll.round.number", of_run, run.machine.ledger.next_round - 1
            yield "atoll.client.registered", of_run, len(membership.members)
            yield "atoll.client.available", of_run, membership.num_available
            yield "atoll.round.last_commit_time", of_run, self._last_commit(run_id, run)

    def _last_commit(self, run_id: RunId, run: RunDriver) -> float:
        past = reversed(run.machine.ledger.past.values())
        at = next((one.ended_at for one in past if one.phase is Phase.COMMITTED and one.ended_at is not None), None)
        return at if at is not None else self._first_read.setdefault(run_id, time.time())

    def _of_tallies(self, shown: Mapping[RunId, HostedRun]) -> Iterator[tuple[str, Attributes, float | Buckets]]:
        run, outcome, reason = instruments.RUN, instruments.OUTCOME, instruments.REASON
        rounds = {(run_id, str(Phase.ABANDONED), str(why)): 0 for run_id in shown for why in self._may_abandon(run_id)}
        for (run_id, phase, why), number in (rounds | self._rounds).items():
            if run_id in shown:
                yield "atoll.rounds", {run: run_id, outcome: phase, reason: why}, number
        for (run_id, fate), number in self._fates.items():
            if run_id in shown:
                yield "atoll.invitations", {run: run_id, instruments.FATE: fate}, number
        for run_id, num_bytes in self._saved.items():
            if run_id in shown:
                yield "atoll.update.saved", {run: run_id}, num_bytes
        for (name, run_id), buckets in self._durations.items():
            if run_id in shown:
                yield name, {run: run_id}, buckets.copy()

    def _may_abandon(self, run_id: RunId) -> Iterable[AbandonReason]:
        """Return the reasons for which rounds of a run may yet be abandoned: an increase is counted from a 0."""
        run = self._coordinator.runs[run_id]
        return AbandonReason if isinstance(run, RunDriver) and run.machine.ledger.is_open else ()

    def _of_metrics(self, shown: Mapping[RunId, HostedRun], found: Reading) -> int:
        """Add the newest metrics; return the number of those left out."""
        dropped, series = 0, found.setdefault("atoll.metric.value", [])
        for run_id, values in self._values.items():
            if run_id not in shown:
                continue
            by_source: Counter[str] = Counter()
            for (source, name), value in values.items():
                by_source[source] += 1
                if by_source[source] > METRICS_MAX:
                    dropped += 1
                    continue
                of = {instruments.RUN: run_id, instruments.SOURCE: source, instruments.NAME: name}
                series.append((of, value))
        return dropped

    def _of_ranks(self, found: Reading) -> None:
        """Add the bytes, here and at the ranks, and each rank with the end of the certificate that it reports."""
        coordinator, direction = self._coordinator, instruments.DIRECTION
        rows = [] if coordinator.ranks is None else coordinator.ranks.rows()
        received = coordinator.uploads.received_bytes + sum(row.received_bytes for row in rows)
        sent = coordinator.sent_bytes + sum(row.sent_bytes for row in rows)
        found["atoll.update.io"] = [({direction: "receive"}, received)]
        found["atoll.model.io"] = [({direction: "transmit"}, sent)]
        for row in rows:
            of = {instruments.RANK: row.rank}
            found.setdefault("atoll.rank.connected", []).append((of, int(bool(row.address))))
            found.setdefault("atoll.rank.io", []).append((of, row.exchanged_bytes))
            if row.certificate_until:
                name = {instruments.IDENTITY: aggregator(row.rank).uri}
                found.setdefault("atoll.certificate.expiry_time", []).append((name, row.certificate_until))


def _newest_ended(run: HostedRun) -> int:
    """Return the newest round that has ended, whose record may only be amended."""
    if not isinstance(run, RunDriver):
        return 0
    is_open = run.machine.round is not None
    return run.machine.ledger.next_round - (2 if is_open else 1)
