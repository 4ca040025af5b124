"""The news of runs: one follower for each run that a browser shows, and one rendering for all who look.

A stream says only that a run has news. A tab then reads its own page again, so every page is live; pages of a followed
run are kept until its next news, so ten tabs cost one rendering.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

from atoll.ground.printable import printable
from atoll.interface.deployed import DeployedRun
from atoll.interface.errors import AtollError
from atoll.interface.following import Event

logger = logging.getLogger(__name__)

FOLLOWED_MAX = 8
"""Largest number of runs that are followed at one time."""

IDLE_S = 60.0
"""Seconds after the last look at which a follower ends."""

AGAIN_S = 5.0
"""Seconds until a run that has ended, or cannot be followed, is looked at again."""

PICTURE_S = 0.25
"""Least seconds between two renderings of a page, and between two news of a run in a stream."""

KEPT_S = 2.0
"""Seconds after which a page without news is read again: it shows how long something has lasted."""

ALIVE_S = 15.0
"""Seconds between two signs of life in a stream: proxies end a silent one."""

LINES_MAX, PAGES_MAX = 200, 128
"""Largest numbers of kept lines of a log, and of kept pages."""


@dataclass
class Followed:
    """A followed run.

    Args:
        run: the run.
    """

    run: DeployedRun
    lines: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=LINES_MAX))
    """The newest lines of its log, with their times [s since the epoch]."""
    news: int = 0
    """The number of its news so far."""
    fault: str = ""
    """Why no news can come; empty: they can."""
    wakes: set[asyncio.Event] = field(default_factory=set)
    """What is set at its news, one for each stream."""
    seq: int | None = None
    task: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        """Follow the run until this task is cancelled."""
        while True:
            try:
                async with aclosing(self.run.afollow(after=self.seq)) as events:
                    async for event in events:
                        self._note(event)
            except AtollError as error:
                self._fail(" ".join(error.faults))
            except Exception:  # a bug: without a word the page would count as live for ever
                logger.exception("the news of run %s cannot be read", printable(self.run.run_id))
                self._fail("the news of this run cannot be read: the log of the dashboard says why")
            await asyncio.sleep(AGAIN_S)

    def _note(self, event: Event) -> None:
        now = time.time() if event.at is None else event.at
        self.lines.extend((now, line) for line in event.lines)
        if event.kind == "waiting":
            self._fail(" ".join(event.lines))
            return
        has_begun_again = event.kind == "began" and self.seq == event.seq
        self.seq = self.seq if event.seq is None else event.seq
        if not has_begun_again or self.fault:
            self.fault = ""
            self._wake()

    def _fail(self, why: str) -> None:
        if why != self.fault:
            self.fault = why
            self._wake()

    def _wake(self) -> None:
        self.news += 1
        for wake in self.wakes:
            wake.set()


class Live:
    """The followed runs of a process.

    Args:
        open_run: returns the run of a key, such as `1/digits-1`; raises AtollError.
    """

    def __init__(self, open_run: Callable[[str], DeployedRun]) -> None:
        self._open = open_run
        self._followed: dict[str, Followed] = {}

    def of(self, key: str) -> Followed | None:
        """Return a run that is followed; None: it is not."""
        return self._followed.get(key)

    async def stream(self, keys: Sequence[str]) -> AsyncIterator[str]:
        """Yield the news of runs as server-sent events, each with the run's key and the number of its news.

        News that come faster than they are read are told once.

        Args:
            keys: the runs.
        """
        wake, told = asyncio.Event(), dict[str, tuple[int, str]]()
        faults = dict[str, str]()
        with self._looked_at(keys, wake, faults) as runs:
            for key, fault in faults.items():
                yield _event(key, 0, fault)
            while True:
                wake.clear()
                for key, one in runs.items():
                    state = (one.news, one.fault)
                    if told.get(key) != state:
                        told[key] = state
                        yield _event(key, *state)
                await asyncio.sleep(PICTURE_S)
                try:
                    async with asyncio.timeout(ALIVE_S):
                        await wake.wait()
                except TimeoutError:
                    yield ": alive\n\n"

    @contextmanager
    def _looked_at(
        self, keys: Sequence[str], wake: asyncio.Event, faults: dict[str, str]
    ) -> Iterator[dict[str, Followed]]:
        """Follow some runs in the block; `faults` gets why one cannot be followed."""
        runs = dict[str, Followed]()
        for key in dict.fromkeys(keys):
            try:
                runs[key] = self._begun(key)
                runs[key].wakes.add(wake)
            except AtollError as error:
                faults[key] = " ".join(error.faults)
        try:
            yield runs
        finally:
            for key, one in runs.items():
                one.wakes.discard(wake)
                asyncio.get_running_loop().call_later(IDLE_S, self._end_if_idle, key)

    def _begun(self, key: str) -> Followed:
        """Return a run, which is followed from now on.

        Raises:
            AtollError: there is no such run, or too many are followed.
        """
        if (found := self._followed.get(key)) is not None:
            return found
        for other in [*self._followed]:
            if len(self._followed) >= FOLLOWED_MAX:
                self._end_if_idle(other)
        if len(self._followed) >= FOLLOWED_MAX:
            raise AtollError(f"{FOLLOWED_MAX} runs are followed already, which is the most: reload to see news")
        found = self._followed[key] = Followed(self._open(key))
        found.task = asyncio.get_running_loop().create_task(found.follow(), name=f"follow {key}")
        return found

    def _end_if_idle(self, key: str) -> None:
        one = self._followed.get(key)
        if one is not None and not one.wakes:
            del self._followed[key]
            if one.task is not None:
                one.task.cancel()


@dataclass
class _Picture:
    """A page as it was rendered."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    news: int = -1
    at: float = -KEPT_S
    html: str = ""


class Pictures:
    """Pages of followed runs, kept until the next news of their run.

    Args:
        clock: returns seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, _Picture] = {}

    async def picture(self, address: str, one: Followed, render: Callable[[], Awaitable[str]]) -> str:
        """Return a page, rendered at most four times a second for all who look at it.

        Args:
            address: its address.
            one: its run.
            render: renders it.
        """
        kept = self._kept.setdefault(address, _Picture())
        while len(self._kept) > PAGES_MAX:
            del self._kept[next(iter(self._kept))]
        async with kept.lock:
            if kept.news != one.news or self._clock() - kept.at > KEPT_S:
                await asyncio.sleep(max(0.0, kept.at + PICTURE_S - self._clock()))
                news, kept.at = one.news, self._clock()
                kept.html = await render()
                kept.news = news
            return kept.html


def _event(key: str, news: int, fault: str) -> str:
    return f"data: {json.dumps({'run': key, 'news': news, 'fault': fault})}\n\n"
