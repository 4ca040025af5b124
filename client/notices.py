"""The conditions that an agent reports to its operator: coordinator, approvals, disk, certificate, clock, log."""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from atoll.client.config import AgentConfig
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.policy.gate import Gate
from atoll.client.wire.coordinator_connection import CoordinatorConnection
from atoll.ground.printable import printable_size, span
from atoll.protocol.identity.clock_hint import instant
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.notices.book import Book
from atoll.protocol.notices.notice import CERTIFICATE_LEFT, Condition, Notice
from atoll.protocol.notices.teller import Notices, Teller
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import RunId, RunState

JUMP_S = 60.0
"""Smallest jump of this machine's clock that is reported [s]."""

SLOW_S = 10.0
"""Interval between two checks of the disk [s]."""

_ENDS: Mapping[str, tuple[Condition, str]] = {
    RunState.FAILED: (Condition.RUN_FAILED, "its operator sees the cause with `atoll run show {}`, and may resume it"),
    RunState.STOPPED: (
        Condition.RUN_STOPPED,
        "its operator has ended it; `atoll run resume {}` reopens it",
    ),
    RunState.FINISHED: (Condition.RUN_FINISHED, "nothing is left to do here"),
}


class AgentWatch:
    """Conditions of one agent, see `Notices`.

    Args:
        config: the agent's settings.
        state: its directory.
        gate: the site's policy.
        connection: the connection to the coordinator.
        keeper: renews its credential; None: it has none.
        address: the address of the coordinator.
    """

    def __init__(
        self,
        config: AgentConfig,
        state: StateDirectory,
        gate: Gate,
        connection: CoordinatorConnection,
        keeper: Keeper | None,
        address: str,
    ) -> None:
        self._config, self._state, self._gate = config.notify, str(state.path.absolute()), gate
        self._connection, self._keeper, self._address = connection, keeper, address
        self._free, self._next_slow, self._offset = float("inf"), 0.0, _offset()
        self.notices = Notices(config.notify, state.path, Teller("agent", config.site), self.look)

    def run_ended(self, run_id: RunId, state: str) -> None:
        """Record the end of a run; the coordinator may report it again."""
        self._gate.awaiting.pop(run_id, None)
        if (end := _ENDS.get(state)) is not None:
            condition, then = end
            sentence = f"run {run_id} of the coordinator at {self._address} is {state}: {then.format(run_id)}"
            self.notices.post(Notice(condition, run_id, sentence, run=run_id, is_logged=True))

    async def look(self, book: Book, now: float) -> list[Notice]:
        """Return the current conditions; post a jump of the clock."""
        before, self._offset = self._offset, _offset()
        if abs(by := self._offset - before) >= JUMP_S:
            self.notices.post(_jumped(by, now))
        if (at := time.monotonic()) >= self._next_slow:
            self._next_slow = at + SLOW_S
            with suppress(OSError):
                self._free = await on_thread(None, lambda: shutil.disk_usage(self._state).free)
        looks: tuple[Callable[[Book, float], Iterator[Notice]], ...]
        looks = (self._of_connection, self._of_approvals, self._of_certificate, self._of_disk_and_log)
        return [notice for look in looks for notice in look(book, now)]

    def _of_connection(self, book: Book, now: float) -> Iterator[Notice]:
        connection, address = self._connection, self._address
        if connection.current is not None:
            return
        since = book.since(f"{Condition.AWAY} {address}", now)
        why = f" ({connection.why})" if connection.why else ""
        rest = "the agent keeps trying, and finished updates wait in its spool"
        sentence = f"the coordinator at {address} is away since {instant(since)}{why}: check the network, or ask its "
        sentence += f"operator; {rest}"
        yield Notice(Condition.AWAY, address, sentence, hold=self._config.away, is_once=True)
        if connection.is_refused_for_clock:
            yield Notice(Condition.CLOCK, "site", connection.why, is_logged=True)

    def _of_approvals(self, book: Book, now: float) -> Iterator[Notice]:
        for run_id, sentence in self._gate.awaiting.items():
            yield Notice(Condition.APPROVAL, run_id, sentence, run=run_id, is_logged=True)

    def _of_certificate(self, book: Book, now: float) -> Iterator[Notice]:
        if self._keeper is None:
            return
        leaf = self._keeper.current.leaf
        anew = "a new join code from the coordinator's operator (`atoll client invite NAME`, then --join)"
        if now >= leaf.expires_at:
            sentence = f"this site's certificate has ended at {instant(leaf.expires_at)}: it needs {anew}"
            yield Notice(Condition.CERTIFICATE, "site, ended", sentence, is_once=True)
        elif leaf.expires_at - now < (leaf.expires_at - leaf.issued_at) * CERTIFICATE_LEFT:
            what = f"this site's certificate ends at {instant(leaf.expires_at)} and was not renewed"
            sentence = (
                f"{what}: the agent renews it when it reaches the coordinator at {self._address}; after that it needs "
            )
            yield Notice(Condition.CERTIFICATE, "site", sentence + anew)

    def _of_disk_and_log(self, book: Book, now: float) -> Iterator[Notice]:
        if self._free < (limit := self._config.disk):
            what = f"the disk of {self._state} has {printable_size(int(self._free))} free"
            sentence = f"{what}, less than {printable_size(limit)} (notify.disk): free some, or move the directory"
            yield Notice(Condition.DISK, self._state, sentence)
        if damage := self._gate.damage:
            yield Notice(Condition.AUDIT, f"{self._state}/decisions", damage, is_logged=True)


def _jumped(by: float, now: float) -> Notice:
    side = "forward" if by > 0 else "back"
    what = f"this machine's clock was set {side} by {span(by)}, from {instant(now - by)} to {instant(now)}"
    return Notice(Condition.CLOCK, "jump", f"{what}: check NTP (`timedatectl`)")


def _offset() -> float:
    """Return the wall clock minus the monotonic clock, which setting the clock does not change [s]."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
