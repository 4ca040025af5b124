"""The slot for the one job that an agent's worker does at a time."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from atoll.client.session.events import EvaluationRequest, Event, Key, ModelRequest, Request, StatisticsRequest
from atoll.client.work.jobs import Jobs
from atoll.client.work.runner import Runner
from atoll.protocol.log_fields import about


@dataclass(slots=True, eq=False)
class _Running:
    """The job in the slot."""

    key: Key
    is_download: bool
    task: "asyncio.Task[Event]"
    is_dropped: bool = False
    """Whether the job's event is dropped: the session no longer waits for it."""
    begun: float | None = None
    """Instant at which its work began, on the loop's clock; None: it waits for its predecessor."""


class JobSlot:
    """Slot that starts and ends jobs as the session's effects say, and returns their events to the session.

    A job starts when its predecessor has returned, however late: two never share the worker.

    Args:
        jobs: the download, the training, the evaluation and the statistics.
        runner: does the work of these jobs.
        spawn: runs a coroutine whose failure ends the agent.
        on_event: receives the event of a job, on the event loop.
    """

    def __init__(
        self,
        jobs: Jobs,
        runner: Runner,
        *,
        spawn: Callable[[Coroutine[Any, Any, Event]], "asyncio.Task[Event]"],
        on_event: Callable[[Event], None],
    ) -> None:
        self._jobs, self._runner, self._spawn, self._on_event = jobs, runner, spawn, on_event
        self._running: _Running | None = None
        self._newest_task: asyncio.Task[Event] | None = None
        self.listeners: list[Callable[[Key, Event, float], None]] = []
        """Called with the key, the event and the duration [s] of each work that has returned, downloads excepted."""

    def begin_download(self, request: ModelRequest) -> None:
        """Download the version that a request names."""
        self._begin(request.key, lambda: self._jobs.download(request), is_download=True)

    def begin_work(self, request: Request, budget: float) -> None:
        """Train, answer a message, evaluate or make statistics within `budget` seconds."""
        if isinstance(request, EvaluationRequest):
            self._begin(request.key, lambda: self._jobs.evaluate(request, budget), is_download=False)
        elif isinstance(request, StatisticsRequest):
            self._begin(request.key, lambda: self._jobs.make_statistics(request, budget), is_download=False)
        else:
            work = self._jobs.answer if request.message else self._jobs.train
            self._begin(request.key, lambda: work(request, budget), is_download=False)

    def extend(self, budget: float) -> None:
        """Set the deadline of the running work to `budget` seconds from now."""
        self._runner.extend(budget)

    def stop(self, key: Key) -> None:
        """Cancel a download, or ask the worker to stop early; the job's event then has its partial result."""
        running = self._running
        if running is None or running.key != key:
            return
        if running.is_download:
            self.drop()
        else:
            self._runner.stop()

    def kill(self, key: Key) -> None:
        """End a job at once, and drop its event."""
        if self._running is not None and self._running.key == key:
            self._runner.kill()
            self.drop()

    def drop(self) -> None:
        """Cancel the running job, if there is one, and drop its event."""
        if self._running is not None:
            self._running.is_dropped = True
            self._running.task.cancel()

    def _begin(self, key: Key, work: Callable[[], Coroutine[Any, Any, Event]], *, is_download: bool) -> None:
        predecessor = self._newest_task

        async def run() -> Event:
            if predecessor is not None and not predecessor.done():
                await asyncio.wait({predecessor})
            running.begun = asyncio.get_running_loop().time()
            with about(run=key[1], round=key[2] if key[0] == "round" else None):
                return await work()

        task = self._newest_task = self._spawn(run())
        running = self._running = _Running(key, is_download, task)
        task.add_done_callback(lambda task: self._ended(running, task))

    def _ended(self, running: _Running, task: "asyncio.Task[Event]") -> None:
        if self._running is running:
            self._running = None
        if running.is_dropped or task.cancelled() or task.exception():
            return
        if running.begun is not None and not running.is_download:
            for listener in self.listeners:
                listener(running.key, task.result(), task.get_loop().time() - running.begun)
        self._on_event(task.result())
