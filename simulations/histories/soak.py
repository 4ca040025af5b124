"""Many histories, judged on all processors, and what there was in them.

A seed is judged in whichever process is free; what it comes to depends on nothing else.
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
from atoll.protocol.vocabulary import RejectReason
from atoll.server.rounds.events import ClientLost, Commit, Reject, UpdateRefused
from atoll.simulations.histories.history import History
from atoll.simulations.histories.judge import BadHistory, judged

SEEDS_AT_ONCE = 25


@dataclass(slots=True)
class Tally:
    """What a number of histories came to."""

    bad: dict[int, str] = field(default_factory=dict)  # seed -> the history of the failure
    num_events: list[int] = field(default_factory=list)  # of each history: of the coordinator's machine
    num_agent_events: list[int] = field(default_factory=list)  # and of the agents' sessions
    num_rounds: list[int] = field(default_factory=list)
    num_committed: int = 0
    num_crashed: int = 0  # histories in which the coordinator came up again at least once
    ends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # by reason
    losses: Counter[str] = field(default_factory=Counter)  # of clients, by reason
    faults: Counter[str] = field(default_factory=Counter)  # by their fields in `Faults`

    @property
    def num_histories(self) -> int:
        """Good and bad ones."""
        return len(self.num_events) + len(self.bad)

    @property
    def share_committed(self) -> float:
        """Of all rounds."""
        return self.num_committed / max(1, sum(self.num_rounds))

    @property
    def share_crashed(self) -> float:
        """Of all histories."""
        return self.num_crashed / max(1, len(self.num_events))

    @property
    def missing_refusals(self) -> list[str]:
        """Reasons for a refusal that no history had."""
        return [reason for reason in RejectReason if not self.refusals[reason]]

    def add(self, history: History) -> None:
        """One more good history."""
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
        for told in history.agent_steps:  # what was damaged on the way, no machine of the server hears of
            if isinstance(told.event, Answered) and told.event.resend:
                self.refusals[told.event.reason] += 1

    def merge(self, other: "Tally") -> None:
        """Both together."""
        self.bad.update(other.bad)
        for name in ("num_events", "num_agent_events", "num_rounds"):
            getattr(self, name).extend(getattr(other, name))
        self.num_committed += other.num_committed
        self.num_crashed += other.num_crashed
        for name in ("ends", "refusals", "losses", "faults"):
            getattr(self, name).update(getattr(other, name))

    def document(self) -> dict[str, Any]:
        """For a program."""
        counters = {name: dict(getattr(self, name)) for name in ("ends", "refusals", "losses", "faults")}
        bad = {seed: text.partition("\n")[0] for seed, text in self.bad.items()}
        per_history = {name: getattr(self, name) for name in ("num_events", "num_agent_events", "num_rounds")}
        return {"bad": bad, **per_history, **counters, "committed": self.num_committed, "crashed": self.num_crashed}

    def text(self, seconds: float) -> str:
        """For a person."""
        if not self.num_events:
            return f"{len(self.bad)} histories, all of them bad"
        lines = (
            f"{self.num_histories} histories, {len(self.bad)} bad, {self.num_histories / seconds:.0f} a second",
            f"in the median {median(self.num_rounds):g} rounds, {median(self.num_events):g} events of the coordinator "
            f"and {median(self.num_agent_events):g} of its agents",
            f"{self.share_committed:.0%} of {sum(self.num_rounds)} rounds committed; "
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
    found = Tally()
    with _collected_at_the_end():
        for seed in range(first, first + count):
            try:
                found.add(judged(seed, preset=preset))
            except BadHistory as error:
                found.bad[seed] = str(error)
    return found


@contextmanager
def _collected_at_the_end() -> Iterator[None]:
    """Worlds are full of cycles and live for milliseconds: looking for garbage among them takes a tenth of the time."""
    is_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()  # what was there before is no garbage of ours
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
    """Judge `count` seeds from `first` on in `jobs` processes (0: as many as there are processors).

    `on_progress` sees what there is whenever there is more.
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
    # forked, not spawned: every import is there already; nothing here has threads or sockets
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(tally, begins, sizes, [preset] * len(begins))
