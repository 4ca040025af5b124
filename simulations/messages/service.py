"""The coordinator of a simulated run of messages: the machine of a real one, and the execution of its effects."""

import json
from typing import Protocol

from atoll.aggregation.printable import count_of
from atoll.client.session import events as client
from atoll.parallel.task.flower_app import simulated_number
from atoll.parallel.task.randomness import training_seed
from atoll.parallel.task.task import task_name
from atoll.protocol.vocabulary import ClientId, Digest, LossReason, RejectReason, RoundId, RunId, RunState, Version
from atoll.server.config.run import RunConfig
from atoll.server.exchanges.events import (
    AnswerMessages,
    AnswerNodes,
    Deliver,
    Effect,
    Effects,
    Event,
    RecordExchange,
    StartProgram,
)
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.programs.contents import Contents
from atoll.server.rounds.events import (
    Accept,
    ClientDisconnected,
    ClientFailed,
    ClientJoined,
    ClientLost,
    EndRun,
    Profile,
    Reject,
    Release,
    TimePassed,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)
from atoll.simulations.federation.host import Client
from atoll.simulations.federation.timeline import EPOCH, DeadlineTimer, Timeline


class ProgramHost(Protocol):
    """The federation around a coordinator: it runs the server program and records the exchanges."""

    def start_program(self) -> None:
        """Start a process of the program; an older one is killed first."""

    def answer_nodes(self, effect: AnswerNodes) -> None:
        """Let a call return with nodes."""

    def answer_messages(self, effect: AnswerMessages) -> None:
        """Let a call return with replies."""

    def exchange_changed(self, number: int) -> None:
        """Record an exchange that has opened or closed."""

    def run_ended(self) -> None:
        """Stop: the run has ended."""


class MessageService:
    """The coordinator of one run of messages; see `federation.host.Coordinator`.

    Args:
        host: the federation.
        timeline: virtual time.
        contents: the contents of the messages.
        config: the settings of the run.
        lease: the time after which a disconnected client is lost [virtual s].
    """

    def __init__(
        self, host: ProgramHost, timeline: Timeline, contents: Contents, config: RunConfig, lease: float
    ) -> None:
        self._host, self._timeline, self._contents, self._lease = host, timeline, contents, lease
        self.config, self.machine = config, ExchangeMachine(config.exchange_rules)
        self.run_id = RunId(f"{config.name}-1")
        self.bytes_down = self.bytes_up = 0
        self._task, self._local = task_name(config.task), json.dumps(config.given, sort_keys=True)
        self.run_number = simulated_number(self._task, config.given, config.seed)
        self._connected: dict[ClientId, Client] = {}
        self._timer = DeadlineTimer(timeline, lambda: self.machine.deadline, lambda: self.post(TimePassed()))

    # ------------------------------------------------------------ events in

    def post(self, event: Event) -> Effects:
        """Let the machine receive an event, and execute its effects."""
        effects = self.machine.receive(event, self._timeline.now)
        for effect in effects:
            self._act(effect)
        self._timer.arm()
        return effects

    @property
    def is_running(self) -> bool:
        """Return whether the run has begun and not ended."""
        return self.machine.ledger.state is RunState.RUNNING

    # ------------------------------------------------------------ effects out

    def _act(self, effect: Effect) -> None:
        match effect:
            case Deliver(message=message):
                self._send(message.client_id, client.Asked(self._invitation(effect)))
            case Release(client_id, round_id, reason, submit):
                self._send(client_id, client.Released(self.run_id, round_id, reason, submit))
            case StartProgram():
                self._host.start_program()
            case AnswerNodes():
                self._host.answer_nodes(effect)
            case AnswerMessages():
                self._host.answer_messages(effect)
            case RecordExchange(number):
                self._host.exchange_changed(number)
            case EndRun():
                self._host.run_ended()
            case Accept() | Reject():
                pass  # the caller of `post` answers the client

    def _send(self, client_id: ClientId, event: client.Event) -> None:
        if (site := self._connected.get(client_id)) is not None:
            site.hear(event)

    def _invitation(self, effect: Deliver) -> client.Invitation:
        message, config = effect.message, self.config
        return client.Invitation(
            self.run_id,
            effect.number,
            self._task,
            Version(effect.number),
            message.content,
            max(0.0, effect.deadline - self._timeline.now),
            seed=training_seed(config.seed, config.name, effect.number, message.client_id),
            local=self._local,
            counted_round=effect.counted,
            model_seed=config.seed,
            message=message.kind,
            group=message.group,
            run_number=self.run_number,
            asked_at=EPOCH + effect.asked_at,
        )

    # ------------------------------------------------------------ clients

    def joined(self, site: Client, working_on: tuple[RoundId, ...]) -> None:
        """Register a client that has opened its control stream."""
        self._connected[site.client_id] = site
        if self.is_running:
            self.post(ClientJoined(site.client_id, site.name_of_session, Profile(site.num_examples, ""), working_on))

    def left(self, site: Client) -> None:
        """Unregister a client whose control stream has ended, and start its lease."""
        del self._connected[site.client_id]
        if self.is_running:
            self.post(ClientDisconnected(site.client_id, site.name_of_session))
            self._timeline.after(self._lease, self._lease_over, site, site.life)

    def _lease_over(self, site: Client, life: int) -> None:
        if not site.is_awake and site.life == life and self.is_running:
            self.post(ClientLost(site.client_id, LossReason.LEASE_EXPIRED))

    def heard(self, site: Client, message: client.Effect) -> None:
        """Receive a client's report that it cannot answer a message."""
        assert isinstance(message, client.ReportFailure), message
        if self.machine.waits_for(site.client_id, message.round_id):
            self.post(ClientFailed(site.client_id, message.round_id, message.reason, message.detail))

    # ------------------------------------------------------------ contents and replies

    def bytes_of(self, digest: Digest) -> int:
        """Return the size of a content [bytes]."""
        return self._contents.keep(digest).manifest.num_bytes

    def upload_begun(self, update: Update) -> client.Answered | None:
        """Judge a reply by its manifest, as `hosting.message_judge` does; None: the bytes are wanted."""
        machine, most = self.machine, self.config.program.reply_max
        if machine.is_accepted(update):
            return self._decide(update)
        if (refusal := machine.refusal(update)) is not None:
            return client.Answered(self._key(update), False, *refusal)
        if update.num_bytes > most:
            fault = f"a reply of {count_of(update.num_bytes, 'byte')}; allowed: at most {most} (program.reply_max)"
            self.post(UpdateRefused(update.client_id, update.round_id, RejectReason.WRONG_LAYOUT, fault))
            return client.Answered(self._key(update), False, RejectReason.WRONG_LAYOUT, fault)
        sent = machine.ledger.sent(update.round_id)
        if sent is not None and not sent.has_begun:
            self.post(UploadBegun(update.client_id, update.round_id))
        return None

    def update_arrived(self, update: Update) -> client.Answered:
        """Receive the bytes of a reply, and return the verdict."""
        self.bytes_up += update.num_bytes
        return self._decide(update)

    def _decide(self, update: Update) -> client.Answered:
        for effect in self.post(UpdateReceived(update)):
            if isinstance(effect, Accept) and effect.digest == update.digest:
                return client.Answered(self._key(update), True)
            if isinstance(effect, Reject) and effect.digest == update.digest:
                return client.Answered(self._key(update), False, effect.reason, effect.detail)
        raise AssertionError("the machine did not answer a reply")

    def _key(self, update: Update) -> client.Key:
        return ("round", self.run_id, update.round_id)
