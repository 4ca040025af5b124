"""The simulated network: ordered control streams that may break at any time, and uploads that may be repeated."""

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from atoll.client.session import events as client
from atoll.protocol.vocabulary import ClientId, RejectReason
from atoll.server.members.member import Profile
from atoll.server.rounds.events import Accept, ClientJoined, Effect, Reject, Update
from atoll.server.rounds.run_machine import RunMachine
from tests.histories.disk import Reply
from tests.histories.scheduling import Endpoint, World
from tests.histories.wall_clocks import WallClock

BAD_BYTES = (
    RejectReason.BAD_MANIFEST,
    RejectReason.WRONG_LAYOUT,
    RejectReason.WRONG_CODEC,
    RejectReason.BAD_ENCODING,
    RejectReason.NOT_FINITE,
)
IN_THE_MANIFEST = BAD_BYTES[:3]


PIECE_S = 2.0
"""Longest time between two pieces of a transfer over a slow line [s]."""
SLOW_LEASES = 6.0
"""Longest transfer over a slow line, in leases of the coordinator."""


class Ready:
    """The message of an agent that work which it has declined may be offered again."""


class OfSum:
    """A message of a secure sum, in either direction."""


Incoming = client.Event | OfSum
Outgoing = client.Effect | Ready | OfSum


class StreamAgent(Endpoint, Protocol):
    """The agent's end of a control stream."""

    client_id: ClientId
    profile: Profile
    connection: "Connection | None"
    """The stream that the agent uses now."""

    @property
    def is_online(self) -> bool:
        """Return whether the client has a network."""

    @property
    def is_slow(self) -> bool:
        """Return whether the client's line is slow."""

    @property
    def wall(self) -> WallClock:
        """The clock of the client's machine."""

    def heard(self, connection: "Connection", event: Incoming, issued_us: int = 0) -> None:
        """Take a message that has arrived, signed at an instant [us]; 0: it arrives once more, or unsigned."""

    def disconnected(self, connection: "Connection") -> None:
        """Take note of the end of the stream."""


class Streams(Protocol):
    """The control streams of the coordinator."""

    def hello(self, connection: "Connection", joined: ClientJoined) -> None:
        """Register an opened stream."""

    def heard(self, connection: "Connection", message: Outgoing | None) -> None:
        """Take a message that has arrived; None: a goodbye."""

    def bytes_came(self, client_id: ClientId) -> None:
        """Take note of the bytes of a transfer."""

    def ended(self, connection: "Connection") -> None:
        """Take note of the end of a stream."""


class StreamServer(Endpoint, Protocol):
    """The coordinator's end of a control stream."""

    is_up: bool
    wall: WallClock
    """The clock of the coordinator's machine."""

    @property
    def streams(self) -> Streams:
        """The open streams of this coordinator."""


class UploadAgent(StreamAgent, Protocol):
    """The agent that sends an upload."""

    def upload_ended(self, upload: "Upload", event: client.Event) -> None:
        """Take the answer to an upload, or its end without one."""


class UploadServer(StreamServer, Protocol):
    """The coordinator that takes an upload."""

    @property
    def running(self) -> RunMachine:
        """The run's machine, while the process is up."""

    def has_room(self) -> bool:
        """Return whether the disk has room for an update."""

    def refuses_for_room(self) -> None:
        """Note that an upload does not fit."""

    def upload_begun(self, update: Update) -> None:
        """Take note of an upload's first bytes."""

    def update_arrived(self, update: Update, reply: Reply | None) -> None:
        """Receive an update whose bytes are complete."""

    def update_refused(self, update: Update, reason: RejectReason, reply: Reply) -> None:
        """Refuse an update whose bytes or manifest are bad."""

    def acknowledged(self, effect: Accept) -> None:
        """Record that an acceptance is sent."""


def transfer(
    world: World,
    agent: StreamAgent,
    server: StreamServer,
    seconds: float,
    done: Callable[[], None],
    broken: Callable[[], object],
) -> None:
    """Let the bytes of an upload or a download pass.

    Over a slow line they come in pieces, each of them a sign of life, and no heartbeat comes through meanwhile.

    Args:
        world: the world.
        agent: one end.
        server: the other end.
        seconds: the time that it takes over a line that is not slow [s].
        done: what happens when all bytes have passed.
        broken: what happens when one of the ends is gone before that; of a slow line only.
    """
    if not agent.is_slow:
        world.after(seconds, done)
        return
    world.history.faults["slow_line"] += 1
    life = server.life

    def piece(left: float) -> None:
        if not (server.is_up and server.life == life and agent.is_online):
            broken()
        elif left <= 0:
            done()
        else:
            server.streams.bytes_came(agent.client_id)
            if agent.connection is not None:
                agent.connection.fall_silent(world.now + PIECE_S)
            world.after(min(left, PIECE_S), lambda: piece(left - PIECE_S), agent)

    piece(seconds + world.rng.uniform(1.0, SLOW_LEASES) * world.scenario.server_lease)


class Connection:
    """One control stream, whose messages arrive in order, or not at all after a cut; faults may change this."""

    def __init__(self, world: World, agent: StreamAgent, coordinator: StreamServer, session: str) -> None:
        self.world, self.agent, self.coordinator, self.session = world, agent, coordinator, session
        self.is_open = True
        self.is_stalled = False  # half open: no message passes, and neither side is notified
        self._lives = (agent.life, coordinator.life)
        self._arrival_at_agent = self._arrival_at_coordinator = 0.0
        self._on_the_way: deque[tuple[Incoming, int]] = deque()
        self._silent_since = math.inf  # the beginning of a time without heartbeats
        self._silent_until = 0.0

    # ------------------------------------------------------------ messages

    def to_agent(self, event: Incoming, issued_us: int = 0) -> None:
        """Send an event to the agent, signed at an instant [us]."""
        when = self._arrival(self._arrival_at_agent, self._delay())
        self._arrival_at_agent = max(self._arrival_at_agent, when)
        is_welcome = isinstance(event, client.Connected)  # the answer to the call, without which there is no stream
        if self._breaks() or (not is_welcome and self.world.happens("dropped")):
            return
        self._on_the_way.append((event, issued_us))
        self.world.at(when, self._next_at_agent, self.agent)
        if not is_welcome and self.world.happens("repeated"):
            self.world.after(self._until_the_repeat(), lambda: self._again_to_agent(event), self.agent)

    def _next_at_agent(self) -> None:
        """Deliver the oldest message on the way, unless messages overtake each other; a sleep may not do that."""
        newest = self.world.happens("overtakes") and len(self._on_the_way) > 1
        event, issued_us = self._on_the_way.pop() if newest else self._on_the_way.popleft()
        if self.carries:
            self.agent.heard(self, event, issued_us)

    def to_coordinator(self, message: Outgoing | None) -> None:
        """Send a message to the coordinator; None: a goodbye."""
        delay = self._delay()
        when = self._arrival(self._arrival_at_coordinator, delay)
        if delay:
            self.fall_silent(when)
        self._arrival_at_coordinator = max(self._arrival_at_coordinator, when)
        if self._breaks() or self.world.happens("dropped"):
            return
        self.world.at(when, lambda: self._arrive(message), self.coordinator)
        if message is not None and self.world.happens("repeated"):
            self.world.after(self._until_the_repeat(), lambda: self._again_to_coordinator(message), self.coordinator)

    def _delay(self) -> float:
        world = self.world
        return world.rng.expovariate(1 / world.scenario.faults.delay) if world.happens("delayed") else 0.0

    def _arrival(self, before: float, delay: float) -> float:
        """Return the arrival of a message that is sent now: after all earlier ones, unless it overtakes them."""
        arrival = self.world.now + self.world.latency() + delay
        return arrival if arrival >= before or self.world.happens("overtakes") else before

    def _breaks(self) -> bool:
        if not self.world.happens("broken_by"):
            return False
        self.cut()
        return True

    def _arrive(self, message: Outgoing | None) -> None:
        is_goodbye = message is None and self.is_open and not self.is_stalled  # sent by a process that has ended
        if self.carries or is_goodbye or (not self.is_stalled and self.world.happens("arrives_after_the_end")):
            self.coordinator.streams.heard(self, message)

    def _until_the_repeat(self) -> float:
        return self.world.rng.expovariate(1 / 10)

    def _again_to_agent(self, event: Incoming) -> None:
        if (newest := self.agent.connection) is not None and newest.carries:
            self.agent.heard(newest, event)

    def _again_to_coordinator(self, message: Outgoing) -> None:
        if (newest := self.agent.connection) is not None and newest.carries:
            self.coordinator.streams.heard(newest, message)

    @property
    def carries(self) -> bool:
        """Return whether a message in transit still arrives."""
        return self.is_open and not self.is_stalled and self._lives == (self.agent.life, self.coordinator.life)

    # ------------------------------------------------------------ silence

    @property
    def silent_for(self) -> float:
        """The time since the coordinator's last heartbeat [s]; 0 while heartbeats arrive in time."""
        if not self.carries:
            return math.inf
        now = self.world.now
        return now - self._silent_since if now < self._silent_until else 0.0

    def fall_silent(self, until: float) -> None:
        """Let no heartbeat through until then."""
        now = self.world.now
        if now >= self._silent_until:
            self._silent_since = now
        self._silent_until = max(self._silent_until, until)

    def block(self, until: float, *, to_agent: bool, to_coordinator: bool) -> None:
        """Block one or both directions; messages sent meanwhile arrive at the end, if the stream is still open."""
        if to_coordinator:
            self._arrival_at_coordinator = max(self._arrival_at_coordinator, until)
            self.fall_silent(until)
        if to_agent:
            self._arrival_at_agent = max(self._arrival_at_agent, until)
        patience = self.world.rng.uniform(0.5, self.world.scenario.server_lease)  # the client's keepalive timeout
        if self.world.now + patience < until:
            self.world.after(patience, self.close, self.agent)

    # ------------------------------------------------------------ the end

    def cut(self, *, half_open: bool = False) -> None:
        """Break the stream; each side notices after some time, or (half open) the coordinator only by the lease."""
        if not self.is_open:
            return
        rng = self.world.rng
        if half_open:
            self.is_stalled = True
            self.world.after(rng.uniform(0.5, self.world.scenario.server_lease), self.close, self.agent)
            return
        self.close()
        self.world.after(rng.uniform(0, 2), lambda: self.coordinator.streams.ended(self), self.coordinator)

    def close(self) -> None:
        """Close the stream; the agent notices soon, or after the end of a block."""
        self.is_open = False
        blocked = min(max(0.0, self._arrival_at_agent - self.world.now), self.world.scenario.server_lease)
        self.world.after(blocked + self.world.rng.uniform(0, 0.5), lambda: self.agent.disconnected(self), self.agent)


class Upload:
    """One attempt to upload an update: begin, transfer, judge, answer; each step may fail."""

    def __init__(
        self,
        world: World,
        agent: UploadAgent,
        coordinator: UploadServer,
        key: client.Key,
        update: Update,
        fault: RejectReason | None,
    ) -> None:
        self.world, self.agent, self.coordinator = world, agent, coordinator
        self.key, self.update, self.fault = key, update, fault
        self.is_over = False
        self._server_life = coordinator.life
        world.after(world.latency(), self._begin)

    def cancel(self) -> None:
        """Cancel the attempt; the agent does not want an answer any more."""
        self.is_over = True

    def cut(self) -> None:
        """Break the stream of bytes, and notify the agent."""
        if not self.is_over:
            self.is_over = True
            self.world.after(
                self.world.rng.uniform(0, 1),
                lambda: self.agent.upload_ended(self, client.UploadCut(self.key)),
                self.agent,
            )

    def _reaches_server(self) -> bool:
        if self.is_over:
            return False
        server = self.coordinator
        stands = server.is_up and server.life == self._server_life and server.has_room() and self.agent.is_online
        is_there = server.is_up and server.life == self._server_life and self.agent.is_online
        if is_there and not server.has_room():
            server.refuses_for_room()
        if not stands or self.world.happens("upload_cut", 0.5):
            self.cut()
            return False
        return True

    def _begin(self) -> None:
        self._server_life = self.coordinator.life
        if not self._reaches_server():
            return
        if self.fault in IN_THE_MANIFEST:
            self._refuse(self.fault)
            return
        if self.world.rng.random() < 0.5:  # the service judges the manifest before it receives the bytes
            machine = self.coordinator.running
            if (refusal := machine.refusal(self.update)) is not None:
                self._answer(client.Answered(self.key, False, *refusal))
                return
            if machine.is_accepted(self.update) or machine.is_hopeless(self.update):
                self.coordinator.update_arrived(self.update, self._judged)
                return
        self.coordinator.upload_begun(self.update)
        seconds = self.world.rng.uniform(0.5, 1.5) * self.world.scenario.upload
        transfer(self.world, self.agent, self.coordinator, seconds, self._transferred, self.cut)

    def _transferred(self) -> None:
        if not self._reaches_server():
            return
        if self.world.happens("upload_damaged"):
            reason = RejectReason.DIGEST_MISMATCH
            self._answer(client.Answered(self.key, False, reason, resend=True))
        elif self.fault is not None:
            self._refuse(self.fault)
        else:
            self.coordinator.update_arrived(self.update, self._judged)
            if self.world.happens("upload_repeated"):
                self.world.after(self.world.rng.expovariate(1 / 20), self._repeat)

    def _repeat(self) -> None:
        """Deliver a copy of the update from another path."""
        if self.coordinator.is_up:
            self.coordinator.update_arrived(self.update, None)

    def _refuse(self, reason: RejectReason) -> None:
        self.coordinator.update_refused(
            self.update, reason, lambda _: self._answer(client.Answered(self.key, False, reason))
        )

    def _judged(self, effects: tuple[Effect, ...]) -> None:
        """Send the verdict, which is on disk."""
        for effect in effects:
            if isinstance(effect, Accept) and effect.digest == self.update.digest:
                self.coordinator.acknowledged(effect)
                self._answer(client.Answered(self.key, True))
                return
            if isinstance(effect, Reject) and effect.digest == self.update.digest:
                self._answer(client.Answered(self.key, False, effect.reason, effect.detail))
                return
        raise AssertionError("the machine did not answer an update")

    def _answer(self, event: client.Answered) -> None:
        if self.is_over:
            return
        if self.world.happens("verdict_lost"):
            self.cut()
            return
        self.world.after(self.world.latency(), lambda: self.agent.upload_ended(self, event), self.agent)
