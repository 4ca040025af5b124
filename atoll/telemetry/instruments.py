"""The list of all metrics: names and units by OpenTelemetry's rules, attributes, processes. Pure.

`docs/monitoring.md` is generated from this list, and a scrape has no other series of Atoll's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

RUNS_MAX = 50
"""Largest number of runs with series, the newest ones."""

METRICS_MAX = 20
"""Largest number of a task's metrics with series, for each run and source."""

SERIES_MAX = 2_000
"""Largest number of series of one instrument."""

DROPPED = "atoll.series.dropped"

Attributes = Mapping[str, str | int]


class Kind(StrEnum):
    """Kind of an instrument."""

    COUNTER = "counter"
    UP_DOWN_COUNTER = "up-down counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Process(StrEnum):
    """Process that has metrics; its `service.name` is `atoll.` and this word."""

    COORDINATOR = "coordinator"
    AGENT = "agent"
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class Instrument:
    """Metric of a process."""

    name: str
    kind: Kind
    unit: str
    description: str
    processes: tuple[Process, ...]
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; another one has no bound."""

    @property
    def in_prometheus(self) -> str:
        """Name in Prometheus; a histogram has `_bucket`, `_sum` and `_count` of it."""
        name, unit = self.name.replace(".", "_"), _UNITS.get(self.unit, "")
        with_unit = name if not unit or name.endswith(f"_{unit}") else f"{name}_{unit}"
        return f"{with_unit}_total" if self.kind is Kind.COUNTER else with_unit


class Buckets:
    """Observations of one series of a histogram: their number by bucket, and their sum.

    Args:
        bounds: the upper bounds of the buckets, rising.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Add an observation, to the first bucket whose bound is not below it."""
        at = next((at for at, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[at] += 1
        self.total += value

    def copy(self) -> "Buckets":
        """Return a copy for a reading, which another thread writes out."""
        found = Buckets(self.bounds)
        found.counts, found.total = [*self.counts], self.total
        return found


Reading = dict[str, list[tuple[Attributes, "float | Buckets"]]]
"""Values of the instruments at one instant, by name."""

_UNITS = {"s": "seconds", "By": "bytes"}
_C, _A, _R = Process.COORDINATOR, Process.AGENT, Process.RANK
_ALL = (_C, _A, _R)
RUN, NAME, SOURCE, RANK = "atoll.run.id", "atoll.metric.name", "atoll.metric.source", "atoll.rank"
STATE, OUTCOME, REASON = "atoll.run.state", "atoll.round.outcome", "atoll.round.reason"
FATE, IDENTITY, DIRECTION = "atoll.invitation.fate", "atoll.identity.name", "network.io.direction"
POLICY_OUTCOME, POLICY_RULE, LEFT_OUT = "atoll.policy.outcome", "atoll.policy.rule", "atoll.series.kind"

_ROUND_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0, 30_000.0, 100_000.0)
_FOLD_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_COMMIT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

INSTRUMENTS: tuple[Instrument, ...] = (
    Instrument("atoll.run.state", Kind.GAUGE, "1", "1 for the state that the run has now", (_C,), (RUN, STATE)),
    Instrument("atoll.round.number", Kind.GAUGE, "{round}", "Newest round that has begun", (_C,), (RUN,)),
    Instrument(
        "atoll.round.last_commit_time",
        Kind.GAUGE,
        "s",
        "Instant of the newest commit, since the epoch; of a run without one the instant of its first reading",
        (_C,),
        (RUN,),
    ),
    Instrument("atoll.rounds", Kind.COUNTER, "{round}", "Rounds that have ended", (_C,), (RUN, OUTCOME, REASON)),
    Instrument(
        "atoll.round.duration",
        Kind.HISTOGRAM,
        "s",
        "Time from the opening of a round to its end",
        (_C,),
        (RUN,),
        _ROUND_S,
    ),
    Instrument(
        "atoll.fold.duration",
        Kind.HISTOGRAM,
        "s",
        "Time from the closing of a round to its commit",
        (_C,),
        (RUN,),
        _FOLD_S,
    ),
    Instrument(
        "atoll.journal.commit.duration",
        Kind.HISTOGRAM,
        "s",
        "Time of a group commit until it is on disk",
        (_C,),
        (),
        _COMMIT_S,
    ),
    Instrument(
        "atoll.invitations",
        Kind.COUNTER,
        "{invitation}",
        "Invitations by fate at their round's end",
        (_C,),
        (RUN, FATE),
    ),
    Instrument(
        "atoll.client.connected", Kind.UP_DOWN_COUNTER, "{client}", "Clients with an open control stream", (_C,)
    ),
    Instrument("atoll.client.registered", Kind.UP_DOWN_COUNTER, "{client}", "Members of a run", (_C,), (RUN,)),
    Instrument(
        "atoll.client.available", Kind.UP_DOWN_COUNTER, "{client}", "Members that can be invited now", (_C,), (RUN,)
    ),
    Instrument(
        "atoll.update.io",
        Kind.COUNTER,
        "By",
        "Bytes of updates that have arrived, at the ranks too",
        (_C, _R),
        (DIRECTION,),
    ),
    Instrument("atoll.model.io", Kind.COUNTER, "By", "Bytes of versions that were sent", (_C, _R), (DIRECTION,)),
    Instrument("atoll.update.saved", Kind.COUNTER, "By", "Bytes that codecs saved on accepted updates", (_C,), (RUN,)),
    Instrument(
        "atoll.metric.value",
        Kind.GAUGE,
        "1",
        "Newest value of a metric by the server's data or by all clients together",
        (_C,),
        (RUN, SOURCE, NAME),
    ),
    Instrument("atoll.journal.away", Kind.GAUGE, "1", "1 while the journal's database does not answer", (_C,)),
    Instrument("atoll.disk.free", Kind.GAUGE, "By", "Free bytes of the state directory's disk", _ALL),
    Instrument("atoll.disk.reserve", Kind.GAUGE, "By", "Bytes below which uploads are deferred", (_C,)),
    Instrument(
        "atoll.certificate.expiry_time",
        Kind.GAUGE,
        "s",
        "End of the certificate of this process, at a coordinator also of each connected rank, since the epoch",
        _ALL,
        (IDENTITY,),
    ),
    Instrument("atoll.rank.connected", Kind.UP_DOWN_COUNTER, "{rank}", "1 while the rank is connected", (_C,), (RANK,)),
    Instrument(
        "atoll.rank.io",
        Kind.COUNTER,
        "By",
        "Bytes of sums that ranks have exchanged",
        (_C, _R),
        (RANK,),
    ),
    Instrument("atoll.agent.connected", Kind.UP_DOWN_COUNTER, "{connection}", "1 while the agent is connected", (_A,)),
    Instrument("atoll.agent.work", Kind.UP_DOWN_COUNTER, "{job}", "Jobs under way or waiting, by run", (_A,), (RUN,)),
    Instrument(
        "atoll.agent.training.duration",
        Kind.HISTOGRAM,
        "s",
        "Time of a round's work here, without download and upload",
        (_A,),
        (RUN,),
        _ROUND_S,
    ),
    Instrument(
        "atoll.agent.spool.usage", Kind.UP_DOWN_COUNTER, "By", "Bytes of finished updates that wait in the spool", (_A,)
    ),
    Instrument(
        "atoll.agent.policy.decisions",
        Kind.COUNTER,
        "{decision}",
        "Decisions of the site's policy",
        (_A,),
        (POLICY_OUTCOME, POLICY_RULE),
    ),
    Instrument(
        DROPPED,
        Kind.UP_DOWN_COUNTER,
        "1",
        f"Runs beyond the newest {RUNS_MAX}, metrics beyond {METRICS_MAX} of a run and source, and series beyond "
        f"{SERIES_MAX} of an instrument, that have no series",
        _ALL,
        (LEFT_OUT,),
    ),
    Instrument("process.cpu.time", Kind.COUNTER, "s", "Processor time of the process", _ALL, ("cpu.mode",)),
    Instrument("process.memory.usage", Kind.UP_DOWN_COUNTER, "By", "Resident memory of the process", _ALL),
    Instrument("process.uptime", Kind.GAUGE, "s", "Time since the process began", _ALL),
    Instrument(
        "process.file_descriptor.usage", Kind.UP_DOWN_COUNTER, "{file_descriptor}", "Open file descriptors", _ALL
    ),
    Instrument(
        "cpython.gc.collections",
        Kind.COUNTER,
        "{collection}",
        "Passes of the garbage collector",
        _ALL,
        ("cpython.gc.generation",),
    ),
)
"""All metrics, in the order of the documentation."""

BY_NAME: Mapping[str, Instrument] = {instrument.name: instrument for instrument in INSTRUMENTS}


def bounded(reading: Reading) -> Reading:
    """Return a reading with at most `SERIES_MAX` series of each instrument, and the number of those left out."""
    found: Reading = {name: series[:SERIES_MAX] for name, series in reading.items()}
    left_out = sum(len(series) - len(found[name]) for name, series in reading.items())
    found[DROPPED] = [*found.get(DROPPED, []), ({LEFT_OUT: "series"}, left_out)]
    return found
