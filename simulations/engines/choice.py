"""Which engine: by hand, or by a short measurement of each on the very task.

    sequential   one process, one client after another
    processes    several processes
    batched      many clients in one product, in one process or in several
    ray          as processes, on the machines of a Ray cluster

The measurement trains the same few clients, for as many steps as a fraction of a second allows, with each of them.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from atoll.parallel.task.arrays import Arrays
from atoll.simulations.engines.batched.batched import Batched
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.engine import ClientFailed, Engine, Failed, Job, Training
from atoll.simulations.engines.processes.over_ray import OverRay
from atoll.simulations.engines.processes.processes import Processes, WorkerDied
from atoll.simulations.engines.sequential import Sequential

NAMES = ("auto", "sequential", "processes", "batched", "ray")

COHORT = 100
"""Clients that are measured at most: a product of many needs many."""

FEWEST = 8
"""Clients that are measured at least."""

PASS_S = 0.1
"""What one pass of the sequential engine over the measured clients may take, if they are not the fewest."""

PASSES = 3
"""Of each engine, after a first one; the best counts."""

BESIDE = 0.75
"""What several processes keep of their speed in a run, where the coordinator needs a processor, too: of a tiny model,
its messages take as long as the training."""


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
        chosen = f" (clients/s: {measured}; --engine NAME keeps one)" if measured else ""
        told = f"engine: {self.engine.name}{chosen}"
        return "\n".join([told, *self.reasons])


def choose(
    training: Training,
    version: Arrays,
    client_ids: Sequence[str],
    *,
    name: str = "auto",
    workers: int | None = None,
    threads: int = 1,
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
        threads: of each operation; more than one may change bits. Ray's actors have one.
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
        return _measured(training, version, client_ids[: min(cohort, COHORT)], count, threads, clock)
    if name == "ray":
        return Choice(OverRay(training, workers=workers, address=address))
    if name == "sequential":
        return Choice(Sequential(training, threads=threads))
    if name == "batched":
        try:
            return Choice(_batched(training, count, threads))
        except CannotBatch as error:
            return Choice(_unbatched(training, count, threads), reasons=(_reason(error),))
    return Choice(Processes(training, workers=count, threads=threads))


def _unbatched(training: Training, workers: int, threads: int) -> Engine:
    if workers == 1:
        return Sequential(training, threads=threads)
    return Processes(training, workers=workers, threads=threads)


def _batched(training: Training, workers: int, threads: int) -> Engine:
    if workers == 1:
        return Batched(training, threads=threads)
    return Processes(training, workers=workers, batched=True, threads=threads)


def _measured(
    training: Training,
    version: Arrays,
    client_ids: Sequence[str],
    workers: int,
    threads: int,
    clock: Callable[[], float],
) -> Choice:
    """The one that will be fastest in a run; the others are closed.

    They take turns, so that a busy moment of the machine falls on all.
    """
    numbers = sorted({1, workers})
    engines = [_unbatched(training, number, threads) for number in numbers]
    reasons: tuple[str, ...] = ()
    try:
        at_once = 1
        try:
            products, at_once = _products(training, numbers, threads)
            engines += products
        except CannotBatch as error:
            reasons = (_reason(error),)
        jobs = _jobs(engines[0], version, client_ids, clock, together=at_once * workers)
        reasons += _leave_out(engines, version, jobs, clock)
        best = dict.fromkeys(engines, 0.0)
        for _ in range(PASSES):
            for engine in engines:
                best[engine] = max(best[engine], _speed(engine, version, jobs, clock))
    except BaseException:
        _close(engines)
        raise
    ranking = sorted(best, key=lambda engine: -best[engine])
    chosen = max(ranking, key=lambda engine: best[engine] * (BESIDE if isinstance(engine, Processes) else 1.0))
    _close([engine for engine in ranking if engine is not chosen])
    return Choice(chosen, tuple(Figure(engine.name, best[engine]) for engine in ranking), reasons)


def _products(training: Training, numbers: Sequence[int], threads: int) -> tuple[list[Engine], int]:
    """Batched, in each of these numbers of processes, and the clients of a product.

    Raises:
        CannotBatch: also when it would be a product of one, but one by hand, which is faster also for one.
    """
    tried = Batched(training, threads=threads)
    if tried.at_once == 1 and tried.kind != "by hand":
        raise CannotBatch("the weights of one client fill the cache")
    return [_batched(training, number, threads) for number in numbers], tried.at_once


def _leave_out(
    engines: list[Engine], version: Arrays, jobs: Sequence[Job], clock: Callable[[], float]
) -> tuple[str, ...]:
    """A first pass, which starts workers; the engines that fail where the first one does not go, with their reasons."""
    reasons = []
    for engine in list(engines):
        try:
            _speed(engine, version, jobs, clock)
        except (ClientFailed, WorkerDied) as error:
            if engine is engines[0]:
                raise
            engine.close()
            engines.remove(engine)
            reasons.append(f"not {engine.name}: {str(error).strip().splitlines()[-1]}")
    return tuple(reasons)


def _close(engines: Sequence[Engine]) -> None:
    for engine in engines:
        engine.close()


def _jobs(
    engine: Engine, version: Arrays, client_ids: Sequence[str], clock: Callable[[], float], *, together: int
) -> list[Job]:
    """As many clients as a pass has time for, and a multiple of those that all workers train `together`: with a single
    product, or with three, two workers would seem to be slower than they are in a round. Where these are more than
    there is time for, only so many of their steps."""
    every = [Job(client_id, seed=number) for number, client_id in enumerate(client_ids)]
    one = replace(every[0], steps=1)
    _speed(engine, version, [one], clock)  # what is only slow at first is no measure
    step_s, requested = _seconds_of_a_step(engine, version, one, clock)
    if step_s * requested <= PASS_S:  # a client is more than its steps: of a single one all of that would be counted
        step_s, _ = _seconds_of_a_step(engine, version, replace(one, steps=requested), clock)
    fewest = max(FEWEST, min(together, len(every)))
    steps = min(requested, max(1, int(PASS_S / (step_s * fewest))))
    count = max(fewest, int(PASS_S / (step_s * steps)))
    count += -count % together
    return [replace(job, steps=steps) for job in every[:count]]


def _seconds_of_a_step(engine: Engine, version: Arrays, job: Job, clock: Callable[[], float]) -> tuple[float, int]:
    """And how many steps the whole of the client's training has."""
    began = clock()
    (trained,) = engine.train(version, [job])
    seconds, steps = max(clock() - began, 1e-9), job.steps or 1
    return seconds / steps, steps if isinstance(trained, Failed) else round(steps / trained.work)


def _speed(engine: Engine, version: Arrays, jobs: Sequence[Job], clock: Callable[[], float]) -> float:
    """Clients per second; of one that was stopped early, the part that it did."""
    began, work = clock(), 0.0
    for result in engine.train(version, jobs):
        work += 1.0 if isinstance(result, Failed) else result.work
    return work / max(clock() - began, 1e-9)


def _reason(error: CannotBatch) -> str:
    return f"not batched: {error}"
