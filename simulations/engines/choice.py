"""Which engine: by hand, or by a short measurement of each on the very task.

    sequential   one process, one client after another
    processes    several processes
    batched      many clients in one product, in one process or in several
    ray          as processes, on the machines of a Ray cluster

The measurement trains the same few clients, for as many steps as a fraction of a second allows, with each of them.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from atoll.parallel.arrays import Arrays
from atoll.simulations.engines.batched import Batched
from atoll.simulations.engines.engine import Engine, Failed, Job, Training
from atoll.simulations.engines.over_ray import OverRay
from atoll.simulations.engines.processes import Processes
from atoll.simulations.engines.sequential import Sequential
from atoll.simulations.engines.stack import CannotBatch

NAMES = ("auto", "sequential", "processes", "batched", "ray")

COHORT = 100
"""Clients that are measured at most: a product of many needs many."""

PASS_S = 0.15
"""What one pass of the sequential engine over the measured clients may take."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured of one engine."""

    engine: str

    clients_per_s: float
    """Whole trainings; of clients that were stopped early, the part that they did."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and why it."""

    engine: Engine

    figures: tuple[Figure, ...] = ()
    """Of all that were measured, fastest first."""

    reasons: tuple[str, ...] = ()
    """Why an engine was not to be had."""

    def __str__(self) -> str:
        measured = ", ".join(f"{each.engine} {each.clients_per_s:.3g}" for each in self.figures)
        told = f"engine: {self.engine.name}" + (f" (clients/s: {measured})" if measured else "")
        return "\n".join([told, *self.reasons])


def choose(
    training: Training,
    version: Arrays,
    client_ids: Sequence[str],
    *,
    name: str = "auto",
    workers: int | None = None,
    cohort: int = COHORT,
    address: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """The engine of this name; "batched" that cannot be gives another one with the reason.

    Args:
        training: of all clients.
        version: that the measured clients train from.
        client_ids: of the run; the first of them are measured.
        name: one of `NAMES`.
        workers: processes; None: one for each processor that we may use. One: no other process.
        cohort: clients of a round.
        address: of a Ray cluster.
        clock: [s].

    Raises:
        ValueError: no such engine.
        RayMissing: it is chosen by hand and not installed.
        ClientFailed: the task's code failed.
    """
    if name not in NAMES:
        raise ValueError(f"engine must be one of {', '.join(NAMES)}, got {name!r}")
    count = workers or len(os.sched_getaffinity(0))
    if name == "auto":
        return _measured(training, version, client_ids[: min(cohort, COHORT)], count, clock)
    if name == "ray":
        return Choice(OverRay(training, workers=workers, address=address))
    if name == "sequential":
        return Choice(Sequential(training))
    if name == "batched":
        try:
            batched = Processes(training, workers=count, batched=True) if count > 1 else Batched(training)
            return Choice(batched)
        except CannotBatch as error:
            return Choice(_unbatched(training, count), reasons=(_reason(error),))
    return Choice(Processes(training, workers=count))


def _unbatched(training: Training, workers: int) -> Engine:
    return Processes(training, workers=workers) if workers > 1 else Sequential(training)


def _measured(
    training: Training, version: Arrays, client_ids: Sequence[str], workers: int, clock: Callable[[], float]
) -> Choice:
    """The fastest; the others are closed."""
    sequential = Sequential(training)
    jobs = _jobs(sequential, version, client_ids, clock)
    figures, reasons, best = [], [], None
    for make in _candidates(training, workers):
        try:
            engine = make(sequential)
        except CannotBatch as error:
            reasons.append(_reason(error))
            continue
        figure = Figure(engine.name, _speed(engine, version, jobs, clock))
        if best is None or figure.clients_per_s > max(each.clients_per_s for each in figures):
            best, engine = engine, best
        figures.append(figure)
        if engine is not None:
            engine.close()
    assert best is not None
    return Choice(best, tuple(sorted(figures, key=lambda each: -each.clients_per_s)), tuple(dict.fromkeys(reasons)))


def _candidates(training: Training, workers: int) -> Iterator[Callable[[Engine], Engine]]:
    yield lambda sequential: sequential
    if workers > 1:
        yield lambda _: Processes(training, workers=workers)
    yield lambda _: Batched(training)
    if workers > 1:
        yield lambda _: Processes(training, workers=workers, batched=True)


def _jobs(engine: Engine, version: Arrays, client_ids: Sequence[str], clock: Callable[[], float]) -> list[Job]:
    """As many clients as a pass has time for; where that is not a handful, only so many of their steps."""
    every = [Job(client_id, seed=number) for number, client_id in enumerate(client_ids)]
    one = replace(every[0], steps=1)
    _speed(engine, version, [one], clock, passes=1)  # what is only slow at first is no measure
    step_s = 1 / _speed(engine, version, [one], clock, passes=1, by_work=False)
    steps = max(1, int(PASS_S / (step_s * min(len(every), 8))))
    (trained,) = engine.train(version, [replace(every[0], steps=steps)])
    done = 1 if isinstance(trained, Failed) else int(trained.report.get("steps") or 1)
    return [replace(job, steps=steps) for job in every[: max(8, int(PASS_S / (step_s * done)))]]


def _speed(
    engine: Engine,
    version: Arrays,
    jobs: Sequence[Job],
    clock: Callable[[], float],
    *,
    passes: int = 3,
    by_work: bool = True,
) -> float:
    """Clients per second in the best of some passes; the first one, which starts workers, does not count."""
    best = 0.0
    for number in range(passes):
        began, work = clock(), 0.0
        for result in engine.train(version, jobs):
            work += result.work if by_work and not isinstance(result, Failed) else 1.0
        if number or passes == 1:
            best = max(best, work / max(clock() - began, 1e-9))
    return best


def _reason(error: CannotBatch) -> str:
    return f"not batched: {error}"
