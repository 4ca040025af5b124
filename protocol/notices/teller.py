"""The notifier of a process: it checks the process's conditions, logs each notice, and delivers it."""

import asyncio
import hashlib
import logging
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.ground.backoff import delay
from atoll.ground.durable import write_atomically
from atoll.ground.folders import in_words
from atoll.protocol.notices.book import Book, Due
from atoll.protocol.notices.book_file import FILE, encoded, read_book
from atoll.protocol.notices.delivery import Message, NotDelivered, deliver_within, end_commands
from atoll.protocol.notices.notice import Notice, merged
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.threads import on_thread

logger = logging.getLogger(__name__)

LOOK_S, LOOK_SHARE = 1.0, 20
"""Smallest interval between two checks [s], and as a multiple of the duration of a check."""

RETRY_S = (10.0, 900.0)
"""First and longest wait after a failed delivery [s]."""

CLOSE_S = 8.0
"""Time that the process's exit waits for due messages [s]."""


@dataclass(frozen=True, slots=True)
class Teller:
    """Process that notifies, as its log names it, and the site of an agent."""

    process: str
    site: str = ""


Look = Callable[[Book, float], Awaitable[Sequence[Notice]]]
"""Function from the notification state and the time [s since the epoch] to the conditions that hold then."""


class Notices:
    """Notifier of one process, on its event loop; files and deliveries use threads.

    Args:
        config: the way, and the thresholds.
        folder: the state directory.
        teller: the process.
        look: returns the conditions that hold.
    """

    def __init__(self, config: NotifyConfig, folder: Path, teller: Teller, look: Look) -> None:
        self.config, self._path, self._teller, self._look = config, folder / FILE, teller, look
        self.book, self._written = read_book(self._path)
        self._events: list[Notice] = []
        self._logged: set[tuple[str, float]] = set()
        self._num_failed, self._retry_at, self._has_failed_to_write = 0, 0.0, False
        self._rng, self._looking = random.Random(), asyncio.Lock()

    def post(self, notice: Notice) -> None:
        """Record an event, which the next check reports."""
        self._events.append(notice)

    async def run(self) -> None:
        """Check and report, until cancelled."""
        while True:
            begun = time.monotonic()
            await self.look()
            await asyncio.sleep(max(LOOK_S, LOOK_SHARE * (time.monotonic() - begun)))

    async def close(self) -> None:
        """Report what is due, within `CLOSE_S`; an earlier failed delivery does not delay this last one."""
        self._retry_at = 0.0
        try:
            await asyncio.wait_for(self.look(), CLOSE_S)
        except TimeoutError:
            end_commands()
            what = (self.config.way, CLOSE_S)
            logger.warning("notify: %s has not answered within %g s: the rest is sent after the next start", *what)

    async def look(self) -> None:
        """Check the conditions once, and report what is due."""
        async with self._looking:
            await self._look_once()

    async def _look_once(self) -> None:
        now = time.time()
        active = await self._look(self.book, now)
        self.book.look(active, now)
        while self._events:
            self.book.post(self._events.pop(0), now)
        await self._write()
        groups = self.book.ready(now)
        for due in (each for group in groups for each in group):
            self._log(due)
        for group in groups:
            if time.monotonic() < self._retry_at or not await self._tell(group):
                break

    def _log(self, due: Due) -> None:
        """Write a notice into the log, once, unless it was logged already."""
        notice, entry = due.notice, (due.notice.key, due.since)
        if not notice.is_logged and entry not in self._logged:
            about = {"run": notice.run} if notice.run else {}
            level = logging.getLevelNamesMapping()[notice.level.upper()]
            logger.log(level, "%s", notice.sentence, extra=about)
        self._logged = {(each.notice.key, each.since) for each in self.book.due.values()} & {*self._logged, entry}

    async def _tell(self, group: list[Due]) -> bool:
        """Deliver one message; return whether it succeeded."""
        before = self.book.attempted(group, time.time())
        if self.config.way:
            if not await self._write():
                self.book.failed(before)
                return False
            message = message_of(self._teller, merged([due.notice for due in group]), group[0].since)
            try:
                await deliver_within(self.config, message)
            except NotDelivered as error:
                self.book.failed(before)
                self._failed(str(error))
                await self._write()
                return False
            if self._num_failed:
                logger.info("notify: %s accepts messages again", self.config.way)
            self._num_failed = 0
        self.book.succeeded(group)
        await self._write()
        return True

    def _failed(self, why: str) -> None:
        if not self._num_failed:
            logger.warning(
                "notify: %s: %s: it is repeated until it succeeds; try it by hand with `atoll notify`",
                *(self.config.way, why),
            )
        self._retry_at = time.monotonic() + delay(self._num_failed, *RETRY_S, self._rng)
        self._num_failed += 1

    async def _write(self) -> bool:
        """Write the state if it has changed; return whether it is on disk."""
        content = encoded(self.book)
        if content == self._written:
            return True
        try:
            await on_thread(None, write_atomically, self._path, content)
        except OSError as error:
            if not self._has_failed_to_write:
                logger.warning("notices cannot be recorded, and are not sent until they can: %s", in_words(error))
            self._has_failed_to_write = True
            return False
        self._written, self._has_failed_to_write = content, False
        return True


def message_of(teller: Teller, notice: Notice, at: float) -> Message:
    """Return the message of a notice, with the fields of a line of `--log json` and further ones.

    Args:
        teller: the process that notifies.
        notice: the notice.
        at: the time since which it was due [s since the epoch].
    """
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))
    message: Message = {"time": f"{seconds}.{int(at % 1 * 1000):03d}Z", "level": notice.level}
    message["process"] = teller.process
    message |= {"site": teller.site} if teller.site else {}
    message |= {"run": notice.run} if notice.run else {}
    message |= {"logger": __name__, "message": notice.sentence}
    number = hashlib.sha256(f"{teller} {notice.key} {at}".encode()).hexdigest()[:16]
    host = socket.gethostname()
    return message | {"condition": str(notice.condition), "subject": notice.subject, "id": number, "host": host}
