"""The coordinator of a simulated run of messages: the machine of a real one, and the execution of its effects."""

from typing import Protocol

from atoll.client.session import events as client
from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import Digest, Version
from atoll.server.config.run import RunConfig
from atoll.server.exchanges.events import (
    AnswerMessages,
    AnswerNodes,
    Deliver,
    Effect,
    RecordExchange,
    StartProgram,
)
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.programs.contents import Contents
from atoll.server.rounds.events import (
    Accept,
    ClientFailed,
    EndRun,
    Reject,
    Release,
    Update,
)
from atoll.simulations.federation.coordinator import Coordinator
from atoll.simulations.federation.host import Client
from atoll.simulations.federation.timeline import EPOCH, Timeline
from atoll.task.apps import simulated_number
from atoll.task.randomness import training_seed


class ProgramHost(Protocol):
    """Federation around a coordinator: it runs the server program and records the exchanges."""

    def start_program(self) -> None:
        """Start a process of the program, after killing the previous one."""

    def answer_nodes(self, effect: AnswerNodes) -> None:
        """Answer a call of the program with the connected nodes."""

    def answer_messages(self, effect: AnswerMessages) -> None:
        """Answer a call of the program with replies."""

    def exchange_changed(self, number: int) -> None:
        """Record an exchange that has opened or closed."""

    def run_ended(self) -> None:
        """End the federation's run, because the run of the coordinator has ended."""


class MessageService(Coordinator[ExchangeMachine]):
    """Coordinator of one run of messages.

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
        super().__init__(timeline, config, ExchangeMachine(config.exchange_rules), lease)
        self._host, self._contents, self._local = host, contents, config.local_text
        self.run_number = simulated_number(self._task, config.given, config.seed)

    # ------------------------------------------------------------ effects out

    def _act(self, effect: Effect) -> None:
        match effect:
            case Deliver(message=message):
                self._send(message.client_id, client.Asked(self._invitation(effect)))
            case Release():
                self._release(effect)
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

    def heard(self, site: Client, message: client.Effect) -> None:
        """Receive a client's report that it cannot answer a message."""
        assert isinstance(message, client.ReportFailure), message
        if self.machine.waits_for(site.client_id, message.round_id):
            self.post(ClientFailed(site.client_id, message.round_id, message.reason, message.detail))

    # ------------------------------------------------------------ contents and replies

    def bytes_of(self, digest: Digest) -> int:
        """Return the size of a message's content [bytes]."""
        return self._contents.keep(digest).manifest.num_bytes

    def _fault_of(self, update: Update) -> str:
        most = self.config.program.reply_max
        size = count_of(update.num_bytes, "byte")
        return f"a reply of {size}; allowed: at most {most} (program.reply_max)" if update.num_bytes > most else ""

    def _is_first_upload(self, update: Update) -> bool:
        sent = self.machine.ledger.sent(update.round_id)
        return sent is not None and not sent.has_begun
