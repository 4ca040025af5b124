"""The faults of a world: their kinds, their frequency in the world of a seed, and presets that select them.

The preset `standard` has all faults, `sums` has them in runs with secure sums, and `budgets` in private ones;
`network`, `crashes`, `disk` and `clock` have those of their names; `none` has only the network's latency and clients of
different speed.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

Seconds = float


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The frequency of each fault: a chance per occasion, or a gap, the mean time between two [s]; 0: never."""

    # ------------------------------------------------------------ processes

    coordinator_crashes: int = 0
    """Maximum number of crashes of the coordinator at random times."""
    coordinator_crash_gap: Seconds = 60.0
    crash_at_step: float = 0.0
    """Crash of the coordinator before, in or after a group commit, or between two effects."""
    downtime: Seconds = 5.0
    agent_crash_gap: Seconds = 0.0
    agent_crash_at_step: float = 0.0
    """Crash of an agent between two effects, or after the write of an update to the spool."""
    leave_gap: Seconds = 0.0
    agent_downtime: Seconds = 15.0
    worker_crashes: float = 0.0
    worker_hangs: float = 0.0
    fold_fails: float = 0.0
    sampler_fails: float = 0.0

    # ------------------------------------------------------------ the network

    cut_gap: Seconds = 0.0
    """Cut of one client's stream, with the loss of all messages in transit."""
    offline: Seconds = 0.0
    """Time without any network after a cut."""
    half_open: float = 0.0
    """Cut of which neither side is notified."""
    broken_by: float = 0.0
    """Message that breaks its control stream, and is lost with all others in transit."""
    arrives_after_the_end: float = 0.0
    """Arrival of a message after the end of its stream, possibly during the client's next one."""
    dropped: float = 0.0
    """Loss of a message on a stream that continues. No gRPC stream does this; the machines tolerate it."""
    delayed: float = 0.0
    """Late arrival of a message, and of all that follow it, including heartbeats."""
    delay: Seconds = 10.0
    repeated: float = 0.0
    """Second arrival of a message, at any time and also on a later stream."""
    overtakes: float = 0.0
    """Arrival of a message before those that were sent before it. No stream does this; the machines tolerate it."""
    partition_gap: Seconds = 0.0
    """Partition of a group of clients: messages arrive only after its end."""
    partition: Seconds = 20.0
    one_way: float = 0.0
    """Partition in one direction only."""
    verdict_lost: float = 0.0
    upload_cut: float = 0.0
    upload_damaged: float = 0.0
    upload_repeated: float = 0.0
    download_fails: float = 0.0
    download_damaged: float = 0.0
    slow_line: float = 0.0
    """Share of the clients whose uploads take many leases, while no heartbeat comes through."""

    # ------------------------------------------------------------ disks

    slow_writes: float = 0.0
    """Group commit that takes `slow_write` seconds longer on average."""
    slow_write: Seconds = 10.0
    full_disk_gap: Seconds = 0.0
    """Full disk of the coordinator, which writes, folds and receives nothing until there is room again."""
    full_disk: Seconds = 15.0
    damaged_snapshots: float = 0.0
    """Damage to the newest snapshot in a crash."""
    lost_files: float = 0.0
    """Loss of accepted updates on the coordinator's disk in a crash, which its operator accepts."""
    spool_full: float = 0.0
    """Lack of room for a finished update in an agent's spool."""
    spool_damaged: float = 0.0
    """Damage to an agent's whole spool in a crash."""

    # ------------------------------------------------------------ clocks

    clock_jumps: float = 0.0
    """Setting of the coordinator's wall clock during a crash, forward or back by up to `clock_jump`."""
    clock_jump: Seconds = 300.0
    suspend_gap: Seconds = 0.0
    """Sleep of a client's machine, whose monotonic clock stands still."""
    suspend: Seconds = 30.0
    clock_gap: Seconds = 0.0
    """Jump, drift or stop of the wall clock of a running machine, the coordinator's or a client's."""
    clock_wrong: Seconds = 300.0
    """Mean time until such a clock is set right."""
    lag: Seconds = 0.0
    """Maximum delay of a wake-up for a deadline."""

    # ------------------------------------------------------------ people

    clumsy: float = 0.0
    """Update with bad bytes, or with a claim that no policy admits."""
    strangers: int = 0
    """Number of unsolicited messages."""
    pauses: int = 0
    stops: int = 0
    resumes: int = 0
    operator_gap: Seconds = 60.0
    approvals: float = 0.0
    """Share of the clients that decline everything until their operator approves."""
    approval: Seconds = 60.0
    """Mean time until that approval."""
    absence_gap: Seconds = 0.0
    """Absence of a client, for hours."""
    absence: Seconds = 3600.0


COORDINATOR_DIES = ("coordinator_crashes", "crash_at_step")
CUTS = ("cut_gap", "offline", "half_open", "partition_gap", "one_way", "arrives_after_the_end", "absence_gap")
MESSAGES = ("broken_by", "dropped", "delayed", "repeated", "overtakes")
TRANSFERS = (
    *("verdict_lost", "upload_cut", "upload_damaged", "upload_repeated", "download_fails", "download_damaged"),
    "slow_line",
)
AGENT_DIES = ("agent_crash_gap", "agent_crash_at_step", "leave_gap", "half_open", "worker_crashes", "worker_hangs")
CLOCKS = ("clock_jumps", "clock_gap", "suspend_gap", "lag")
DISKS = ("slow_writes", "full_disk_gap", "damaged_snapshots", "lost_files", "spool_full", "spool_damaged")
PRESETS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "network": frozenset((*CUTS, *MESSAGES, *TRANSFERS)),
    "crashes": frozenset((*COORDINATOR_DIES, *AGENT_DIES, "fold_fails", "sampler_fails")),
    "disk": frozenset((*COORDINATOR_DIES, "agent_crash_gap", *DISKS)),
    "clock": frozenset((*COORDINATOR_DIES, *CLOCKS)),
    "standard": frozenset(field.name for field in fields(Faults)),
    "sums": frozenset(field.name for field in fields(Faults)),
    "budgets": frozenset(field.name for field in fields(Faults)),
}
"""Kinds of faults of each preset; their severity (`downtime`, `delay`, ...) is drawn for every preset."""


def random_faults(rng: random.Random, preset: str = "standard") -> Faults:
    """Draw the faults of a world; each is absent from many worlds, so that rounds also succeed."""
    drawn, calm, selected = _random_faults(rng), Faults(), PRESETS[preset]
    return Faults(
        **{
            field.name: getattr(drawn if field.name in selected or getattr(calm, field.name) else calm, field.name)
            for field in fields(Faults)
        }
    )


def _random_faults(rng: random.Random) -> Faults:
    """Draw all faults; new ones come last, so that a seed's other draws did not change."""
    return _with_later_faults(_first_faults(rng), rng)


def _maybe(rng: random.Random, chance: float, *values: float) -> float:
    return rng.choice(values) if rng.random() < chance else 0.0


def _first_faults(rng: random.Random) -> Faults:
    maybe = partial(_maybe, rng)
    return Faults(
        coordinator_crashes=int(maybe(0.5, 1, 2, 4)),
        coordinator_crash_gap=rng.choice([20.0, 60.0, 120.0]),
        crash_at_step=maybe(0.4, 0.005, 0.02, 0.05),
        downtime=rng.choice([1.0, 5.0, 20.0]),
        agent_crash_gap=maybe(0.25, 100.0, 400.0),
        agent_crash_at_step=maybe(0.2, 0.01, 0.05),
        leave_gap=maybe(0.2, 100.0, 400.0),
        agent_downtime=rng.choice([2.0, 10.0, 40.0]),
        worker_crashes=maybe(0.25, 0.05, 0.2),
        worker_hangs=maybe(0.2, 0.05, 0.2),
        fold_fails=maybe(0.15, 0.1, 0.3),
        sampler_fails=maybe(0.1, 0.1, 0.3),
        cut_gap=maybe(0.25, 40.0, 100.0, 300.0),
        offline=maybe(0.5, 5.0, 20.0),
        half_open=maybe(0.4, 0.2, 0.8),
        broken_by=maybe(0.2, 0.02, 0.1),
        arrives_after_the_end=maybe(0.5, 0.5),
        dropped=maybe(0.15, 0.02, 0.1),
        delayed=maybe(0.25, 0.05, 0.3),
        delay=rng.choice([2.0, 10.0, 40.0]),
        repeated=maybe(0.25, 0.1, 0.5),
        overtakes=maybe(0.15, 0.2, 0.5),
        partition_gap=maybe(0.2, 60.0, 200.0),
        partition=rng.choice([3.0, 20.0, 60.0]),
        one_way=maybe(0.5, 0.5),
        verdict_lost=maybe(0.4, 0.1, 0.5),
        upload_cut=maybe(0.3, 0.1, 0.4),
        upload_damaged=maybe(0.2, 0.1, 0.5),
        upload_repeated=maybe(0.4, 0.1, 0.5),
        download_fails=maybe(0.15, 0.05, 0.2),
        download_damaged=maybe(0.2, 0.1, 0.5),
        slow_writes=maybe(0.15, 0.02, 0.1),
        slow_write=rng.choice([1.0, 10.0]),
        full_disk_gap=maybe(0.2, 60.0, 200.0),
        full_disk=rng.choice([3.0, 20.0, 60.0]),
        damaged_snapshots=maybe(0.3, 0.3, 1.0),
        spool_full=maybe(0.15, 0.05, 0.2),
        spool_damaged=maybe(0.3, 0.3, 1.0),
        clock_jumps=maybe(0.4, 0.5, 1.0),
        clock_jump=rng.choice([5.0, 100.0, 5000.0]),
        suspend_gap=maybe(0.2, 100.0, 300.0),
        suspend=rng.choice([3.0, 20.0, 120.0]),
        lag=maybe(0.25, 0.5, 5.0, 20.0),
        clumsy=maybe(0.25, 0.1, 0.3),
        strangers=int(maybe(0.4, 5, 15)),
        stops=int(maybe(0.12, 1, 2)),
        resumes=int(maybe(0.4, 1, 2)),
        operator_gap=rng.choice([20.0, 100.0]),
        pauses=int(maybe(0.25, 1, 2, 4)),
        approvals=maybe(0.2, 0.3, 1.0),
        approval=rng.choice([10.0, 60.0, 300.0]),
    )


def _with_later_faults(faults: Faults, rng: random.Random) -> Faults:
    maybe = partial(_maybe, rng)
    return replace(
        faults,
        absence_gap=maybe(0.15, 60.0, 300.0),
        absence=rng.choice([600.0, 3600.0, 10800.0]),
        clock_gap=maybe(0.25, 60.0, 300.0, 2000.0),
        clock_wrong=rng.choice([30.0, 300.0, 3000.0]),
        slow_line=maybe(0.2, 0.3, 1.0),
        lost_files=maybe(0.4, 0.5, 1.0),
    )
