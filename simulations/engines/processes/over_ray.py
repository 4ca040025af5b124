"""The engine of several machines: Ray's actors, each with a sequential or a batched trainer.

A version is put into Ray's object store once for each cohort; the results of a window come back as one piece of memory.
Without an address, a Ray on this machine is started, and ended with the engine.
"""

import logging
import os
import pickle
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atoll.ground.printable import count_of
from atoll.simulations.engines.engine import ClientFailed, Failed, Job, Trained, Training
from atoll.simulations.engines.measuring import Measurer, windows_of
from atoll.simulations.engines.one_process import on_device
from atoll.simulations.engines.processes.placement import share_of_gpu
from atoll.simulations.engines.processes.processes import WorkerDied
from atoll.simulations.engines.processes.user_files import Source, let_import, sources
from atoll.simulations.engines.processes.worker import Plan, Written, plan_of
from atoll.simulations.engines.rows import Form, Rows
from atoll.task.arrays import Arrays, check_like
from atoll.task.metrics import Statistics

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Longest wait for an actor while there is none [s]."""

STARTS = 3
"""Attempts to start Ray on this machine, because sometimes one of its processes dies at once, even twice in a row."""

CONNECT_TIMEOUT_S = 5.0

AHEAD = 2
"""Maximum number of windows in an actor's queue."""


DEATHS_MAX = 3
"""Deaths of actors over one window after which the window is at fault, for example because it needs too much memory."""


class RayMissing(RuntimeError):
    """Error: Ray is not installed, no cluster is at the given address, or it has fewer processors than workers."""


class OverRay:
    """Engine of Ray's actors with one processor each, and a share of the cluster's GPUs if they compute there.

    An actor that dies, alone or with its node, loses nothing: its windows are computed again by others, with the same
    bits, and a new actor takes its place as soon as the cluster has a processor for it.

    Args:
        training: the settings of all clients' training; the task is pickled, together with its file and the user's
            files that it imports.
        workers: the number of actors; None: one for each processor of the cluster.
        address: the address of a running cluster; None: start one on this machine.
        batched: True if each actor trains many clients as one group.
        at_once: the number of clients in a group; None: as many as fit into the cache.

    Raises:
        RayMissing: Ray is not installed (the message says how), no cluster answers at `address`, or it is too small.
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
        try:
            count, share = _divided(self._ray.cluster_resources(), workers, needs_gpu=training.device != "cpu")
        except RayMissing:
            self._shut_down()
            raise
        self._options = {"num_cpus": 1, **({"num_gpus": share} if share else {})}
        self._made_of = sources(), self._ray.put(self._ray.cloudpickle.dumps(plan)), self._form
        self._actors = [self._new_actor() for _ in range(count)]
        self._num_versions = 0
        kind = f"batched (k={plan.at_once}), " if plan.at_once else ""
        self.name = on_device(f"{kind}ray with {count_of(count, 'worker')}", training)

    def train(self, version: Arrays, jobs: Sequence[Job]) -> Iterator[Trained | Failed]:
        """Train the clients, as `Engine.train`."""
        check_like(version, self._form.update)
        size = self._planner.window(len(jobs))
        windows = [list(jobs[first : first + size]) for first in range(0, len(jobs), size)]
        for window, (memory, results) in zip(windows, self._collected("train", version, windows), strict=True):
            yield from _read(results, Rows(self._form, len(window), memory))

    def evaluate(self, version: Arrays, jobs: Sequence[Job]) -> list[Statistics | str]:
        """Evaluate the clients, as `Engine.evaluate`."""
        windows = [list(window) for window in windows_of(jobs)]
        return [found for sums in self._collected("measure", version, windows) for found in sums]

    def close(self) -> None:
        """End the actors, and Ray if this engine started it."""
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._actors = []
        self._shut_down()

    def _shut_down(self) -> None:
        if self._is_ours:
            self._ray.shutdown()
            self._is_ours = False

    def _new_actor(self) -> "_Place":
        handle = self._ray.remote(**self._options)(_Actor).remote(*self._made_of)
        return _Place(handle, handle.ready.remote())

    def _collected(self, work: str, version: Arrays, windows: Sequence[list[Job]]) -> Iterator[Any]:
        """Yield the result of each window in their order; windows of dead actors are computed again.

        Args:
            work: the method of the actors.
            version: the version that the clients of all windows train from or measure.
            windows: the jobs.
        """
        self._num_versions += 1
        stored, number = self._ray.put(version), windows[0][0].version if windows else 0
        waiting, deaths = deque(range(len(windows))), [0] * len(windows)
        given: dict[int, tuple[_Place, Any]] = {}
        for next_one in range(len(windows)):
            while True:
                while waiting and len(given) < AHEAD * len(self._actors):
                    place = self._idlest(given.values())
                    window = waiting.popleft()
                    method = getattr(place.handle, work)
                    given[window] = place, method.remote(self._num_versions, number, stored, windows[window])
                place, future = given.pop(next_one)
                try:
                    found = self._get(future)
                    break
                except _Lost as lost:
                    deaths[next_one] += 1
                    if deaths[next_one] >= DEATHS_MAX:
                        names = ", ".join(job.client_id for job in windows[next_one][:5])
                        what = f"{count_of(DEATHS_MAX, 'actor')} of Ray have died with the same clients ({names})"
                        raise WorkerDied(f"{what}: {lost}") from lost
                    self._replace(place)
                    waiting.appendleft(next_one)
            yield found

    def _replace(self, place: "_Place") -> None:
        """Replace a dead actor by a new one, unless that is done; it starts when a processor is free."""
        if place in self._actors:
            logger.warning("an actor of Ray has died, alone or with its node: its clients are computed again")
            self._actors[self._actors.index(place)] = self._new_actor()

    def _idlest(self, given: "Collection[tuple[_Place, Any]]") -> "_Place":
        """Return the started actor with the shortest queue; wait for one if none has started."""
        futures = [future for _, future in given]
        waiting = set(self._ray.wait(futures, num_returns=len(futures), timeout=0)[1]) if futures else set()
        load = dict.fromkeys(self._started(), 0)
        for place, future in given:
            if place in load:
                load[place] += future in waiting
        return min(load, key=lambda place: load[place])

    def _started(self) -> "list[_Place]":
        """Return the actors that have started, in their order; wait until there is at least one.

        Raises:
            WorkerDied: no actor has started after `START_TIMEOUT_S`.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            starting = {place.ready: place for place in self._actors if not place.is_ready}
            none_yet = len(starting) == len(self._actors)
            timeout = max(0.0, deadline - time.monotonic()) if none_yet else 0.0
            ready = self._ray.wait([*starting], num_returns=1, timeout=timeout)[0] if starting else []
            for future in ready:
                try:
                    self._get(future)
                    starting[future].is_ready = True
                except _Lost:
                    self._replace(starting[future])
            if started := [place for place in self._actors if place.is_ready]:
                return started
            if time.monotonic() >= deadline:
                raise WorkerDied(self._why_none())

    def _why_none(self) -> str:
        free, total = (int(of().get("CPU", 0)) for of in (self._ray.available_resources, self._ray.cluster_resources))
        return (
            f"of {count_of(len(self._actors), 'actor')} of Ray, none was ready after {START_TIMEOUT_S:g} s; "
            f"free are {free} of the cluster's {count_of(total, 'processor')}"
        )

    def _get(self, future: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(future)
        except errors.RayTaskError as error:
            raise ClientFailed(str(error.cause)) from error
        except (errors.RayActorError, errors.ObjectLostError, errors.WorkerCrashedError, errors.NodeDiedError) as error:
            raise _Lost(" ".join(str(error).split())) from error


class _Lost(Exception):
    """Error: a result is lost, because its actor has died."""


@dataclass(slots=True, eq=False)
class _Place:
    """Slot of an actor in the engine."""

    handle: Any
    ready: Any
    """Future of the actor's start."""
    is_ready: bool = False


def _divided(resources: Mapping[str, float], workers: int | None, *, needs_gpu: bool) -> tuple[int, float]:
    """Return the number of actors, and the share of a GPU of each; 0: they use none.

    Raises:
        RayMissing: the cluster has fewer processors than workers, or no GPU.
    """
    processors, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    count = workers or max(1, processors)
    if count > processors:
        what = f"simulation.workers: got {count}; allowed: at most {processors}"
        raise RayMissing(f"{what}, the processors of the Ray cluster, of which each worker has one")
    if needs_gpu and not gpus:
        raise RayMissing("simulation.device: got 'cuda'; allowed here: \"cpu\", because the Ray cluster has no GPU")
    return count, share_of_gpu(count, gpus) if needs_gpu else 0.0


class _Actor:
    """A trainer in a process of Ray; the plan is unpickled after the imports of its task are available."""

    def __init__(self, files: Mapping[str, Source], pickled_plan: bytes, form: Form) -> None:
        let_import(files)
        self._plan: Plan = pickle.loads(pickled_plan)
        self._trainer, self._form = self._plan.trainer(), form
        self._measurer: Measurer | None = None
        self._trained = self._measured = 0
        """Numbers of the versions that were last trained from, and measured."""

    def ready(self) -> None:
        """Do nothing: the answer shows that the actor has started."""

    def train(
        self, count: int, number: int, version: Arrays, jobs: Sequence[Job]
    ) -> tuple[np.ndarray[Any, Any], list[Written | Failed]]:
        if self._trained != count:  # from another version than the last window
            self._trainer.begin({name: array.copy() for name, array in version.items()}, number)
            self._trained = count
        rows = Rows(self._form, len(jobs))
        results = [
            result if isinstance(result, Failed) else Written.of(result, rows, index)
            for index, result in enumerate(self._trainer.train(jobs, rows))
        ]
        return rows.memory, results

    def measure(self, count: int, number: int, version: Arrays, jobs: Sequence[Job]) -> list[Statistics | str]:
        self._measurer = measurer = self._measurer or self._plan.measurer()
        if self._measured != count:
            measurer.begin({name: array.copy() for name, array in version.items()}, number)
            self._measured = count
        return measurer.measure(jobs)


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
    except Exception as error:  # any error: Ray raises many kinds
        ray.shutdown()
        reason = " ".join(str(error).split())
        raise RayMissing(f"simulation.ray_address: no Ray answers on {address!r}: {reason}") from error


def _start(ray: Any, options: Mapping[str, Any]) -> None:
    for starts_left in reversed(range(STARTS)):
        try:
            ray.init(**options)
            return
        except Exception as error:  # any error: Ray raises it if its process does not start in time
            ray.shutdown()
            if not starts_left:
                raise WorkerDied(f"no Ray started on this machine in {STARTS} attempts: {error}") from error
