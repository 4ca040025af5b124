"""A run of messages as a pure state machine: a server program's calls, the exchanges they open, their replies.

    QUEUED --RunStarted--> RUNNING --ProgramEnded: main() returned--> FINISHED
                                   --it raised, died too often, became another program--> FAILED
                                   --StopRequested--> STOPPED
                                   --PauseRequested, no exchange open--> PAUSED --ResumeRequested--> RUNNING
    FAILED, STOPPED --ResumeRequested--> RUNNING: a new process repeats the program and continues

Every call is an event of the journal, and its result follows from the journal alone. So a new process of the program,
after a crash of the old one or of the coordinator, gets the same answers as the old one (`repetition`), and an open
exchange continues meanwhile: its nodes keep their messages, and their replies are kept. While the run is paused, its
program gets answers, but new messages wait.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import (
    TERMINAL,
    ClientId,
    Fate,
    LossReason,
    ReleaseReason,
    RoundId,
    RunState,
)
from atoll.server.exchanges.call import Call
from atoll.server.exchanges.deliveries import Deliveries
from atoll.server.exchanges.events import (
    AnswerMessages,
    AnswerNodes,
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
from atoll.server.exchanges.exchange import FILES_LOST, Settled, end
from atoll.server.exchanges.repetition import Diverged, Forgotten, Held, Pull, Repetition
from atoll.server.invariants import Violation
from atoll.server.rounds.events import (
    ClientDisconnected,
    ClientFailed,
    ClientJoined,
    ClientLost,
    CoordinatorStarted,
    EndRun,
    FilesLost,
    PauseRequested,
    PauseRun,
    ResumeRequested,
    RunStarted,
    StopRequested,
    TimePassed,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)

ANOTHER = "the server program is not deterministic: its code changed, or it sends a clock reading or unseeded numbers"


class ExchangeMachine(Deliveries):
    """State machine of one run of messages; the module's docstring has the diagram."""

    @property
    def deadline(self) -> float | None:
        """The time at which the driver must deliver TimePassed [s since the epoch]; None: no timer runs."""
        if self.ledger.state is not RunState.RUNNING:
            return None
        if self.ledger.awaited:
            instants: list[float | None] = [self.ledger.awaited_until]
        else:
            instants = [exchange.deadline for exchange in self.ledger.open.values()]
        instants += [self.process.pull_by, *(held.until for held in self.process.held)]
        return min((instant for instant in instants if instant is not None), default=None)

    def receive(self, event: Event, now: float) -> Effects:
        """Advance by one event and return its effects. A deadline that has passed takes effect before the event.

        Args:
            event: the event to handle.
            now: its time [s since the epoch], not before the time of the last event.

        Raises:
            AssertionError: the driver broke its contract (time ran backward), which is a bug of Atoll.
        """
        assert now >= self.ledger.now, (now, self.ledger.now)
        self.ledger.now, self._closed = now, {}
        effects: list[Effect] = []
        if isinstance(event, CoordinatorStarted):
            effects += self._coordinator_started(event, now)
        while (deadline := self.deadline) is not None and now >= deadline:
            effects += self._time_passed(now)
        if not isinstance(event, CoordinatorStarted | TimePassed):
            try:
                effects += HANDLERS[type(event)](self, event, now)
            except Diverged as error:
                effects += self._end(RunState.FAILED, f"{error}: {ANOTHER}")
            except Forgotten as error:
                effects += self._end(RunState.FAILED, f"{error}: the server program cannot be repeated")
        effects += self._pause_if_quiet()
        return tuple(effects)

    def validate(self) -> None:
        """Check architecture, invariants 1 to 5, where exchanges are rounds and replies updates; raises Violation."""
        ledger, deadline, process = self.ledger, self.deadline, self.process
        ledger.validate()
        if deadline is not None and deadline <= ledger.now:
            raise Violation(4, f"the deadline {deadline} has passed without an effect at {ledger.now}")
        awaited: dict[ClientId, list[RoundId]] = {client_id: [] for client_id in ledger.membership.members}
        for exchange in ledger.open.values():
            for sent in exchange.waiting:
                awaited[sent.message.client_id].append(sent.number)
        for client_id, node in ledger.membership.members.items():
            if [*node.queue] != awaited[client_id]:
                raise Violation(1, f"{client_id} has {[*node.queue]}, and {awaited[client_id]} are awaited of it")
            first = ledger.sent(node.queue[0]) if node.queue and node.session is not None else None
            if first is not None and first.delivered_at is None and ledger.is_open:
                raise Violation(4, f"message {first.number} is not delivered, and {client_id} is connected")
        if not process.waiting.keys() <= ledger.open.keys():
            raise Violation(4, f"calls {process.waiting} wait for exchanges that are not open: {[*ledger.open]}")

    # ------------------------------------------------------------ time

    def _time_passed(self, now: float) -> Effects:
        """Apply every deadline that has passed: of a held call, of a repeated pull, of a message, of a linger."""
        process = self.process
        missed = [f"exchange {process.left[0]}"] if any(held.until <= now for held in process.held) else []
        missed += [f"pull {process.num_pulls + 1}"] if process.pull_by is not None and process.pull_by <= now else []
        if missed:
            cause = f"{missed[0]} was not requested again within {self.rules.hold:g} s"
            return self._end(RunState.FAILED, f"{cause}: {ANOTHER}")
        if self.ledger.awaited and now >= self.ledger.awaited_until:
            self._all_are_here(now)  # an absent node has lost its lease
            return ()
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
        if event.allowance > 0:
            ledger.awaited = {*ledger.membership.present}
            ledger.awaited_since, ledger.awaited_until = now, now + event.allowance
        self._forget_process()
        return self._start_program()  # its process has ended with the coordinator's

    # ------------------------------------------------------------ the program's calls

    def _program_started(self, event: ProgramStarted, now: float) -> Effects:
        self._forget_process()
        return ()

    def _forget_process(self) -> None:
        """Begin a repetition: calls of earlier processes are no longer answered."""
        ledger = self.ledger
        ledger.process = Repetition(sorted({*ledger.settled, *ledger.open}))

    def _call_of(self, number: int) -> Call:
        return (self.ledger.open.get(number) or self.ledger.settled[number]).call

    def _exchange_asked(self, event: ExchangeAsked, now: float) -> Effects:
        if not self.ledger.is_open:
            return ()
        process, is_behind = self.process, bool(self.process.left)
        if (before := process.claim(event, self._call_of)) is None and is_behind:
            process.held.append(Held(event, now + self.rules.hold))
            return ()
        if before is None:
            return self._open(event, now)
        answer = self._repeated(before, event.call)
        if process.left:
            return answer
        held, process.held = process.held, []  # all earlier exchanges are requested again: held calls are new
        return (*answer, *(effect for one in held for effect in self._open(one.asked, now)))

    def _repeated(self, number: int, call: int) -> Effects:
        """Answer a repeated call with the replies that an earlier process of the program received.

        Raises:
            Forgotten: the replies are no longer kept.
        """
        exchange = self.ledger.open.get(number) or self.ledger.settled[number]
        if number < self.ledger.first_kept(self.rules.keep_replies):
            kept = f"program.keep_replies = {self.rules.keep_replies}"
            raise Forgotten(f"the replies of exchange {number} are no longer kept ({kept})")
        if not exchange.call.is_waiting:
            return (AnswerMessages(call, exchange.numbers, is_pushed=True),)
        if isinstance(exchange, Settled):
            return (AnswerMessages(call, exchange.answered),)
        self.process.waiting[number] = call
        return ()

    def _open(self, asked: ExchangeAsked, now: float) -> Effects:
        """Open an exchange, and deliver each message whose node has no other; a pause delays this."""
        ledger = self.ledger
        if ledger.is_pausing:
            self.process.paused.append(asked)
            return ()
        exchange = ledger.opened(asked, self.rules)
        number, ledger.deaths = exchange.number, 0
        self.process.num_claimed += 1
        if asked.is_waiting:
            self.process.waiting[number] = asked.call
        else:
            ledger.unpulled.update(exchange.numbers)
        effects: list[Effect] = [RecordExchange(number)]
        for sent in exchange.sent:
            client_id = sent.message.client_id
            if not ledger.membership.takes(client_id):
                end(sent, Fate.LOST, now, LossReason.LEFT, "no such node is here")
                continue
            queue = ledger.membership.members[client_id].queue
            queue.append(sent.number)
            if queue[0] == sent.number:
                effects += self._deliver_next(client_id, now)
        if not asked.is_waiting:
            effects.append(AnswerMessages(asked.call, exchange.numbers, is_pushed=True))
        return (*effects, *self._settle(exchange, now))

    def _replies_pulled(self, event: RepliesPulled, now: float) -> Effects:
        if not self.ledger.is_open:
            return ()
        process = self.process
        before = process.pull(self.ledger.pulls, event.numbers, now + self.rules.hold)
        got = self.pullable(event.numbers) if before is None else before
        if before is None and got:
            self.ledger.pulls.append(Pull.of(event.numbers, got, process.num_claimed))
            process.num_pulls += 1
        self.ledger.unpulled.difference_update(got)
        return (AnswerMessages(event.call, got),)

    def pullable(self, numbers: Iterable[RoundId]) -> tuple[RoundId, ...]:
        """Return the messages that have ended and whose replies were not pulled before, in the given order."""
        left = self.ledger.unpulled
        found = ((number, self.ledger.sent(number)) for number in numbers if number in left)
        return tuple(number for number, sent in found if sent is None or not sent.is_waiting)

    def has_pull_for(self, numbers: tuple[RoundId, ...]) -> bool:
        """Return whether a pull can return replies; one that cannot need not be an event."""
        process, pulls = self.process, self.ledger.pulls
        if process.num_pulls < len(pulls):
            return process.pull_by is None or process.is_next(pulls, numbers)
        return bool(self.pullable(numbers))

    def _nodes_asked(self, event: NodesAsked, now: float) -> Effects:
        if not self.ledger.is_open:
            return ()
        process, ledger = self.process, self.ledger
        if (roster := process.look(ledger.looks)) is not None:
            return (AnswerNodes(event.call, ledger.rosters[roster]),)
        nodes = ledger.membership.present
        if not process.left:  # otherwise it did not ask here before: a difference that its messages will show
            ledger.add_look(process.num_claimed, nodes, event.left_out)
            process.num_looks, process.num_times = len(ledger.looks), 1
        return (AnswerNodes(event.call, nodes),)

    def has_looked(self) -> bool:
        """Return whether a call for the nodes gets the last answer again, so that it need not be an event."""
        process, ledger = self.process, self.ledger
        if not ledger.looks or process.num_looks < len(ledger.looks):
            return False
        last = ledger.looks[-1]
        return last.num_exchanges == process.num_claimed and ledger.rosters[last.roster] == ledger.membership.present

    # ------------------------------------------------------------ the run

    def _run_started(self, event: RunStarted, now: float) -> Effects:
        assert self.ledger.state is RunState.QUEUED, self.ledger.state
        self.ledger.state, self.ledger.has_begun = RunState.RUNNING, True
        return self._start_program()

    def _program_ended(self, event: ProgramEnded, now: float) -> Effects:
        ledger = self.ledger
        if not ledger.is_open:
            return ()
        if event.is_dead:
            self._forget_process()
            ledger.deaths += 1
            if ledger.deaths <= self.rules.restarts_max:
                return self._start_program()
            times = f"{count_of(ledger.deaths, 'time')} without a new exchange in between"
            return self._end(RunState.FAILED, f"the process of the server program died {times}")
        if event.error:
            return self._end(RunState.FAILED, event.error)
        if self.process.left:
            raise Diverged(f"exchange {self.process.left[0]}: main() returned, and requested it before")
        return self._end(RunState.FINISHED, f"main() returned after {count_of(ledger.num_exchanges, 'exchange')}")

    def _start_program(self) -> Effects:
        """Start a process, or, in a paused run, once it is resumed."""
        self.ledger.has_process = self.ledger.state is RunState.RUNNING
        return (StartProgram(),) if self.ledger.has_process else ()

    def _pause(self, event: PauseRequested, now: float) -> Effects:
        if self.ledger.state is RunState.RUNNING:
            self.ledger.pause_reason = event.reason
        return ()

    def _files_lost(self, event: FilesLost, now: float) -> Effects:
        """End the messages whose content or reply is lost; if the program has read a lost reply, end the run."""
        ledger, had = self.ledger, {*event.updates}
        if not ledger.is_open:
            return ()
        why = f"lost on the coordinator's disk: {event.detail}"
        effects: list[Effect] = []
        for exchange in [*ledger.open.values()]:
            for sent in [*exchange.sent]:
                is_had = not exchange.call.is_waiting and sent.number not in ledger.unpulled
                if sent.reply in event.updates and not is_had:
                    had.discard(sent.reply)
                    sent.lose_reply(why)
                elif sent.is_waiting and sent.message.content in event.contents:
                    effects += self._ended(sent.number, Fate.LOST, FILES_LOST, why, now)
        if had:
            named = count_of(len(had), "reply", "replies")
            cause = f"{named} that the program has read {'is' if len(had) == 1 else 'are'} {why}: it cannot be repeated"
            effects += self._end(RunState.FAILED, cause)
        return tuple(effects)

    def _pause_if_quiet(self) -> Effects:
        """Pause a run that should pause, once no exchange is open."""
        ledger = self.ledger
        if ledger.state is not RunState.RUNNING or ledger.pause_reason is None or ledger.open:
            return ()
        ledger.state, ledger.cause, ledger.pause_reason = RunState.PAUSED, ledger.pause_reason, None
        return (PauseRun(ledger.cause),)

    def _stop(self, event: StopRequested, now: float) -> Effects:
        return self._end(RunState.STOPPED, event.reason) if self.ledger.state not in TERMINAL else ()

    def _resume(self, event: ResumeRequested, now: float) -> Effects:
        ledger, state = self.ledger, self.ledger.state
        if state is RunState.RUNNING:
            ledger.pause_reason = None  # cancels a pause that has not taken effect
        if state is RunState.FINISHED or not ledger.has_begun:
            return ()
        if state in TERMINAL:
            ledger.membership.everyone_disconnected()  # the driver reports the connected clients again now
        ledger.state, ledger.cause, ledger.deaths = RunState.QUEUED if event.wait else RunState.RUNNING, "", 0
        if event.wait:
            return ()
        if not ledger.has_process:
            return self._start_program()
        for held in self.process.held if state is not RunState.RUNNING else ():
            held.until = now + self.rules.hold  # its time stands still in a pause
        paused, self.process.paused = self.process.paused, []
        return tuple(effect for asked in paused for effect in self._open(asked, now))

    def _end(self, state: RunState, cause: str) -> Effects:
        """End the run: the open exchanges close with their present replies."""
        ledger = self.ledger
        effects: list[Effect] = []
        ledger.state, ledger.cause, ledger.pause_reason, ledger.has_process = state, cause, None, False
        self.process.held, self.process.paused = [], []
        ledger.awaited.clear()
        for exchange in [*ledger.open.values()]:
            exchange.is_void = True
            ledger.forget_after(exchange)
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
    FilesLost: ExchangeMachine._files_lost,
    UploadBegun: ExchangeMachine._upload_begun,
    UpdateReceived: ExchangeMachine._update_received,
    UpdateRefused: ExchangeMachine._update_refused,
    PauseRequested: ExchangeMachine._pause,
    StopRequested: ExchangeMachine._stop,
    ResumeRequested: ExchangeMachine._resume,
}
"""Handler of each event, except for CoordinatorStarted and TimePassed, as in `rounds.run_machine`."""
