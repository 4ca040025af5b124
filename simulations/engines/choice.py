"""The choice of an engine: by its name, or by a short measurement of all engines on the task itself.

    sequential   one process, one client after another
    processes    several processes
    batched      many clients as one group, in one process or in several
    ray          like processes, on the machines of a Ray cluster

The measurement trains the same few clients with each engine, for the number of steps that fit into a fraction of a
second. Processor time decides between the two engines of one process, because other work on the machine does not change
it; real time decides between one process and several.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.simulations.engines.batched.batched import Batched
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.engine import ClientFailed, Engine, Failed, Job, Training
from atoll.simulations.engines.processes.over_ray import OverRay
from atoll.simulations.engines.processes.processes import Processes, WorkerDied
from atoll.simulations.engines.sequential import Sequential
from atoll.task.arrays import Arrays
from atoll.task.errors import TaskBroken
from atoll.training.local.algorithms import CONCATENATE

NAMES = ("auto", "sequential", "processes", "batched", "ray")

COHORT = 100
"""Maximum number of measured clients; large groups need many."""

FEWEST = 2
"""Minimum number of measured clients."""

PASS_S = 0.1
"""Maximum duration of a pass of the sequential engine over the measured clients [s], except for the minimum number of
clients."""

STEPS = 3
"""Minimum number of steps of each measured client, over which its fixed costs are spread."""

LONG_S = 1.0
"""Maximum duration of a pass that is extended by `STEPS` [s]."""

PASSES = 3
"""Measured passes of each engine after the first one; the fastest counts."""

WORTH_S = 2.0
"""Expected duration of a run in one process [s] from which several are started, and measured: starting takes half a
second."""

SHARE_OF_PROCESSES = 0.75
"""Share of the measured speed of several processes that remains in a run, where the coordinator needs a processor,
too."""

MESSAGES_S = 80e-6
"""Processor seconds per client and round for messages, draw, fold and record, which no engine makes faster: a tiny
model trains in less, and then more processes gain nothing."""


Clocks = tuple[Callable[[], float], Callable[[], float]]
"""The real time, and the processor time [s]."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The processors and machines that an engine may use."""

    workers: int | None = None
    """Processes; None: one for each available processor. One: no other process."""

    threads: int = 1
    """Threads of each operation; more than one may change bits. Ray's actors have one."""

    address: str | None = None
    """Address of a Ray cluster; None: one is started on this machine."""

    devices: tuple[int, ...] = ()
    """GPUs by their numbers, which the processes use in turn; empty: all that torch finds."""

    @property
    def num_workers(self) -> int:
        """The number of processes on this machine."""
        return self.workers or len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Figure:
    """The measured speed of one engine."""

    engine: str

    clients_per_s: float
    """Complete trainings per second; a training that was stopped early counts by the part that was done."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine and the reasons for it."""

    engine: Engine

    figures: tuple[Figure, ...] = ()
    """Figures of all measured engines, fastest first."""

    reasons: tuple[str, ...] = ()
    """Reasons that other engines cannot be used."""

    def __str__(self) -> str:
        measured = ", ".join(f"{each.engine} {each.clients_per_s:.3g}" for each in self.figures)
        speeds = f" (clients/s: {measured}; --engine NAME keeps one)" if measured else ""
        return "\n".join([f"engine: {self.engine.name}{speeds}", *self.reasons])


def choose(
    training: Training,
    version: Arrays,
    client_ids: Sequence[str],
    *,
    name: str = "auto",
    resources: Resources = Resources(),
    cohort: int = COHORT,
    trainings: int | None = None,
    clocks: Clocks = (time.perf_counter, time.process_time),
) -> Choice:
    """Return the engine of a name; if "batched" is impossible, return another one with the reason.

    Args:
        training: the settings of all clients' training.
        version: the version from which the measured clients train.
        client_ids: the clients of the run; the first of them are measured.
        name: one of `NAMES`.
        resources: the processors and machines to use.
        cohort: the number of clients of a round.
        trainings: the number of trainings of the run, if known; None: many.
        clocks: the real time, and the processor time of this process [s].

    Raises:
        ValueError: the name is not one of `NAMES`.
        RayMissing: "ray" is chosen, and Ray is not installed.
        ClientFailed: the task's code failed.
        TaskBroken: the engine shares memory between processes, and the run's updates have a variable number of rows.
    """
    if name not in NAMES:
        raise ValueError(f"engine must be one of {', '.join(NAMES)}, got {name!r}")
    count, threads = resources.num_workers, resources.threads
    if training.algorithm == CONCATENATE:
        return _for_rows(training, name, threads)
    if name == "auto":
        is_alone = threads == 1 and training.device == "cpu"  # otherwise other threads than this one compute, too
        clocks = clocks if is_alone else (clocks[0], clocks[0])
        return _measured(training, version, client_ids[: min(cohort, COHORT)], resources, trainings, clocks)
    if name == "ray":
        return _over_ray(training, resources)
    if name == "sequential":
        return Choice(Sequential(training, threads=threads))
    if name == "batched":
        try:
            return Choice(_batched(training, count, resources))
        except CannotBatch as error:
            return Choice(_unbatched(training, count, resources), reasons=(_reason(error),))
    return Choice(Processes(training, workers=count, threads=threads, devices=resources.devices))


def _for_rows(training: Training, name: str, threads: int) -> Choice:
    if name in ("processes", "ray"):
        why = "it shares memory for tensors of fixed shapes, and rule concatenate has updates with any number of rows"
        raise TaskBroken(f"simulation.engine: got {name!r}: {why}; allowed: auto, sequential")
    reasons = ("not batched: an update has a variable number of rows",) if name == "batched" else ()
    return Choice(Sequential(training, threads=threads), reasons=reasons)


def _over_ray(training: Training, resources: Resources) -> Choice:
    """Return the engine of Ray, whose actors train many clients as one group if they share GPUs."""
    reasons: tuple[str, ...] = ()
    if training.device != "cpu":
        try:
            return Choice(OverRay(training, workers=resources.workers, address=resources.address, batched=True))
        except CannotBatch as error:
            reasons = (_reason(error),)
    return Choice(OverRay(training, workers=resources.workers, address=resources.address), reasons=reasons)


def _unbatched(training: Training, workers: int, resources: Resources) -> Engine:
    if workers == 1:
        return Sequential(training, threads=resources.threads)
    return Processes(training, workers=workers, threads=resources.threads, devices=resources.devices)


def _batched(training: Training, workers: int, resources: Resources) -> Engine:
    if workers == 1:
        return Batched(training, threads=resources.threads)
    threads, devices = resources.threads, resources.devices
    return Processes(training, workers=workers, batched=True, threads=threads, devices=devices)


def _measured(
    training: Training,
    version: Arrays,
    client_ids: Sequence[str],
    resources: Resources,
    trainings: int | None,
    clocks: Clocks,
) -> Choice:
    """Return the engine that will be fastest in a run, and close the others.

    The engines take turns, so that a busy moment of the machine affects all of them. Engines of several processes are
    not measured if one process finishes the run within `WORTH_S`.
    """
    workers, threads = resources.num_workers, resources.threads
    engines: list[Engine] = [_unbatched(training, 1, resources)]
    reasons: tuple[str, ...] = ()
    try:
        at_once = 0
        try:
            batched = Batched(training, threads=threads)
            at_once = batched.at_once
            engines.append(batched)
        except CannotBatch as error:
            reasons = (_reason(error),)
        jobs = _jobs(engines[0], version, client_ids, clocks[1], together=max(1, at_once) * workers)
        reasons += _first_pass(engines, engines, version, jobs, clocks)
        fastest = max(_speed(engine, version, jobs, clocks)[0] for engine in engines)
        if workers > 1 and (trainings is None or trainings > WORTH_S * fastest):
            several = [_unbatched(training, workers, resources)]
            several += [_batched(training, workers, resources)] if at_once else []
            engines += several
            reasons += _first_pass(several, engines, version, jobs, clocks)
        passes = [{engine: _speed(engine, version, jobs, clocks) for engine in engines} for _ in range(PASSES)]
    except BaseException:
        _close(engines)
        raise
    speeds = _speeds({engine: _best(one[engine] for one in passes) for engine in engines})
    ranking = sorted(engines, key=lambda engine: -speeds[engine])
    shares = {engine: SHARE_OF_PROCESSES if isinstance(engine, Processes) else 1.0 for engine in ranking}
    chosen = max(ranking, key=lambda engine: shares[engine] / (1 / speeds[engine] + MESSAGES_S))
    _close([engine for engine in ranking if engine is not chosen])
    return Choice(chosen, tuple(Figure(engine.name, speeds[engine]) for engine in ranking), reasons)


def _best(passes: Iterable[tuple[float, float]]) -> tuple[float, float]:
    real, processor = map(max, zip(*passes, strict=True))
    return real, processor


def _speeds(best: Mapping[Engine, tuple[float, float]]) -> dict[Engine, float]:
    """Return the speed of each engine in real time; engines of one process are compared by processor time."""
    alone = [speeds for engine, speeds in best.items() if not isinstance(engine, Processes)]
    real, processor = _best(alone)
    return {e: found[0] if isinstance(e, Processes) else real * found[1] / processor for e, found in best.items()}


def _first_pass(
    new: Sequence[Engine],
    engines: list[Engine],
    version: Arrays,
    jobs: Sequence[Job],
    clocks: Clocks,
) -> tuple[str, ...]:
    """Make a first pass of the new engines, which starts their workers; remove those that fail, and return why.

    Raises:
        ClientFailed: the first engine fails, so the task's code is at fault.
    """
    reasons = []
    for engine in list(new):
        try:
            _speed(engine, version, jobs, clocks)
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
    """Return the jobs of a pass: as many clients as time allows, rounded up to a multiple of `together`.

    `together` clients occupy all workers: with one group, or with three, two workers would seem slower than in a
    round. If even the fewest clients take too long, their jobs have fewer steps.
    """
    every = [Job(client_id, seed=number) for number, client_id in enumerate(client_ids)]
    one = replace(every[0], steps=1)
    _seconds_of_a_step(engine, version, one, clock)  # excludes one-time costs
    step_s, requested = _seconds_of_a_step(engine, version, one, clock)
    if step_s * requested <= PASS_S:  # spreads the fixed costs of a client over all of its steps
        step_s, _ = _seconds_of_a_step(engine, version, replace(one, steps=requested), clock)
    fewest = max(FEWEST, min(together, len(every)))
    every_s = step_s * fewest
    steps = min(requested, max(1, int(PASS_S / every_s), min(STEPS, int(LONG_S / every_s))))
    count = max(fewest, int(PASS_S / (step_s * steps)))
    count += -count % together
    return [replace(job, steps=steps) for job in every[:count]]


def _seconds_of_a_step(engine: Engine, version: Arrays, job: Job, clock: Callable[[], float]) -> tuple[float, int]:
    """Measure the seconds of a step; return them, and the number of steps of the client's whole training."""
    began = clock()
    (trained,) = engine.train(version, [job])
    seconds, steps = max(clock() - began, 1e-9), job.steps or 1
    return seconds / steps, steps if isinstance(trained, Failed) else round(steps / trained.work)


def _speed(engine: Engine, version: Arrays, jobs: Sequence[Job], clocks: Clocks) -> tuple[float, float]:
    """Measure an engine's speed in clients per second, like `Figure.clients_per_s`, by each of the clocks."""
    began, work = [clock() for clock in clocks], 0.0
    for result in engine.train(version, jobs):
        work += 1.0 if isinstance(result, Failed) else result.work
    real, processor = (work / max(clock() - begin, 1e-9) for clock, begin in zip(clocks, began, strict=True))
    return real, processor


def _reason(error: CannotBatch) -> str:
    return f"not batched: {error}"
