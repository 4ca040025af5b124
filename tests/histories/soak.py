"""The judgement of many histories on all processors, and their statistics.

A seed is judged in any free process; the result depends on the seed alone.
"""

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from atoll.client.session.events import Answered
from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import RejectReason
from atoll.server.rounds.events import ClientLost, Commit, Reject, UpdateRefused
from tests.histories.history import History
from tests.histories.judge import BadHistory, judged

SEEDS_AT_ONCE = 25


@dataclass(slots=True)
class Tally:
    """The statistics of a number of histories."""

    bad: dict[int, str] = field(default_factory=dict)  # the message of each failure, by seed
    num_events: list[int] = field(default_factory=list)  # events of the run machine, for each history
    num_agent_events: list[int] = field(default_factory=list)  # events of the agents' sessions, for each history
    num_rounds: list[int] = field(default_factory=list)
    num_committed: int = 0
    num_crashed: int = 0  # histories in which the coordinator restarted at least once
    ends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # by reason
    losses: Counter[str] = field(default_factory=Counter)  # of clients, by reason
    faults: Counter[str] = field(default_factory=Counter)  # by their fields in `Faults`

    @property
    def num_histories(self) -> int:
        """The number of good and bad histories."""
        return len(self.num_events) + len(self.bad)

    @property
    def share_committed(self) -> float:
        """The share of all rounds that were committed."""
        return self.num_committed / max(1, sum(self.num_rounds))

    @property
    def share_crashed(self) -> float:
        """The share of all histories in which the coordinator crashed."""
        return self.num_crashed / max(1, len(self.num_events))

    @property
    def missing_refusals(self) -> list[str]:
        """The reasons for a refusal that no history had."""
        return [reason for reason in RejectReason if not self.refusals[reason]]

    def add(self, history: History) -> None:
        """Add a good history."""
        assert history.machine is not None
        self.num_events.append(len(history.steps))
        self.num_agent_events.append(len(history.agent_steps))
        self.num_rounds.append(len(history.records))
        self.num_crashed += bool(history.restarts)
        self.ends[history.machine.ledger.state] += 1
        self.faults += history.faults
        for step in history.steps:
            if isinstance(step.event, ClientLost):
                self.losses[step.event.reason] += 1
            elif isinstance(step.event, UpdateRefused):
                self.refusals[step.event.reason] += 1
            self.num_committed += sum(isinstance(effect, Commit) for effect in step.effects)
            self.refusals.update(effect.reason for effect in step.effects if isinstance(effect, Reject))
        for agent_step in history.agent_steps:  # the run machine has no event for bytes damaged in transit
            if isinstance(agent_step.event, Answered) and agent_step.event.resend:
                self.refusals[agent_step.event.reason] += 1

    def merge(self, other: "Tally") -> None:
        """Add the statistics of other histories."""
        self.bad.update(other.bad)
        for name in ("num_events", "num_agent_events", "num_rounds"):
            getattr(self, name).extend(getattr(other, name))
        self.num_committed += other.num_committed
        self.num_crashed += other.num_crashed
        for name in ("ends", "refusals", "losses", "faults"):
            getattr(self, name).update(getattr(other, name))

    def document(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        counters = {name: dict(getattr(self, name)) for name in ("ends", "refusals", "losses", "faults")}
        bad = {seed: text.partition("\n")[0] for seed, text in self.bad.items()}
        per_history = {name: getattr(self, name) for name in ("num_events", "num_agent_events", "num_rounds")}
        return {"bad": bad, **per_history, **counters, "committed": self.num_committed, "crashed": self.num_crashed}

    def text(self, seconds: float) -> str:
        """Return the statistics as text for a person.

        Args:
            seconds: the real time that the judgement took [s].
        """
        if not self.num_events:
            return f"all histories are bad: {len(self.bad)}"
        lines = (
            f"{count_of(self.num_histories, 'history', 'histories')}, {len(self.bad)} bad, "
            f"{self.num_histories / seconds:.0f} a second",
            f"in the median {median(self.num_rounds):g} rounds, {median(self.num_events):g} events of the coordinator "
            f"and {median(self.num_agent_events):g} of its agents",
            f"{self.share_committed:.0%} of {count_of(sum(self.num_rounds), 'round')} committed; "
            f"the coordinator crashed in {self.share_crashed:.0%} of the histories",
            f"ends      {_counts(self.ends)}",
            f"refusals  {_counts(self.refusals)}",
            f"losses    {_counts(self.losses)}",
            f"faults    {_counts(self.faults)}",
        )
        return "\n".join(lines)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in counter.most_common() if number) or "none"


def tally(first: int, count: int, preset: str) -> Tally:
    """Judge `count` seeds from `first` on."""
    result = Tally()
    with _collection_at_the_end():
        for seed in range(first, first + count):
            try:
                result.add(judged(seed, preset=preset))
            except BadHistory as error:
                result.bad[seed] = str(error)
    return result


@contextmanager
def _collection_at_the_end() -> Iterator[None]:
    """Collect garbage once at the end: worlds are full of cycles, whose collection would take a tenth of the time."""
    is_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # excludes older objects from the collection
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        if is_enabled:
            gc.enable()


def soak(
    first: int,
    count: int,
    *,
    preset: str = "standard",
    jobs: int = 0,
    on_progress: Callable[[Tally], None] | None = None,
) -> Tally:
    """Judge many seeds in several processes.

    Args:
        first: the first seed.
        count: the number of seeds.
        preset: the preset of the faults.
        jobs: the number of processes; 0: one for each processor.
        on_progress: a callback for the statistics so far.
    """
    whole = Tally()
    for part in _parts(first, count, preset, jobs or len(os.sched_getaffinity(0))):
        whole.merge(part)
        if on_progress is not None:
            on_progress(whole)
    return whole


def _parts(first: int, count: int, preset: str, jobs: int) -> Iterator[Tally]:
    begins = range(first, first + count, SEEDS_AT_ONCE)
    sizes = [min(SEEDS_AT_ONCE, first + count - begin) for begin in begins]
    if jobs == 1 or len(begins) <= 1:
        yield from map(tally, begins, sizes, [preset] * len(begins))
        return
    # forked, not spawned, to inherit all imports; this process has no threads or sockets
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(tally, begins, sizes, [preset] * len(begins))
