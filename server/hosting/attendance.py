"""The clients of a coordinator: their control streams, their leases, and the events for the runs that they concern.

A client has one control stream and one lease, however many runs it takes part in. Each run of one of its tasks receives
an event when the client joins, disconnects or is lost.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import TERMINAL, ClientId, FailureReason, LossReason, RoundId, RunId, RunState
from atoll.server.audit.actions import Action
from atoll.server.audit.log import AuditLog, Caller
from atoll.server.clock import MonotoneClock
from atoll.server.config.process import CoordinatorConfig
from atoll.server.hosting import messages
from atoll.server.hosting.control_streams import CLIENT_ENDED, Connection, Hub
from atoll.server.hosting.hosted_run import HostedRun, may_join
from atoll.server.members.leases import Leases
from atoll.server.names.places import CLIENT, Places
from atoll.server.names.presence import Present
from atoll.server.ranks.registry import Ranks
from atoll.server.rounds.events import ClientDisconnected, ClientJoined, ClientLost

logger = logging.getLogger(__name__)


class AttendanceListener(Protocol):
    """Part of the coordinator, beside the runs, that waits for clients."""

    def joined(self, connection: Connection) -> None:
        """Handle a client's new control stream."""
        ...

    def lost(self, client_id: ClientId, why: str) -> None:
        """Handle the loss of a client."""
        ...


class Attendance:
    """Connected clients, for all runs of a coordinator together. All of it runs on one event loop.

    Args:
        config: the coordinator's settings.
        runs: all hosted runs by their ids; the mapping may grow.
        clock: the coordinator's clock.
        ranks: the aggregation ranks; None: there are none.
        spawn: starts a background task.
        audit: the audit log of joins and departures.
        places: the holders of the clients' names.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        runs: Mapping[RunId, HostedRun],
        clock: MonotoneClock,
        ranks: Ranks | None,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        audit: AuditLog,
        places: Places,
    ) -> None:
        self.hub, self.clock = Hub(), clock
        self._config, self._runs, self._ranks, self._spawn = config, runs, ranks, spawn
        self._leases = Leases(config.lease)
        self._audit, self._places = audit, places
        places.on_line.append(self._tell_holder)
        self.listeners: list[AttendanceListener] = []
        """Listeners other than runs that learn which clients join or are lost."""

    # ------------------------------------------------------------ joining

    def has_room_for(self, client_id: ClientId) -> bool:
        """Return whether one more client may connect; a connected client may always replace its stream."""
        return client_id in self.hub or len(self.hub) < self._config.max_connections

    def refusal_of(self, connection: Connection) -> str:
        """Return the reason why a process may not use its name; empty: it may `join`."""
        client_id = connection.client_id
        holder, heard_at = self.hub.holder(client_id), self._leases.heard_at(client_id)
        return self._places.enter(CLIENT, client_id, connection.claimant, holder, heard_at)

    def join(self, connection: Connection, hello: pb.Hello) -> None:
        """Register a new control stream, send Welcome, and tell the runs that the client is connected."""
        client_id, connection.since = connection.client_id, self.clock.now()
        self.hub.add(connection)
        self.heard(client_id)
        tasks = sorted({run.task for run in self._runs.values() if run.machine.ledger.state not in TERMINAL})
        self._welcome(connection, tasks)
        logger.info("%s joined (%d connected)", client_id, len(self.hub), extra={"site": client_id})
        self._record(Action.CLIENT_JOIN, client_id)
        working_on: dict[RunId, list[RoundId]] = {}
        for work in hello.working_on:
            working_on.setdefault(RunId(work.run_id), []).append(RoundId(work.round_id))
        for run_id, run in self._runs.items():
            if run.machine.ledger.is_open and may_join(connection, run):
                rounds = tuple(working_on.get(run_id, ()))
                run.post(_joined(connection, rounds))
        for listener in self.listeners:
            listener.joined(connection)
        for run_id in self._ended_for(connection, working_on):
            self._spawn(self._send_past_end(connection, self._runs[run_id]))
        if tasks and not connection.tasks & set(tasks):
            text = "%s allows no task of the runs here (%s)"
            logger.warning(text, client_id, ", ".join(tasks), extra={"site": client_id})

    def _welcome(self, connection: Connection, tasks: list[str]) -> None:
        heartbeat, lease = self._config.heartbeat_interval, self._config.lease
        ranks = self._ranks.addresses() if self._ranks is not None else None
        welcome = pb.Welcome(heartbeat_s=heartbeat, lease_s=lease, tasks=tasks, ranks=ranks)
        connection.send(pb.ServerMessage(welcome=welcome))

    async def _send_past_end(self, connection: Connection, run: HostedRun) -> None:
        await run.on_disk()
        ledger = run.machine.ledger
        if ledger.state in TERMINAL:
            self._send_end(connection, run.run_id, ledger.state, ledger.cause)

    def _send_end(self, connection: Connection, run_id: RunId, state: RunState, cause: str) -> None:
        num_open = sum(
            other.task in connection.tasks and other.machine.ledger.state not in TERMINAL
            for other in self._runs.values()
        )
        connection.send(messages.run_ended(run_id, state, cause, num_open))

    def announce_end(self, run_id: RunId, members: Collection[ClientId], state: RunState, cause: str) -> None:
        """Send the end of a run to its connected members."""
        for connection in self.hub:
            if connection.client_id in members:
                self._send_end(connection, run_id, state, cause)

    def _ended_for(self, connection: Connection, working_on: Collection[RunId]) -> list[RunId]:
        """List the ended runs to report to a client: those it works for; if it has no open run, also the last one."""
        mine = {run_id: run for run_id, run in self._runs.items() if run.task in connection.tasks}
        ended = [run_id for run_id, run in mine.items() if run.machine.ledger.state in TERMINAL]
        last = ended[-1:] if len(ended) == len(mine) else []
        return [run_id for run_id in ended if run_id in working_on or run_id in last]

    def present(self) -> list[Present]:
        """Return the connected clients, by name."""
        return [
            Present(
                each.client_id,
                each.since,
                each.claimant.address,
                each.software,
                each.clock_offset,
                each.certificate_until,
            )
            for each in sorted(self.hub, key=lambda connection: connection.client_id)
        ]

    def introduce_everyone(self, run: HostedRun) -> None:
        """Report the connected clients to a run that starts or resumes; its earlier members get a fresh lease."""
        for client_id in run.machine.ledger.membership.members:
            self.heard(client_id)
        for connection in self.hub:
            if may_join(connection, run):
                run.post(_joined(connection))

    def introduce_again(self, connection: Connection) -> None:
        """Make a client available again in the runs where it had declined; in all others it already is."""
        client_id = connection.client_id
        for run in self._open_with(client_id):
            if run.machine.ledger.membership.has_declined(client_id):
                run.post(_joined(connection))

    def send_ranks(self) -> None:
        """Send the current addresses of the aggregation ranks to all clients."""
        assert self._ranks is not None
        for connection in self.hub:
            connection.send(pb.ServerMessage(ranks=self._ranks.addresses()))

    def _tell_holder(self, kind: str, name: str, line: str) -> None:
        """Send the process that uses a name a notice about the other one, which learns of it by its refusal."""
        connection = self.hub.of(ClientId(name)) if kind == CLIENT else None
        if connection is not None and connection.takes_notices:
            connection.send(messages.notice(f"two agents use this site's name: {line}"))

    # ------------------------------------------------------------ leaving

    def heard(self, client_id: ClientId) -> None:
        """Renew the lease of a client that has sent a message."""
        self._leases.heard(client_id, self.clock.now())

    def bytes_came(self, client_id: ClientId) -> None:
        """Renew the lease of a client by the bytes of a transfer; a lost one must connect again first."""
        self._leases.renew(client_id, self.clock.now())

    def expect(self, client_id: ClientId) -> None:
        """Start the lease of a member of a run that resumes after a restart; its agent, too, has time to start."""
        until = self.clock.now() + max(self._config.lease, self._config.start_allowance)
        self._leases.expect(client_id, until)

    def leave(self, connection: Connection) -> None:
        """Handle the end of a control stream; the client may reconnect until its lease expires."""
        if self.hub.remove(connection):
            self._places.leave(CLIENT, connection.client_id)
            if self._leases.heard_at(connection.client_id):  # else the log already has the reason
                why = "" if connection.why in ("", CLIENT_ENDED) else f": {connection.why}"
                text, about = "%s disconnected (%d connected)%s", {"site": connection.client_id}
                logger.info(text, connection.client_id, len(self.hub), why, extra=about)
            self._record(Action.CLIENT_LEAVE, connection.client_id)
            for run in self._open_with(connection.client_id):
                run.post(ClientDisconnected(connection.client_id, connection.session))

    def lost(
        self, clients: Iterable[ClientId], reason: LossReason, failure: FailureReason | None = None, detail: str = ""
    ) -> None:
        """Declare clients lost: their lease has expired, they have said goodbye, or they are no longer members.

        `failure`: why they left, if it was their decision, with its detail.
        """
        silent_for = self._config.lease if reason is LossReason.LEASE_EXPIRED else 0.0
        for client_id in clients:
            self._leases.forget(client_id)
            self._places.leave(CLIENT, client_id, for_good=True)
            why = f" ({failure}: {detail})" if failure is not None else ""
            logger.info("%s %s%s", client_id, self._what_is_lost(client_id, reason), why, extra={"site": client_id})
            self._record(Action.CLIENT_LOST, client_id, reason)
            for listener in self.listeners:
                listener.lost(client_id, reason)
            for run in self._open_with(client_id):
                run.post(ClientLost(client_id, reason, failure, detail, silent_for))
            if reason is LossReason.LEASE_EXPIRED:  # if it lives it must reconnect, else it is never invited again
                self.hub.dismiss(client_id, f"silent for {self._config.lease:g} s: connect again")

    def _what_is_lost(self, client_id: ClientId, reason: LossReason) -> str:
        match reason:
            case LossReason.LEFT:
                return "has left: its agent ends"
            case LossReason.LEASE_EXPIRED:
                return f"has given no sign of life for {self._config.lease:g} s: it is given up until it connects again"
            case LossReason.REVOKED:
                return "is revoked"

    def _record(self, action: Action, client_id: ClientId, outcome: str = "ok") -> None:
        self._audit.record_bounded(action, client_id, outcome, caller=Caller(client_id, "client"))

    def revoked(self, client_id: ClientId) -> None:
        """Declare a client lost whose membership was revoked, and end its stream."""
        self.lost([client_id], LossReason.REVOKED)
        self.hub.dismiss(client_id, f"client {client_id} is revoked")

    def _open_with(self, client_id: ClientId) -> list[HostedRun]:
        return [
            run
            for run in self._runs.values()
            if run.machine.ledger.is_open and client_id in run.machine.ledger.membership.members
        ]

    async def watch_leases(self) -> None:
        """Declare clients lost whose lease expires, until cancelled."""
        while True:
            due = self._leases.next_due
            wait = self._config.lease if due is None else due - self.clock.now()
            await asyncio.sleep(min(max(wait, 0.01), self._config.lease))
            self.lost(self._leases.expired(self.clock.now()), LossReason.LEASE_EXPIRED)


def _joined(connection: Connection, working_on: tuple[RoundId, ...] = ()) -> ClientJoined:
    return ClientJoined(
        connection.client_id,
        connection.session,
        connection.profile,
        working_on,
        connection.software,
        connection.joins_sessions,
    )
