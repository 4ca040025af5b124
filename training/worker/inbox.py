"""The requests of a supervisor: queued, or executed at once for the running request."""

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.task.deadline import Deadline


@dataclass(frozen=True, slots=True)
class Job:
    """A request with its deadline, whose time runs from the reading of the request."""

    request: dict[str, Any]
    deadline: Deadline
    began: float


class Inbox:
    """The queue of requests, which a reading thread delivers, and the deadline of the running request.

    Args:
        set_alarm: arms an alarm that kills this process after a number of seconds; infinite: disarms it.
    """

    def __init__(self, set_alarm: Callable[[float], None] = lambda _: None) -> None:
        self._set_alarm = set_alarm
        self._lock = threading.Lock()
        self._job: Job | None = None
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def finished(self, job: Job) -> None:
        """Disarm the alarm, unless the next job has armed it already."""
        with self._lock:
            if self._job is job:
                self._job = None
                self._set_alarm(math.inf)

    def receive(self, request: dict[str, Any]) -> None:
        """Queue a request; obey `stop` and `extend` at once."""
        with self._lock:
            if request["op"] not in ("stop", "extend"):
                now = time.monotonic()
                self._job = Job(request, Deadline(time.monotonic), now)
                self._set_deadline(request.get("budget_s"))
                self.jobs.put(self._job)
            elif self._job is None or request.get("round_id") not in (None, self._job.request.get("round_id")):
                pass  # too late: its request has ended
            elif request["op"] == "stop":
                self._job.deadline.stop()
            else:
                self._set_deadline(request["budget_s"])

    def _set_deadline(self, budget_s: float | None) -> None:
        assert self._job is not None
        if budget_s is None or math.isinf(budget_s):
            self._job.deadline.move(math.inf)
            self._set_alarm(math.inf)
            return
        self._job.deadline.move(time.monotonic() + budget_s)
        self._set_alarm(budget_s + self._job.request.get("lease_s", math.inf))
