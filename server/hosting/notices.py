"""The conditions that the coordinator reports to its operator: runs, absent sites, certificates, clocks, disk, logs."""

import math
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress

from atoll.protocol.identity.certificates import read_certificates, validity_of
from atoll.protocol.identity.names import Role
from atoll.protocol.notices.book import Book
from atoll.protocol.notices.notice import Condition, Notice
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.notices.teller import Notices, Teller
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import ClientId, LossReason
from atoll.server.audit.chain_watch import ChainWatch
from atoll.server.clock import jumped
from atoll.server.hosting.control_streams import Connection
from atoll.server.hosting.coordinator import Coordinator
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.identity.register import Member, Standing
from atoll.server.views import notices as told
from atoll.server.views.notices import Place

SLOW_S, SLOW_SHARE = 10.0, 20
"""Shortest interval between two checks of the register and the disk [s], and as a multiple of the check's duration."""

SITES_MAX = 2_000
"""Largest number of sites for individual reports of absence or a new version: beyond it they are devices, which come
and go."""

LEFT, GONE = "left ", "yes"
"""Fact that an agent has left cleanly, and has not come back."""

Members = Callable[[], Awaitable[Sequence[Member]]]


STARTING_S = 60.0
"""Time after a start within which sites may connect before one is reported as absent [s]."""


class CoordinatorWatch:
    """Conditions of one coordinator, see `Notices`.

    Args:
        coordinator: the coordinator.
        config: the thresholds.
        members: returns the members; None: nothing is authenticated, and the clients of open runs are the sites.
        ca_pem: returns the certificate of the authority (PEM).
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: NotifyConfig,
        members: Members | None,
        ca_pem: Callable[[], bytes] = bytes,
    ) -> None:
        self._coordinator, self._config, self._members, self._ca_pem = coordinator, config, members, ca_pem
        state = str(coordinator.state.path)
        self._place = Place(state, f"--state {shlex.quote(state)}")
        self._started = time.time()
        self._known: Sequence[Member] = ()
        self._certificates: Sequence[Notice] = ()
        self._free, self._authority_until, self._next_slow = math.inf, math.inf, 0.0
        self._left, self._chain = set[ClientId](), ChainWatch(coordinator.state.path)
        coordinator.attendance.listeners.append(self)
        self.notices = Notices(config, coordinator.state.path, Teller("coordinator"), self.look)
        coordinator.clocks.on_jump.append(self._jumped)

    def joined(self, connection: Connection) -> None:
        """Record a site's new control stream."""
        self._left.discard(connection.client_id)

    def lost(self, client_id: ClientId, why: str) -> None:
        """Record that a site was lost or has left cleanly."""
        if why == LossReason.LEFT:
            self._left.add(client_id)

    def _jumped(self, by: float) -> None:
        now = time.time()
        self.notices.post(told.of_jump(jumped(by, now), now))

    async def look(self, book: Book, now: float) -> list[Notice]:
        """Return the current conditions; post the new versions of sites."""
        if (at := time.monotonic()) >= self._next_slow:
            with suppress(OSError):  # the disk or the database does not respond, which is in the log
                self._free = await on_thread(None, lambda: shutil.disk_usage(self._place.state).free)
                self._known = await self._members() if self._members is not None else ()
                self._certificates = await on_thread(None, self._of_members, now)
            if pem := self._ca_pem():
                self._authority_until = max(validity_of(each).end for each in read_certificates(pem))
            self._next_slow = at + max(SLOW_S, SLOW_SHARE * (time.monotonic() - at))
        await on_thread(None, self._chain.step)
        of_sites: Iterator[Notice] = iter(())
        if self._num_sites <= SITES_MAX:
            self._note_versions(book)
            of_sites = self._of_sites(book, now)
        return [*self._of_runs(), *of_sites, *self._of_the_rest(now)]

    @property
    def _num_sites(self) -> int:
        runs = (run.machine.ledger for run in self._coordinator.runs.values())
        largest = max((len(ledger.membership.members) for ledger in runs if ledger.is_open), default=0)
        return max(largest, len(self._known), len(self._coordinator.attendance.hub))

    def _note_versions(self, book: Book) -> None:
        """Post the new versions of sites, and remember which sites have left cleanly."""
        book.facts |= {f"{LEFT}{client_id}": GONE for client_id in self._left}
        self._left.clear()
        for connection in self._coordinator.attendance.hub:
            book.facts.pop(f"{LEFT}{connection.client_id}", None)
            software = connection.software
            if software and (before := book.note_fact(connection.client_id, software)):
                self.notices.post(told.of_software(connection.client_id, before, software, self._place))

    def _of_runs(self) -> Iterator[Notice]:
        for run_id, run in self._coordinator.runs.items():
            machine = run.machine if isinstance(run, RunDriver) else None
            yield from told.of_run(run_id, run.machine.ledger.state, machine, self._place)

    def _of_sites(self, book: Book, now: float) -> Iterator[Notice]:
        hub = self._coordinator.attendance.hub
        for client in sorted(self._expected(book)):
            if client not in hub:
                since = book.since(f"{Condition.AWAY} {client}", now)
                yield told.of_absent(client, since, self._hold_of(since), self._place)

    def _hold_of(self, since: float) -> float:
        """Return the time for which an absence must last to be reported [s]: after a start, sites need a while."""
        hold = self._config.away
        return max(hold, self._started + min(STARTING_S, hold) - since)

    def _expected(self, book: Book) -> set[str]:
        """Return the sites that should be connected: members with a valid certificate, and clients of open runs.

        While no run is open, an agent that has left cleanly is not missed.
        """
        open_ = [run for run in self._coordinator.runs.values() if run.machine.ledger.is_open]
        found = {str(client) for run in open_ for client in run.machine.ledger.membership.members}
        gone = set() if open_ else {key.removeprefix(LEFT) for key, fact in book.facts.items() if fact == GONE}
        for member in self._known:
            if member.identity.role is Role.CLIENT:
                is_valid = member.standing in (Standing.MEMBER, Standing.BY_HAND)
                (found.add if is_valid else found.discard)(member.identity.name)
        return found - gone

    def _of_members(self, now: float) -> list[Notice]:
        return [notice for member in self._known for notice in told.of_member(member, now, self._place)]

    def _of_the_rest(self, now: float) -> Iterator[Notice]:
        coordinator, place = self._coordinator, self._place
        yield from self._certificates
        yield from told.of_authority(self._authority_until, now, place)
        yield from told.of_disk(self._free, self._config.disk, place)
        yield from told.of_clocks(coordinator.clocks.told)
        yield from told.of_audit(coordinator.audit.damage or self._chain.fault, place)
