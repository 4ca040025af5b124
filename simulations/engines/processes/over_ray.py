"""The engine of several machines: Ray's actors, each with a sequential or a batched trainer.

A version is put into Ray's object store once for each cohort; the results of a window come back as one piece of memory.
Without an address, a Ray on this machine is started, and ended with the engine.
"""

import logging
import os
import pickle
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from atoll.aggregation.printable import count_of
from atoll.parallel.task.arrays import Arrays, check_like
from atoll.simulations.engines.engine import ClientFailed, Failed, Job, Trained, Training
from atoll.simulations.engines.one_process import on_device
from atoll.simulations.engines.processes.processes import WorkerDied
from atoll.simulations.engines.processes.user_files import Source, let_import, sources
from atoll.simulations.engines.processes.worker import Plan, Written, plan_of
from atoll.simulations.engines.rows import Form, Rows

START_TIMEOUT_S = 120.0

STARTS = 3
"""Attempts to start a Ray on this machine, because at times one of its processes dies at once, once twice in a row."""

CONNECT_TIMEOUT_S = 5.0

AHEAD = 2
"""Maximum number of windows in an actor's queue."""


class RayMissing(RuntimeError):
    """Ray is not installed, or there is no cluster at the given address."""


class OverRay:
    """An engine of Ray's actors with one processor each.

    Args:
        training: the settings of all clients' training; the task is pickled, together with its file and the user's own
            files that it imports.
        workers: the number of actors; None: one for each processor of the cluster.
        address: the address of a running cluster; None: start one on this machine.
        batched: True if each actor trains many clients in one product.
        at_once: the number of clients in a product; None: as many as fit into the cache.

    Raises:
        RayMissing: Ray is not installed (the message says how), or no cluster answers at `address`.
        WorkerDied: no Ray started on this machine.
        CannotBatch: `batched` is set, and the task cannot be batched.
    """

    def __init__(
        self,
        training: Training,
        *,
        workers: int | None = None,
        address: str | None = None,
        batched: bool = False,
        at_once: int | None = None,
    ) -> None:
        self._ray = _ray()
        plan, self._planner = plan_of(training, batched, at_once, threads=1)
        self._form = self._planner.form
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            _begin(self._ray, address, workers)
        count = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        gpus = {"num_gpus": 1} if training.device != "cpu" else {}
        actor = self._ray.remote(num_cpus=1, **gpus)(_Actor)
        files, pickled_plan = sources(), self._ray.put(self._ray.cloudpickle.dumps(plan))
        self._actors = [actor.remote(files, pickled_plan, self._form) for _ in range(count)]
        kind = f"batched (k={plan.at_once}), " if plan.at_once else ""
        self.name = on_device(f"{kind}ray with {count_of(count, 'worker')}", training)

    def train(self, version: Arrays, jobs: Sequence[Job]) -> Iterator[Trained | Failed]:
        """Train the clients, as `Engine.train`."""
        check_like(version, self._form.update)
        window = self._planner.window(len(jobs))
        windows = deque(jobs[first : first + window] for first in range(0, len(jobs), window))
        stored = self._ray.put(version)
        self._wait([actor.begin.remote(stored, jobs[0].version if jobs else 0) for actor in self._actors])
        given: deque[tuple[int, Any, int]] = deque()
        while windows or given:
            while windows and len(given) < AHEAD * len(self._actors):
                actor = self._idlest(given)
                chosen = windows.popleft()
                given.append((actor, self._actors[actor].train.remote(list(chosen)), len(chosen)))
            _, future, count = given.popleft()
            memory, results = self._get(future)
            yield from _read(results, Rows(self._form, count, memory))

    def close(self) -> None:
        """End the actors, and Ray if this engine started it."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._is_ours:
            self._ray.shutdown()
            self._is_ours = False

    def _idlest(self, given: "deque[tuple[int, Any, int]]") -> int:
        """Return the number of the actor with the shortest queue."""
        futures = [future for _, future, _ in given]
        waiting = set(self._ray.wait(futures, num_returns=len(futures), timeout=0)[1]) if futures else set()
        load = [0] * len(self._actors)
        for actor, future, _ in given:
            load[actor] += future in waiting
        return load.index(min(load))

    def _wait(self, begun: Sequence[Any]) -> None:
        """Wait until all actors have started and have the version."""
        ready, missing = self._ray.wait(begun, num_returns=len(begun), timeout=START_TIMEOUT_S)
        if missing:
            free, total = (
                int(of().get("CPU", 0)) for of in (self._ray.available_resources, self._ray.cluster_resources)
            )
            raise WorkerDied(
                f"of {count_of(len(begun), 'actor')} of Ray, {len(missing)} did not get ready "
                f"after {START_TIMEOUT_S:g} s; "
                f"free are {free} of the cluster's {count_of(total, 'processor')}"
            )
        self._get(ready)

    def _get(self, futures: Any) -> Any:
        try:
            return self._ray.get(futures)
        except self._ray.exceptions.RayTaskError as error:
            raise ClientFailed(str(error.cause)) from error
        except self._ray.exceptions.RayActorError as error:
            raise WorkerDied(f"an actor of Ray has died: {error}") from error


class _Actor:
    """A trainer in a process of Ray; the plan is unpickled after the imports of its task are available."""

    def __init__(self, files: Mapping[str, Source], pickled_plan: bytes, form: Form) -> None:
        let_import(files)
        plan: Plan = pickle.loads(pickled_plan)
        self._trainer, self._form = plan.trainer(), form

    def begin(self, version: Arrays, number: int) -> None:
        self._trainer.begin({name: array.copy() for name, array in version.items()}, number)

    def train(self, jobs: Sequence[Job]) -> tuple[np.ndarray[Any, Any], list[Written | Failed]]:
        rows = Rows(self._form, len(jobs))
        results = [
            result if isinstance(result, Failed) else Written.of(result, rows, index)
            for index, result in enumerate(self._trainer.train(jobs, rows))
        ]
        return rows.memory, results


def _read(results: Sequence[Written | Failed], rows: Rows) -> Iterator[Trained | Failed]:
    for index, result in enumerate(results):
        yield result if isinstance(result, Failed) else result.read(rows, index)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise RayMissing("the engine ray needs Ray, which is not installed: pip install 'atoll[sim]'") from None
    return ray


def _begin(ray: Any, address: str | None, workers: int | None) -> None:
    """Connect to a cluster, or start a Ray on this machine."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # otherwise Ray warns of a future change
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    if address is not None:
        _connect(ray, address, quiet)
    else:
        _start(ray, {"num_cpus": workers or len(os.sched_getaffinity(0)), "include_dashboard": False, **quiet})


def _connect(ray: Any, address: str, options: Mapping[str, Any]) -> None:
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and "//" not in host:  # Ray itself would retry for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address=address, **options)
    except Exception as error:  # nothing narrower: Ray raises many kinds
        ray.shutdown()
        reason = " ".join(str(error).split())
        raise RayMissing(f"simulation.ray_address: no Ray answers on {address!r}: {reason}") from error


def _start(ray: Any, options: Mapping[str, Any]) -> None:
    for starts_left in reversed(range(STARTS)):
        try:
            ray.init(**options)
            return
        except Exception as error:  # nothing narrower: Ray raises it if its own process does not start in time
            ray.shutdown()
            if not starts_left:
                raise WorkerDied(f"no Ray started on this machine in {STARTS} attempts: {error}") from error
