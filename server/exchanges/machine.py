"""A run of messages as a pure state machine: a server program's calls, the exchanges they open, their replies.

    QUEUED --RunStarted--> RUNNING --ProgramEnded: main() returned--> FINISHED
                                   --it raised, died too often, became another program--> FAILED
                                   --StopRequested--> STOPPED
    FAILED, STOPPED --ResumeRequested--> RUNNING: a new process repeats the program and goes on

Every call is an event of the journal, and what it returns follows from the journal alone. So a new process of the
program, after a crash of the old one or of the coordinator, is answered as the old one was (`repetition`), and an
exchange that was open goes on meanwhile: its nodes keep their messages, and their replies are kept.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.aggregation.printable import count_of
from atoll.protocol.vocabulary import (
    TERMINAL,
    ClientId,
    Digest,
    Fate,
    LossReason,
    RejectReason,
    ReleaseReason,
    RoundId,
    RunState,
    Version,
)
from atoll.server.exchanges.events import (
    AnswerMessages,
    AnswerNodes,
    Deliver,
    Effect,
    Effects,
    Event,
    ExchangeAsked,
    NodesAsked,
    ProgramEnded,
    ProgramStarted,
    RecordExchange,
    RepliesPulled,
    StartProgram,
)
from atoll.server.exchanges.exchange import Exchange, Sent, end
from atoll.server.exchanges.nodes import Nodes
from atoll.server.exchanges.repetition import Diverged, Held, Look, Pull, Repetition
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.rounds.events import (
    Accept,
    ClientDisconnected,
    ClientFailed,
    ClientJoined,
    ClientLost,
    CoordinatorStarted,
    EndRun,
    Reject,
    Release,
    ResumeRequested,
    RunStarted,
    StopRequested,
    TimePassed,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)


@dataclass(slots=True)
class Ledger:
    """The state of a run of messages."""

    state: RunState = RunState.QUEUED
    cause: str = ""
    now: float = 0.0
    membership: Nodes = field(default_factory=Nodes)
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    """All exchanges by number, in order."""
    of_message: dict[RoundId, int] = field(default_factory=dict)
    """The exchange of each message."""
    looks: list[Look] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    version: Version = Version(0)  # noqa: RUF009 - a run of messages has none but this
    model_digest: Digest = Digest("")  # noqa: RUF009
    early_stop: str = ""
    pause_reason: str | None = None
    deaths: int = 0
    """Deaths of the program's process since the newest exchange."""
    open: dict[int, Exchange] = field(default_factory=dict)
    """The exchanges that are not closed."""

    @property
    def is_open(self) -> bool:
        """Return whether the run has begun and not ended."""
        return self.state is RunState.RUNNING

    def sent(self, number: RoundId) -> Sent | None:
        """Return a message by its number; None: there is none."""
        exchange = self.exchanges.get(self.of_message.get(number, 0))
        return None if exchange is None else exchange.sent[number - exchange.numbers[0]]

    def place(self, number: RoundId) -> int:
        """Return the place of a message in the call that sent it, from 0."""
        return number - self.exchanges[self.of_message[number]].numbers[0]


class ExchangeMachine:
    """The machine of one run of messages; the module's docstring has the diagram."""

    def __init__(self, rules: ExchangeRules) -> None:
        self.rules, self.ledger, self.process = rules, Ledger(), Repetition()

    @property
    def deadline(self) -> float | None:
        """The time at which the driver must deliver TimePassed [s since the epoch]; None: no timer runs."""
        if not self.ledger.is_open:
            return None
        instants = [exchange.deadline for exchange in self.ledger.open.values()]
        instants += [held.until for held in self.process.held]
        return min((instant for instant in instants if instant is not None), default=None)

    def receive(self, event: Event, now: float) -> Effects:
        """Advance by one event and return its effects. A deadline that has passed takes effect before the event.

        Args:
            event: what happened.
            now: its time [s since the epoch], not before the time of the last event.

        Raises:
            AssertionError: the driver broke its contract (time ran backward): a bug of ours.
        """
        assert now >= self.ledger.now, (now, self.ledger.now)
        self.ledger.now = now
        effects: list[Effect] = []
        if isinstance(event, CoordinatorStarted):
            effects += self._coordinator_started(event, now)
        while (deadline := self.deadline) is not None and now >= deadline:
            effects += self._time_passed(now)
        if not isinstance(event, CoordinatorStarted | TimePassed):
            try:
                effects += HANDLERS[type(event)](self, event, now)
            except Diverged as error:
                effects += self._end(RunState.FAILED, f"{error}: the server program is another one than before")
        return tuple(effects)

    # ------------------------------------------------------------ time

    def _time_passed(self, now: float) -> Effects:
        """Apply every deadline that is here: of a held call, of a message, of a linger."""
        if any(held.until <= now for held in self.process.held):
            cause = f"exchange {next(iter(self.process.left))} was not asked for again within {self.rules.hold:g} s"
            return self._end(RunState.FAILED, f"{cause}: the server program is another one than before")
        effects: list[Effect] = []
        for exchange in [*self.ledger.open.values()]:
            deadline = exchange.deadline
            if deadline is not None and now >= deadline:
                for sent in exchange.time_passed(now, self.rules.grace):
                    why = ReleaseReason.OUT_OF_TIME if sent.fate is Fate.STRAGGLER else ReleaseReason.ROUND_CLOSED
                    effects += self._take_back(sent, why, now)
                effects += self._settle(exchange, now)
        return tuple(effects)

    def _coordinator_started(self, event: CoordinatorStarted, now: float) -> Effects:
        ledger = self.ledger
        ledger.membership.everyone_disconnected()
        if not ledger.is_open:
            return ()
        for exchange in ledger.open.values():
            exchange.extend(max(0.0, now - event.down_since), self.rules.outage_max)
        self._forget_process()
        return (StartProgram(),)  # its process has ended with the coordinator's

    # ------------------------------------------------------------ clients

    def _client_joined(self, event: ClientJoined, now: float) -> Effects:
        client_id = event.client_id
        node = self.ledger.membership.joined(event)
        unknown = (number for number in event.working_on if number not in node.queue)
        effects: list[Effect] = [Release(client_id, number, self._why_released()) for number in unknown]
        return (*effects, *self._deliver_next(client_id, now))

    def _why_released(self) -> ReleaseReason:
        return ReleaseReason.ROUND_CLOSED if self.ledger.is_open else ReleaseReason.RUN_ENDED

    def _client_disconnected(self, event: ClientDisconnected, now: float) -> Effects:
        self.ledger.membership.disconnected(event.client_id, event.session)
        return ()

    def _client_lost(self, event: ClientLost, now: float) -> Effects:
        self.ledger.membership.lost(event.client_id)
        node = self.ledger.membership.members.get(event.client_id)
        numbers = [] if node is None else [*node.queue]
        ended = (self._ended(number, Fate.LOST, event.reason, event.detail, now) for number in numbers)
        return tuple(effect for effects in ended for effect in effects)

    def _client_failed(self, event: ClientFailed, now: float) -> Effects:
        sent = self._waiting(event.client_id, event.round_id)
        return self._ended(sent.number, Fate.FAILED, event.reason, event.detail, now) if sent else ()

    def _upload_begun(self, event: UploadBegun, now: float) -> Effects:
        if (sent := self._waiting(event.client_id, event.round_id)) is not None:
            sent.has_begun = True
        return ()

    def _update_refused(self, event: UpdateRefused, now: float) -> Effects:
        sent = self._waiting(event.client_id, event.round_id)
        return self._ended(sent.number, Fate.REFUSED, event.reason, event.detail, now) if sent else ()

    def _update_received(self, event: UpdateReceived, now: float) -> Effects:
        update = event.update
        client_id, number, digest = update.client_id, update.round_id, update.digest
        if self.is_accepted(update):
            return (Accept(client_id, number, digest),)
        if (fault := self.refusal(update)) is not None:
            return (Reject(client_id, number, digest, *fault),)
        sent = self.ledger.sent(number)
        assert sent is not None
        sent.reply, sent.num_bytes = digest, update.num_bytes
        self.ledger.membership.members[client_id].counted = number
        return (Accept(client_id, number, digest), *self._ended(number, Fate.REPORTED, "", "", now))

    def is_accepted(self, update: Update) -> bool:
        """Return whether this same reply was accepted before, so that only its answer was lost."""
        sent = self.ledger.sent(update.round_id)
        return sent is not None and sent.message.client_id == update.client_id and sent.reply == update.digest

    def refusal(self, update: Update) -> tuple[RejectReason, str] | None:
        """Return why a reply cannot count, before its bytes are sent; None: they are wanted."""
        number, sent = update.round_id, self.ledger.sent(update.round_id)
        if self.ledger.state in TERMINAL:
            return RejectReason.RUN_ENDED, f"the run is {self.ledger.state}: {self.ledger.cause}"
        if sent is None:
            return RejectReason.WRONG_ROUND, f"there is no message {number}"
        if sent.message.client_id != update.client_id:
            return RejectReason.NOT_INVITED, f"message {number} was not for {update.client_id}"
        if sent.reply is not None or sent.fate is Fate.REFUSED:
            return RejectReason.ALREADY_REPORTED, f"message {number} has another reply of yours"
        if not sent.is_waiting:
            return RejectReason.TOO_LATE, f"message {number} has ended: {sent.fate}"
        return None

    def waits_for(self, client_id: ClientId, number: RoundId) -> bool:
        """Return whether a client's failure or reply to a message changes anything."""
        return self._waiting(client_id, number) is not None

    def _waiting(self, client_id: ClientId, number: RoundId) -> Sent | None:
        sent = self.ledger.sent(number)
        is_its = sent is not None and sent.is_waiting and sent.message.client_id == client_id
        return sent if is_its else None

    # ------------------------------------------------------------ messages

    def _ended(self, number: RoundId, fate: Fate, reason: str, detail: str, now: float) -> Effects:
        """End a message by its node, deliver the node's next one, and close the exchange if it was the last."""
        sent = self.ledger.sent(number)
        assert sent is not None
        end(sent, fate, now, str(reason), detail)
        effects = self._dequeue(sent, now)
        exchange = self.ledger.exchanges[self.ledger.of_message[number]]
        return (*effects, *self._settle(exchange, now))

    def _take_back(self, sent: Sent, reason: ReleaseReason, now: float) -> Effects:
        """Release the node of a message that has ended without it, and deliver the node's next message."""
        was_delivered = sent.delivered_at is not None
        release = (Release(sent.message.client_id, sent.number, reason),) if was_delivered else ()
        return (*release, *self._dequeue(sent, now))

    def _dequeue(self, sent: Sent, now: float) -> Effects:
        queue = self.ledger.membership.members[sent.message.client_id].queue
        was_first = queue[0] == sent.number
        queue.remove(sent.number)
        return self._deliver_next(sent.message.client_id, now) if was_first else ()

    def _deliver_next(self, client_id: ClientId, now: float) -> Effects:
        """Deliver the first message of a connected node, again if it has reconnected."""
        node = self.ledger.membership.members[client_id]
        if node.session is None or not node.queue or not self.ledger.is_open:
            return ()
        sent = self.ledger.sent(node.queue[0])
        assert sent is not None
        sent.delivered_at = now if sent.delivered_at is None else sent.delivered_at
        return (Deliver(sent.number, sent.message, sent.deadline, node.counted),)

    def _settle(self, exchange: Exchange, now: float) -> Effects:
        """Close an exchange if it can close, and let the call that waits for it return."""
        if not exchange.settle(now, self.rules.linger):
            return ()
        del self.ledger.open[exchange.number]
        effects: list[Effect] = [RecordExchange(exchange.number)]
        if exchange.is_waiting and (call := self.process.claimed.get(exchange.number)) is not None:
            effects.append(AnswerMessages(call, exchange.answered))
        return tuple(effects)

    # ------------------------------------------------------------ the program's calls

    def _program_started(self, event: ProgramStarted, now: float) -> Effects:
        self._forget_process()
        return ()

    def _forget_process(self) -> None:
        """Begin a repetition: no call of an earlier process is answered any more."""
        self.process = Repetition.of(self.ledger.exchanges)

    def _exchange_asked(self, event: ExchangeAsked, now: float) -> Effects:
        if not self.ledger.is_open:
            return ()
        process, is_behind = self.process, bool(self.process.left)
        if (before := process.claim(event)) is None and is_behind:
            process.held.append(Held(event, now + self.rules.hold))
            return ()
        if before is None:
            return self._open(event, now)
        answer = self._repeated(before, event.call)
        if process.left:
            return answer
        held, process.held = process.held, []  # all of before is asked for again: what was held is new
        return (*answer, *(effect for one in held for effect in self._open(one.asked, now)))

    def _repeated(self, exchange: Exchange, call: int) -> Effects:
        if not exchange.is_waiting:
            return (AnswerMessages(call, exchange.numbers, is_pushed=True),)
        return () if exchange.is_open else (AnswerMessages(call, exchange.answered),)

    def _open(self, asked: ExchangeAsked, now: float) -> Effects:
        """Open an exchange, and deliver each message whose node has no other."""
        ledger = self.ledger
        number, first = len(ledger.exchanges) + 1, RoundId(len(ledger.of_message) + 1)
        exchange = Exchange.opened(number, first, asked, self.rules, now)
        ledger.exchanges[number] = ledger.open[number] = exchange
        ledger.deaths, self.process.claimed[number] = 0, asked.call
        effects: list[Effect] = [RecordExchange(number)]
        for sent in exchange.sent:
            ledger.of_message[sent.number] = number
            client_id = sent.message.client_id
            if not ledger.membership.takes(client_id):
                end(sent, Fate.LOST, now, LossReason.LEFT, "no such node is here")
                continue
            queue = ledger.membership.members[client_id].queue
            queue.append(sent.number)
            if queue[0] == sent.number:
                effects += self._deliver_next(client_id, now)
        if not exchange.is_waiting:
            effects.append(AnswerMessages(asked.call, exchange.numbers, is_pushed=True))
        return (*effects, *self._settle(exchange, now))

    def _replies_pulled(self, event: RepliesPulled, now: float) -> Effects:
        if not self.ledger.is_open:
            return ()
        before = self.process.pull(self.ledger.pulls, event.numbers)
        got = self.pullable(event.numbers) if before is None else before
        if before is None and got:
            self.ledger.pulls.append(Pull(event.numbers, got))
            self.process.num_pulls += 1
        for number in got:
            sent = self.ledger.sent(number)
            assert sent is not None
            sent.is_pulled = True
        return (AnswerMessages(event.call, got),)

    def pullable(self, numbers: Iterable[RoundId]) -> tuple[RoundId, ...]:
        """Return those messages that have ended and whose replies were not pulled before, in the order given."""
        found = ((number, self.ledger.sent(number)) for number in numbers)
        return tuple(number for number, sent in found if sent and not sent.is_waiting and not sent.is_pulled)

    def has_pull_for(self, numbers: Iterable[RoundId]) -> bool:
        """Return whether a pull may return anything; one that returns nothing need not be an event."""
        return self.process.num_pulls < len(self.ledger.pulls) or bool(self.pullable(numbers))

    def _nodes_asked(self, event: NodesAsked, now: float) -> Effects:
        if not self.ledger.is_open:
            return ()
        process, ledger = self.process, self.ledger
        nodes = process.look(ledger.looks)
        if nodes is None and process.left:
            nodes = ledger.membership.present  # it did not look here before: a difference that its messages will show
        elif nodes is None:
            nodes = ledger.membership.present
            ledger.looks.append(Look(len(process.claimed), nodes))
            process.num_looks = len(ledger.looks)
        return (AnswerNodes(event.call, nodes),)

    # ------------------------------------------------------------ the run

    def _run_started(self, event: RunStarted, now: float) -> Effects:
        assert self.ledger.state is RunState.QUEUED, self.ledger.state
        self.ledger.state = RunState.RUNNING
        return (StartProgram(),)

    def _program_ended(self, event: ProgramEnded, now: float) -> Effects:
        ledger = self.ledger
        if not ledger.is_open:
            return ()
        if event.is_dead:
            self._forget_process()
            ledger.deaths += 1
            if ledger.deaths <= self.rules.restarts_max:
                return (StartProgram(),)
            times = f"{count_of(ledger.deaths, 'time')} without a new exchange in between"
            return self._end(RunState.FAILED, f"the process of the server program died {times}")
        if event.error:
            return self._end(RunState.FAILED, event.error)
        if self.process.left:
            raise Diverged(f"exchange {next(iter(self.process.left))}: main() returned where it asked for it before")
        return self._end(RunState.FINISHED, f"main() returned after {count_of(len(ledger.exchanges), 'exchange')}")

    def _stop(self, event: StopRequested, now: float) -> Effects:
        return self._end(RunState.STOPPED, event.reason) if self.ledger.state not in TERMINAL else ()

    def _resume(self, event: ResumeRequested, now: float) -> Effects:
        ledger = self.ledger
        if ledger.state not in (RunState.FAILED, RunState.STOPPED, RunState.QUEUED):
            return ()
        ledger.state, ledger.cause, ledger.deaths = RunState.QUEUED if event.wait else RunState.RUNNING, "", 0
        return () if event.wait else (StartProgram(),)

    def _end(self, state: RunState, cause: str) -> Effects:
        """End the run: the open exchanges close with the replies that they have."""
        ledger = self.ledger
        effects: list[Effect] = []
        ledger.state, ledger.cause, self.process.held = state, cause, []
        for exchange in [*ledger.open.values()]:
            exchange.is_void = True
            for sent in exchange.waiting:
                end(sent, Fate.RELEASED, ledger.now, f"the run ended first ({state})")
                effects += self._take_back(sent, ReleaseReason.RUN_ENDED, ledger.now)
            effects += self._settle(exchange, ledger.now)
        return (*(effect for effect in effects if not isinstance(effect, AnswerMessages)), EndRun(state, cause))


HANDLERS: Mapping[type[Event], Callable[[ExchangeMachine, Any, float], Effects]] = {
    ProgramStarted: ExchangeMachine._program_started,
    ExchangeAsked: ExchangeMachine._exchange_asked,
    RepliesPulled: ExchangeMachine._replies_pulled,
    NodesAsked: ExchangeMachine._nodes_asked,
    ProgramEnded: ExchangeMachine._program_ended,
    RunStarted: ExchangeMachine._run_started,
    ClientJoined: ExchangeMachine._client_joined,
    ClientDisconnected: ExchangeMachine._client_disconnected,
    ClientLost: ExchangeMachine._client_lost,
    ClientFailed: ExchangeMachine._client_failed,
    UploadBegun: ExchangeMachine._upload_begun,
    UpdateReceived: ExchangeMachine._update_received,
    UpdateRefused: ExchangeMachine._update_refused,
    StopRequested: ExchangeMachine._stop,
    ResumeRequested: ExchangeMachine._resume,
}
"""The handler of each event, but for CoordinatorStarted and TimePassed, as in `rounds.run_machine`."""
