"""Everything that can go wrong in a world, how often it does in the world of a seed, and which of it is wanted.

The presets: `standard` is everything; `network`, `crashes`, `disk` and `clock` are what their names say; `none` leaves
the network's own latency, and clients of different speed.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields

Seconds = float


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often what goes wrong. Chances are per occasion; gaps are the mean time between two [s]; 0: never."""

    # ------------------------------------------------------------ processes

    coordinator_crashes: int = 0
    """At most this many, at random instants."""
    coordinator_crash_gap: Seconds = 60.0
    crash_at_step: float = 0.0
    """Of the coordinator: before, within and after each group commit, and between any two effects."""
    downtime: Seconds = 5.0
    agent_crash_gap: Seconds = 0.0
    agent_crash_at_step: float = 0.0
    """Of an agent: between any two effects, and when an update is in the spool and nobody knows of it."""
    leave_gap: Seconds = 0.0
    agent_downtime: Seconds = 15.0
    worker_crashes: float = 0.0
    worker_hangs: float = 0.0
    fold_fails: float = 0.0
    sampler_fails: float = 0.0

    # ------------------------------------------------------------ the network

    cut_gap: Seconds = 0.0
    """Of one client's stream: what is under way is lost."""
    offline: Seconds = 0.0
    """After a cut, how long the client has no network at all."""
    half_open: float = 0.0
    """Of a cut: neither side is told."""
    broken_by: float = 0.0
    """Of a message on a control stream: the stream breaks with it, and it is lost with all that is under way."""
    arrives_after_the_end: float = 0.0
    """Of a message that was under way to the coordinator when its stream ended: it comes all the same, perhaps when the
    client's next stream stands."""
    dropped: float = 0.0
    """Of a message: lost, and the stream goes on. No stream of gRPC does that; the machines stand it."""
    delayed: float = 0.0
    """Of a message: it comes late, and so does all that follows it, heartbeats too."""
    delay: Seconds = 10.0
    repeated: float = 0.0
    """Of a message: it comes a second time, at any time, also on a later stream."""
    overtakes: float = 0.0
    """Of a message: it comes before those that were sent before it. No stream does that; the machines stand it."""
    partition_gap: Seconds = 0.0
    """Of a group of clients, at once: nothing passes until it is over; what was sent comes then."""
    partition: Seconds = 20.0
    one_way: float = 0.0
    """Of a partition: only one direction is blocked."""
    verdict_lost: float = 0.0
    upload_cut: float = 0.0
    upload_damaged: float = 0.0
    upload_repeated: float = 0.0
    download_fails: float = 0.0
    download_damaged: float = 0.0

    # ------------------------------------------------------------ disks

    slow_writes: float = 0.0
    """Of a group commit: it takes `slow_write` seconds, in the mean."""
    slow_write: Seconds = 10.0
    full_disk_gap: Seconds = 0.0
    """Of the coordinator: nothing is written, folded or taken in until there is room again."""
    full_disk: Seconds = 15.0
    damaged_snapshots: float = 0.0
    """Of a crash: the newest snapshot cannot be read any more."""
    spool_full: float = 0.0
    """Of a finished update: the agent has no room for it."""
    spool_damaged: float = 0.0
    """Of a crash of an agent: what is in its spool cannot be read any more."""

    # ------------------------------------------------------------ clocks

    clock_jumps: float = 0.0
    """Of a crash of the coordinator: its wall clock was set meanwhile, forward or back, by up to `clock_jump`."""
    clock_jump: Seconds = 300.0
    suspend_gap: Seconds = 0.0
    """Of a client's machine: it sleeps, and its monotonic clock stands."""
    suspend: Seconds = 30.0
    lag: Seconds = 0.0
    """How late a driver may wake for a deadline."""

    # ------------------------------------------------------------ people

    clumsy: float = 0.0
    """Of an update: it makes a claim that no policy admits, or its bytes are bad."""
    strangers: int = 0
    """Messages that nobody asked for."""
    pauses: int = 0
    stops: int = 0
    resumes: int = 0
    operator_gap: Seconds = 60.0


COORDINATOR_DIES = ("coordinator_crashes", "crash_at_step")
CUTS = ("cut_gap", "offline", "half_open", "partition_gap", "one_way", "arrives_after_the_end")
MESSAGES = ("broken_by", "dropped", "delayed", "repeated", "overtakes")
TRANSFERS = ("verdict_lost", "upload_cut", "upload_damaged", "upload_repeated", "download_fails", "download_damaged")
AGENT_DIES = ("agent_crash_gap", "agent_crash_at_step", "leave_gap", "half_open", "worker_crashes", "worker_hangs")
DISKS = ("slow_writes", "full_disk_gap", "damaged_snapshots", "spool_full", "spool_damaged")
CLOCKS = ("clock_jumps", "suspend_gap", "lag")
PRESETS: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "network": frozenset((*CUTS, *MESSAGES, *TRANSFERS)),
    "crashes": frozenset((*COORDINATOR_DIES, *AGENT_DIES, "fold_fails", "sampler_fails")),
    "disk": frozenset((*COORDINATOR_DIES, "agent_crash_gap", *DISKS)),
    "clock": frozenset((*COORDINATOR_DIES, *CLOCKS)),
    "standard": frozenset(field.name for field in fields(Faults)),
}
"""What may go wrong under each name; how bad it is (`downtime`, `delay`, ...) is drawn in any case."""


def random_faults(rng: random.Random, preset: str = "standard") -> Faults:
    """Draw which things go wrong in a world; each is absent from many, so that rounds also succeed."""
    drawn, calm, wanted = _random_faults(rng), Faults(), PRESETS[preset]
    return Faults(
        **{
            field.name: getattr(drawn if field.name in wanted or getattr(calm, field.name) else calm, field.name)
            for field in fields(Faults)
        }
    )


def _random_faults(rng: random.Random) -> Faults:
    def maybe(chance: float, *values: float) -> float:
        return rng.choice(values) if rng.random() < chance else 0.0

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
        pauses=int(maybe(0.25, 1, 2, 4)),  # last, so that what else is drawn of a seed stays as it was
    )
