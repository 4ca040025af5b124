"""The coordinator of a simulated run, of rounds or of messages: connections, leases, verdicts, and its machine."""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from atoll.client.session import events as client
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.vocabulary import ClientId, Digest, LossReason, RejectReason, RoundId, RunId, RunState
from atoll.server.config.run import RunConfig
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.members.member import Profile
from atoll.server.rounds.events import (
    Accept,
    ClientDisconnected,
    ClientJoined,
    ClientLost,
    Reject,
    Release,
    TimePassed,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)
from atoll.server.rounds.run_machine import RunMachine
from atoll.simulations.federation.host import Client
from atoll.simulations.federation.timeline import DeadlineTimer, Timeline
from atoll.simulations.secure.site_sums import Said
from atoll.task.task import task_name

M = TypeVar("M", RunMachine, ExchangeMachine)


class Coordinator(ABC, Generic[M]):
    """Coordinator of one run; a kind of run carries out the effects of its machine.

    Args:
        timeline: virtual time.
        config: the settings of the run.
        machine: the state machine of its run.
        lease: the time after which a disconnected client is lost [virtual s].
    """

    def __init__(self, timeline: Timeline, config: RunConfig, machine: M, lease: float) -> None:
        self._timeline, self._lease = timeline, lease
        self.config = config
        self.machine: M = machine
        self.run_id = RunId(f"{config.name}-1")
        self.bytes_down = self.bytes_up = 0
        self._task = task_name(config.task)
        self._connected: dict[ClientId, Client] = {}
        self._timer = DeadlineTimer(timeline, lambda: self.machine.deadline, lambda: self.post(TimePassed()))

    @property
    def is_running(self) -> bool:
        """Return whether the run has begun and not ended."""
        return self.machine.ledger.state is RunState.RUNNING

    def post(self, event: Any) -> tuple[Any, ...]:
        """Pass an event to the machine, and execute its effects."""
        effects: tuple[Any, ...] = self.machine.receive(event, self._timeline.now)
        for effect in effects:
            self._act(effect)
        self._timer.arm()
        return effects

    @abstractmethod
    def _act(self, effect: Any) -> None:
        """Execute an effect; Accept and Reject are left to the caller of `post`, who answers the client."""

    def _send(self, client_id: ClientId, event: client.Event) -> None:
        if (site := self._connected.get(client_id)) is not None:
            site.hear(event)

    def _release(self, effect: Release) -> None:
        released = client.Released(self.run_id, effect.round_id, effect.reason, effect.submit)
        self._send(effect.client_id, released)

    # ------------------------------------------------------------ clients

    def joined(self, site: Client, working_on: tuple[RoundId, ...]) -> None:
        """Register a client that has opened its control stream."""
        self._connected[site.client_id] = site
        if self.is_running:
            profile, joins = Profile(site.num_examples, ""), self.config.secure is not None
            joined = ClientJoined(site.client_id, site.name_of_session, profile, working_on, joins_sessions=joins)
            self.post(joined)

    def left(self, site: Client) -> None:
        """Unregister a client whose control stream has ended, and start its lease."""
        del self._connected[site.client_id]
        if self.is_running:
            self.post(ClientDisconnected(site.client_id, site.name_of_session))
            self.start_lease(site)

    def start_lease(self, site: Client) -> None:
        """Start the lease of a disconnected client, after which it is lost."""
        self._timeline.after(self._lease, self._lease_over, site, site.life)

    def _lease_over(self, site: Client, life: int) -> None:
        if not site.is_awake and site.life == life and self.is_running:
            self.post(ClientLost(site.client_id, LossReason.LEASE_EXPIRED))

    @abstractmethod
    def heard(self, site: Client, message: client.Effect) -> None:
        """Handle a client's report: that it failed, or the result of its evaluation."""

    def heard_in_sum(self, site: Client, of: SessionName, message: Said) -> None:
        """Handle a message of a client's member of a session: of a run with secure sums."""
        raise NotImplementedError

    # ------------------------------------------------------------ downloads and uploads

    @abstractmethod
    def bytes_of(self, digest: Digest) -> int:
        """Return the size of a site's download [bytes]."""

    def upload_begun(self, update: Update) -> client.Answered | None:
        """Judge an upload by its manifest, as `hosting.judge` does; None: the bytes are wanted."""
        if self.machine.is_accepted(update):
            return self._decide(update)
        if (refusal := self.machine.refusal(update)) is not None:
            return client.Answered(self._key(update), False, *refusal)
        if self._is_hopeless(update):
            return self._decide(update)
        if fault := self._fault_of(update):
            self.post(UpdateRefused(update.client_id, update.round_id, RejectReason.WRONG_LAYOUT, fault))
            return client.Answered(self._key(update), False, RejectReason.WRONG_LAYOUT, fault)
        if self._is_first_upload(update):
            self.post(UploadBegun(update.client_id, update.round_id))
        return None

    def _is_hopeless(self, update: Update) -> bool:
        """Return whether an update would be refused because of its claims."""
        return False

    @abstractmethod
    def _fault_of(self, update: Update) -> str:
        """Return why an update's size does not fit this run; empty: it does."""

    @abstractmethod
    def _is_first_upload(self, update: Update) -> bool:
        """Return whether the beginning of an upload changes the state."""

    def update_arrived(self, update: Update) -> client.Answered:
        """Receive the bytes of an update, and return the verdict."""
        self.bytes_up += update.num_bytes
        return self._decide(update)

    def _decide(self, update: Update) -> client.Answered:
        for effect in self.post(UpdateReceived(update)):
            if isinstance(effect, Accept) and effect.digest == update.digest:
                return client.Answered(self._key(update), True)
            if isinstance(effect, Reject) and effect.digest == update.digest:
                return client.Answered(self._key(update), False, effect.reason, effect.detail)
        raise AssertionError("the machine did not answer an update")

    def _key(self, update: Update) -> client.Key:
        return ("round", self.run_id, update.round_id)
