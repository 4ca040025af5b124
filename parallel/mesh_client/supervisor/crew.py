"""The supervisor of a crew (the ranks of one client): blocking calls, for threads, as of a `Worker`. Without torch.

A crew heals. When ranks die or hang, their launcher starts all of them again; rank 0 dials, and the running request is
sent once more with what is left of its time, to continue from the newest in-round checkpoint. A caller sees a slower
crew. Other ranks notice a rank that hangs in a collective; pings tell that rank 0 hangs elsewhere, or its machine does.

    RanksLost       the ranks were lost more than `max_restarts` times in one request, or `kill` was called
    WorkerHung      they did not answer in time; they have been killed
    WorkerError     the task's code failed: on all ranks, or twice in the same way at the same step
"""

import hashlib
import json
import logging
import math
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from atoll.ground.printable import count_of
from atoll.parallel.launch.line import Json, Line, Listener
from atoll.parallel.launch.rank_fault import RankFault, cause, take_faults
from atoll.parallel.mesh_client.supervisor.interval import NEVER, Interval
from atoll.parallel.mesh_client.supervisor.terms import Terms
from atoll.training.base.kept_lines import BASES
from atoll.training.worker.process import LOAD_TIMEOUT_S, RunTerms, WorkerCrashed, WorkerError, WorkerHung

logger = logging.getLogger(__name__)

FINAL = ("task_broken", "task_mismatch", "not_finite", "out_of_time", "disk_full")
"""Kinds of errors that a restart repeats."""

WAIT_S = 3600.0
PING_S = 5.0
"""Seconds between two pings of rank 0 while it owes an answer."""

ROUND = "round"
"""The folder of the in-round checkpoint, in the crew's folder."""


class Ranks(Protocol):
    """The process that has started the ranks, as `launch.launcher.Launcher`."""

    @property
    def pid(self) -> int | None:
        """The process id of the launcher; None: another launcher has started the ranks."""
        ...

    @property
    def exit_code(self) -> int | None:
        """The exit code of the launcher; None: it lives."""
        ...

    def kill(self) -> None:
        """Kill the ranks, if this process has started them."""
        ...


Start = Callable[[Callable[[int], None]], Ranks]
"""Starts the ranks; takes a function to be called with the exit code when they have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewTerms:
    """The settings of a crew (a client's ranks): shared folder, parallel plan, restarts, checkpoints."""

    folder: Path
    """Folder that the agent and all ranks share."""
    ranks: Terms
    plan: Json
    """The fields of `Plan`; with "auto" as the mesh, only those that are set."""
    num_ranks: int
    listen: str = ""
    """`HOST:PORT` for ranks on other machines; empty: this machine."""
    max_restarts: int = 3
    """Losses of ranks in one request, before it fails."""
    checkpoint_every: Interval = NEVER
    """Time between two in-round checkpoints."""
    load_timeout_s: float = LOAD_TIMEOUT_S


class RanksLost(WorkerCrashed):
    """Ranks died or hung more often than they may be restarted, or were killed."""

    def __init__(self, text: str) -> None:
        super().__init__(1, "")
        self.args = (text,)


class _Lost(Exception):
    """The ranks exited or their control line closed."""


@dataclass(frozen=True, slots=True)
class _Event:
    """One of: a new `line` with its hello, an `answer` on a line, a `lost` line, `ended` ranks with their exit code."""

    kind: str
    source: object = None
    content: Any = None


@dataclass(slots=True)
class _Losses:
    """The losses of ranks during one request."""

    number: int = 0
    fault: RankFault | None = None


class Crew:
    """One task of one site on a mesh of ranks, which are started on demand.

    Any thread may use any method at any time; calls wait for each other.

    Args:
        task: `module:attribute` or `path/to/file.py:attribute`.
        terms: the settings.
        start: starts the ranks.
        site: the owner of the data.
        settings: the site's settings for the task.
        noise: the key of the noise that no request has a key for; empty: there is no secret here.
    """

    def __init__(
        self,
        task: str,
        terms: CrewTerms,
        start: Start,
        *,
        site: str,
        settings: Mapping[str, Any] | None = None,
        noise: bytes = b"",
    ) -> None:
        self._task, self._terms, self._start = task, terms, start
        self._load: Json = {
            **{"task": task, "site": site, "settings": dict(settings or {}), "noise": noise.hex(), "plan": terms.plan},
            **asdict(RunTerms()),
            "device": terms.ranks.device,
            "bases": str(terms.ranks.log_of(0).absolute().with_name(BASES)),
        }
        self._calls = threading.Lock()
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._listener: Listener | None = None
        self._ranks: Ranks | None = None
        self._launches = 0
        self._line: Line | None = None
        self._until = self._slack_s = math.inf
        self._is_killed = self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the launcher; None: this process has started none, or it has ended."""
        ranks = self._ranks
        return ranks.pid if ranks is not None and ranks.exit_code is None else None

    def start(self) -> None:
        """Start the ranks and load the task, unless they live already. Raises as `call`."""
        with self._calls:
            self._is_killed = False
            self._healed(_Losses(), self._ready)

    def call(self, op: str, timeout_s: float, **args: Any) -> Json:
        """Send a request and wait for its answer; `mesh_client/main` lists both. Start the ranks if needed.

        Args:
            op: the request's name.
            timeout_s: the wait for the answer [s]; `tell("extend", ...)` prolongs it. A start is timed separately.
            args: the request's fields; paths as str.

        Raises:
            RanksLost, WorkerHung, WorkerError: as above.
            RuntimeError: the crew is closed.
        """
        with self._calls:
            return self._call(op, timeout_s, args)

    def call_at_rest(self, op: str, timeout_s: float, **args: Any) -> Json | None:
        """Send a request as `call` does, unless the ranks are not loaded or another call has them; then return None.

        Raises:
            RanksLost, WorkerHung, WorkerError, RuntimeError: as `call`.
        """
        if not self._calls.acquire(blocking=False):
            return None
        try:
            return None if self._line is None else self._call(op, timeout_s, args)
        finally:
            self._calls.release()

    def _call(self, op: str, timeout_s: float, args: Json) -> Json:
        self._is_killed = False
        losses, began = _Losses(), time.monotonic()
        self._until = began + timeout_s
        self._slack_s = timeout_s - args["budget_s"] if "budget_s" in args else math.inf
        request = self._with_checkpoint({"op": op, **args}) if op == "train" else {"op": op, **args}

        def ask() -> Json:
            self._ready()
            return self._asked(request | self._left(), lambda: self._until)

        answer = self._healed(losses, ask)
        return answer | {"seconds": time.monotonic() - began, "restarts": losses.number}

    def tell(self, op: str, **args: Any) -> None:
        """Send `stop` or `extend` to the running request, from another thread; without one it has no effect."""
        if op == "extend":
            self._until = max(self._until, time.monotonic() + args["budget_s"] + self._slack_s)
        line = self._line
        if line is not None:
            line.tell({"op": op, **args})

    def kill(self) -> None:
        """Kill the ranks; a call that waits for them raises RanksLost at once."""
        self._is_killed = True
        self._end_ranks()
        self._events.put(_Event("killed"))

    def close(self) -> None:
        """Kill the ranks and start none again."""
        self._is_closed = True
        self.kill()
        if self._listener is not None:
            self._listener.close()

    def _end_ranks(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
        if self._ranks is not None:
            self._ranks.kill()

    # ------------------------------------------------------------ healing

    def _healed(self, losses: _Losses, work: Callable[[], Json]) -> Json:
        """Call a function and return its result; repeat it after each loss of ranks, up to `max_restarts` times."""
        while True:
            try:
                return work()
            except _Lost as lost:
                self._judge(losses, str(lost))
            except WorkerHung:
                self._end_ranks()
                raise

    def _judge(self, losses: _Losses, how: str) -> None:
        """Raise the error for lost ranks; return if a restart is allowed."""
        if self._is_closed:
            raise RuntimeError("the crew is closed")
        if self._is_killed:
            raise RanksLost("the ranks were killed")
        losses.number += 1
        faults = take_faults(self._terms.folder)
        found = cause(faults)
        if found is not None and (found.kind in FINAL or found.repeats(losses.fault)):
            self._end_ranks()
            raise WorkerError(found.kind, f"rank {found.rank}: {found.detail}")
        losses.fault = found
        first = found or next(iter(faults), None)
        said = how if first is None else f"rank {first.rank} failed at step {first.step}: {first.detail}"
        if losses.number > self._terms.max_restarts:
            self._end_ranks()
            lost = count_of(losses.number, "time")
            raise RanksLost(f"the ranks were lost {lost}, and may start again {self._terms.max_restarts}: {said}")
        logger.warning("the ranks start again (%d of %d): %s", losses.number, self._terms.max_restarts, said)

    def _with_checkpoint(self, request: Json) -> Json:
        Path(request["out"]).mkdir(parents=True, exist_ok=True)
        every = self._terms.checkpoint_every
        if every.is_never:
            return request
        folder = self._terms.folder / ROUND
        prepare_folder(folder, request)
        intervals = {"checkpoint_every": every.steps, "checkpoint_every_s": every.seconds}
        return request | {"checkpoint": str(folder.absolute()), **intervals}

    def _left(self) -> Json:
        """Return the fields of the running request that change when it is sent again: the time left."""
        if not math.isfinite(self._slack_s):
            return {}
        return {"budget_s": max(self._until - self._slack_s - time.monotonic(), 0.001)}

    # ------------------------------------------------------------ ranks and line

    def _ready(self) -> Json:
        """Start the ranks unless they live, wait for rank 0, and have them load the task.

        Raises:
            _Lost, WorkerHung, WorkerError: the ranks could not load it.
        """
        if self._is_closed:
            raise RuntimeError("the crew is closed")
        if self._line is not None:
            return {}
        until = time.monotonic() + self._terms.load_timeout_s
        self._launch()
        try:
            self._line = self._dialled(lambda: until)
            loaded = self._asked({"op": "load", **self._load}, lambda: until)
            if loaded.get("why"):
                logger.info("mesh auto for %s is %s", self._task, loaded["why"])
            return loaded
        except WorkerHung as error:
            raise WorkerHung(
                f"the task {self._task} was not loaded on {count_of(self._terms.num_ranks, 'rank')} within "
                f"{self._terms.load_timeout_s:g} s: raise the setting load_timeout, if it needs more; the output of a "
                f"rank is in {self._terms.ranks.log_of(0)}"
            ) from error

    def _launch(self) -> None:
        if self._listener is None:
            self._terms.folder.mkdir(parents=True, exist_ok=True)
            self._terms.ranks.write(self._terms.folder)
            self._listener = Listener(self._terms.folder, self._on_line, self._terms.listen)
        if self._ranks is None or self._ranks.exit_code is not None:
            take_faults(self._terms.folder)
            for left in self._terms.folder.glob("elastic-*"):  # of a launcher that was killed
                shutil.rmtree(left, ignore_errors=True)
            self._launches = launch = self._launches + 1
            self._ranks = self._start(lambda code: self._events.put(_Event("ended", launch, code)))

    def _on_line(self, line: Line, hello: Json) -> None:
        """Accept rank 0's connection, on a separate thread, and read it until its end."""
        self._events.put(_Event("line", line, hello))
        for message in line.messages():
            self._events.put(_Event("answer", line, message))
        self._events.put(_Event("lost", line))

    def _dialled(self, until: Callable[[], float]) -> Line:
        while True:
            event = self._next(until, "no rank 0 has dialled in time")
            if event is not None and event.kind == "line":
                assert isinstance(event.source, Line)
                hello = event.content
                logger.info("%s here, rank 0 on %s", count_of(hello["ranks"], "rank is", "ranks are"), hello["host"])
                return event.source

    def _asked(self, request: Json, until: Callable[[], float]) -> Json:
        """Return the answer to a request, or raise its error.

        Raises:
            _Lost, WorkerHung, WorkerError: there is no answer.
        """
        line = self._line
        assert line is not None
        line.tell(request)  # its end is an event
        while True:
            event = self._heard(line, until, f"no answer to {request['op']} in time")
            if event.kind == "line":  # the ranks reconnected before the old line ended
                self._events.put(event)
            elif event.source is not line:
                continue
            if event.kind == "answer":
                answer: Json = event.content
                if "error" in answer:
                    raise WorkerError(answer["error"], answer["detail"], answer.get("said", ()))
                return answer
            self._line = None
            raise _Lost("ranks have ended")

    def _heard(self, line: Line, until: Callable[[], float], late: str) -> _Event:
        """Return the next event, skipping pongs, as long as rank 0 answers.

        Raises:
            _Lost, WorkerHung: as `_next`; and when it gives none for the time that a collective may take.
        """
        silent_s = 0.0
        while silent_s <= self._terms.ranks.collective_timeout:
            event = self._next(until, late, PING_S)
            if event is None:
                silent_s += PING_S  # not by the clock, which runs while this process is stopped
                line.tell({"op": "ping"})
            elif event.source is line and event.kind == "answer" and event.content.get("op") == "pong":
                silent_s = 0.0
            else:
                return event
        self._end_ranks()
        raise _Lost(f"rank 0 has not answered to a ping for {silent_s:g} s")

    def _next(self, until: Callable[[], float], late: str, pause_s: float = math.inf) -> _Event | None:
        """Return the next event of a line; None: there was none for `pause_s` seconds.

        Raises:
            _Lost: the ranks have ended, or were killed.
            WorkerHung: there was none in time.
        """
        while True:
            left_s = until() - time.monotonic()
            if left_s <= 0:
                raise WorkerHung(late)
            try:
                event = self._events.get(timeout=min(left_s, pause_s, WAIT_S))
            except queue.Empty:
                if pause_s < left_s:
                    return None
                continue  # the time may have been extended meanwhile
            if event.kind == "killed" and self._is_killed:
                raise _Lost("they were killed")
            if event.kind == "ended" and event.source == self._launches:
                self._line = None
                raise _Lost(f"their launcher has ended with exit code {event.content}")
            if event.kind not in ("killed", "ended"):
                return event


ORDER = "order"
VOLATILE = {"out", "own_out", "residual", "budget_s", "lease_s"}
"""Fields of a request that do not change what is trained."""


def prepare_folder(folder: Path, request: Mapping[str, Any]) -> None:
    """Prepare the crew's folder for a request to train: delete the checkpoints of other requests."""
    fields = {name: value for name, value in request.items() if name not in VOLATILE}
    identity = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    note = folder / ORDER
    if note.exists() and note.read_text("ascii") == identity:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    note.write_text(identity, "ascii")
