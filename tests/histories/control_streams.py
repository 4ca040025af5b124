"""The control streams of a simulated coordinator, and the leases of silent clients."""

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

from atoll.client.session import events as client
from atoll.protocol.vocabulary import ClientId, Fate, LossReason, RunId
from atoll.server.members.leases import Leases
from atoll.server.rounds.events import (
    ClientDisconnected,
    ClientEvaluated,
    ClientFailed,
    ClientJoined,
    ClientLost,
    Event,
)
from atoll.server.rounds.record import RoundRecord
from atoll.server.rounds.run_machine import RunMachine
from tests.histories.network import Connection, Incoming, Outgoing, Ready, StreamAgent
from tests.histories.scheduling import Endpoint, World
from tests.histories.sums import Said, is_news

RUN = RunId("run")
LOOKS_A_LEASE = 4
"""Maximum number of checks for expired leases within one lease."""


MOMENT_S = 1e-3


class Coordinator(Endpoint, Protocol):
    """The coordinator process that the streams belong to."""

    @property
    def now(self) -> float:
        """The time on its own clock."""

    @property
    def running(self) -> RunMachine:
        """The run's machine, while the process is up."""

    def takes_clock_of(self, agent: StreamAgent) -> bool:
        """Return whether the clock of a client allows signed messages."""

    def next_instant(self) -> int:
        """Return the instant of a signature [us]."""

    def post(self, event: Event) -> None:
        """Let the machine receive an event."""


class ControlStreams:
    """The newest control stream of each client, for the lifetime of one coordinator process."""

    def __init__(self, world: World, coordinator: Coordinator) -> None:
        self._world, self._coordinator = world, coordinator
        self._streams: dict[ClientId, Connection] = {}
        self._watched: set[ClientId] = set()
        self._leases = Leases(world.scenario.server_lease)
        self._timer: float | None = None

    @property
    def _is_running(self) -> bool:
        return self._coordinator.running.ledger.is_open

    # ------------------------------------------------------------ out

    def send(self, client_id: ClientId, event: Incoming) -> None:
        """Send an event to a client, if it is connected."""
        if (connection := self._streams.get(client_id)) is not None:
            connection.to_agent(event, self._coordinator.next_instant())

    def send_to_all(self, event: client.Event) -> None:
        """Send an event to all connected clients."""
        for client_id in list(self._streams):
            self.send(client_id, event)

    def break_all(self) -> None:
        """Close all streams, because the process has crashed."""
        for connection in self._streams.values():
            connection.close()

    def introductions(self) -> Iterator[ClientJoined]:
        """Yield the introduction of each connected client to a reopened run."""
        for client_id, connection in sorted(self._streams.items()):
            yield ClientJoined(client_id, connection.session, connection.agent.profile)

    def unwatched(self, record: RoundRecord, training: Iterable[ClientId] = ()) -> list[ClientId]:
        """Return the awaited or training clients without stream and lease, whose loss would go unnoticed."""
        waiting = {*training, *(client_id for client_id, row in record.clients.items() if row.fate is Fate.WAITING)}
        return [client_id for client_id in waiting if client_id not in self._streams and client_id not in self._watched]

    # ------------------------------------------------------------ in

    def hello(self, connection: Connection, joined: ClientJoined) -> None:
        """Register an opened control stream, which replaces the client's older one."""
        if not self._coordinator.takes_clock_of(connection.agent):
            connection.cut()
            return
        if (older := self._streams.get(joined.client_id)) is not None:
            older.close()
        self._streams[joined.client_id] = connection
        self.heard_from(joined.client_id)
        self.send(joined.client_id, client.Connected())
        if self._is_running:
            self._coordinator.post(joined)
        elif joined.working_on:
            self.send(joined.client_id, client.RunEnded(RUN))

    def heard(self, connection: Connection, message: Outgoing | None) -> None:
        """Receive a message (None: a goodbye) on a control stream; one that was replaced is ignored."""
        client_id = connection.agent.client_id
        if self._streams.get(client_id) is not connection:
            return
        self.heard_from(client_id)
        match message:
            case Said(event):
                if self._is_running and is_news(self._coordinator.running, message):
                    self._coordinator.post(event)
            case client.ReportFailure(_, round_id, reason, detail):
                self._coordinator.post(ClientFailed(client_id, round_id, reason, detail))
            case client.ReportEvaluation(_, version, statistics, detail, reason):
                self._coordinator.post(ClientEvaluated(client_id, version, statistics, detail, reason))
            case Ready() if self._is_running and self._coordinator.running.ledger.membership.has_declined(client_id):
                self._coordinator.post(ClientJoined(client_id, connection.session, connection.agent.profile))
            case None:
                self._lost(client_id, LossReason.LEFT)

    def ended(self, connection: Connection) -> None:
        """Take note of the end of a stream; the end of one that was replaced must not change anything."""
        client_id = connection.agent.client_id
        is_newest = self._streams.get(client_id) is connection
        if is_newest:
            del self._streams[client_id]
        if (is_newest or self._world.rng.random() < 0.5) and self._is_running:
            self._coordinator.post(ClientDisconnected(client_id, connection.session))

    def dismiss_wrong_clocks(self) -> None:
        """Close the streams of the clients whose clocks allow no signed message, after a jump."""
        for connection in list(self._streams.values()):
            if not self._coordinator.takes_clock_of(connection.agent):
                connection.cut()

    # ------------------------------------------------------------ leases

    def bytes_came(self, client_id: ClientId) -> None:
        """Renew the lease of a client by the bytes of a transfer."""
        self._leases.renew(client_id, self._coordinator.now)
        self._world.history.signs[client_id] = self._world.now

    def heard_from(self, client_id: ClientId) -> None:
        """Renew a client's lease after a sign of life."""
        self._leases.heard(client_id, self._coordinator.now)
        self._watched.add(client_id)
        self._arm_timer()

    def _arm_timer(self) -> None:
        due = self._leases.next_due
        if due is not None and self._timer is None:
            self._timer = due
            soon = self._world.scenario.server_lease / LOOKS_A_LEASE
            self._world.after(max(soon, due - self._coordinator.now), self._watch, self._coordinator)

    def _watch(self) -> None:
        """Renew the leases of clients whose heartbeats have arrived, and end those of all others that are over."""
        self._timer = None
        now, lease = self._coordinator.now, self._world.scenario.server_lease
        for client_id in self._leases.expired(now):
            connection = self._streams.get(client_id)
            silent = math.inf if connection is None else connection.silent_for
            if silent < lease:
                self._leases.heard(client_id, now - silent)
            else:
                self._lost(client_id, LossReason.LEASE_EXPIRED)
        self._arm_timer()

    def _lost(self, client_id: ClientId, reason: LossReason) -> None:
        self._leases.forget(client_id)
        self._watched.discard(client_id)
        if (connection := self._streams.pop(client_id, None)) is not None:
            connection.close()
        quiet = self._world.now - self._world.history.signs.get(client_id, -math.inf)
        if reason is LossReason.LEASE_EXPIRED and quiet < self._world.scenario.server_lease - MOMENT_S:
            self._world.fail(f"{client_id} is given up {quiet:.3f} s after the last byte of its transfer")
        if self._is_running and client_id in self._coordinator.running.ledger.membership.members:
            self._coordinator.post(ClientLost(client_id, reason))
