"""A seeded world around the machine of exchanges: a program that dies, a coordinator that dies, nodes that fail.

The program is a chain: each digest that it sends is a hash of all that its calls have returned, so any difference in an
answer, in its order or in its number shows in every later message. Time is virtual.
"""

import hashlib
import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from atoll.protocol.vocabulary import TERMINAL, ClientId, Digest, FailureReason, LossReason, RejectReason, RoundId
from atoll.server.exchanges.events import (
    AnswerMessages,
    AnswerNodes,
    Deliver,
    Effect,
    Effects,
    Event,
    ExchangeAsked,
    Message,
    NodesAsked,
    ProgramEnded,
    ProgramStarted,
    RecordExchange,
    RepliesPulled,
    StartProgram,
)
from atoll.server.exchanges.exchange import Exchange, Sent
from atoll.server.exchanges.ledger import Ledger
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.journal.codec import decode, encode
from atoll.server.rounds.events import (
    Accept,
    ClientDisconnected,
    ClientFailed,
    ClientJoined,
    ClientLost,
    CoordinatorStarted,
    FilesLost,
    Release,
    RunStarted,
    TimePassed,
    Update,
    UpdateReceived,
    UpdateRefused,
    UploadBegun,
)

Call = ExchangeAsked | RepliesPulled | NodesAsked
Answer = tuple[Any, ...]
Program = Generator[Call, Answer, None]
RULES = ExchangeRules(quorum=0.6, linger=4.0, grace=3.0, deadline_max=200.0, hold=500.0, restarts_max=1000)


def digest(*parts: object) -> Digest:
    """Return a digest of anything with a stable representation."""
    return Digest(hashlib.sha256(repr(parts).encode()).hexdigest())


def chain(seed: int, num_steps: int) -> Program:
    """Send one exchange after the other, some pushed and pulled; every message depends on all answers so far."""
    state: object = digest(seed)
    for step in range(num_steps):
        nodes: Answer = ()
        while len(nodes) < 2:
            nodes = yield NodesAsked(0)
        rng = random.Random(f"{state}")
        chosen = rng.sample(nodes, rng.randint(1, len(nodes)))
        messages = tuple(Message(node, "train", digest(state, node), 100, str(step)) for node in chosen)
        if rng.random() < 0.3:
            more = tuple(Message(node, "query.more", digest(state, node), 10) for node in chosen)
            numbers = yield ExchangeAsked(0, messages, None, is_waiting=False)
            numbers += yield ExchangeAsked(0, more, None, is_waiting=False)
            left, got = list(numbers), []
            while left:
                some = yield RepliesPulled(0, tuple(left))
                got += some
                left = [one for one in left if one not in {number for number, *_ in some}]
            state = digest(state, got)
        else:
            state = digest(state, (yield ExchangeAsked(0, messages, rng.choice([None, 15.0, 60.0]))))


@dataclass(slots=True)
class Life:
    """A process of the program: what it called and what that returned."""

    program: Program
    transcript: list[tuple[Call, Answer]] = field(default_factory=list)
    waits_for: Call | None = None
    num_calls: int = 0


@dataclass(slots=True)
class AgentState:
    """A node: the message that it works on, and replies that were not acknowledged."""

    client_id: ClientId
    session: int = 0
    is_connected: bool = False
    working_on: RoundId | None = None
    unanswered: dict[RoundId, Update] = field(default_factory=dict)
    seen: set[RoundId] = field(default_factory=set)


class World:
    """One history from one seed; see the module docstring."""

    def __init__(
        self, seed: int, *, faults: float, make: Callable[[ExchangeRules], ExchangeMachine], steps: int
    ) -> None:
        self.seed, self.faults, self.make, self.steps = seed, faults, make, steps
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.journal: list[tuple[float, Event, Effects]] = []
        self.acknowledged: list[tuple[ClientId, RoundId, Digest]] = []
        self.lives: list[Life] = []
        self.answered: list[AnswerMessages] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = self.incarnation = 0
        self.agents = {name: AgentState(name) for name in map(ClientId, ("a", "b", "c", "d"))}
        self.machine = make(RULES)
        self.records: dict[int, Exchange] = {}
        """The closed exchanges, as the journal's table has them."""

    def run(self) -> "World":
        """Run until the run has ended and all is quiet."""
        self._post(RunStarted(Digest("")))
        for agent in self.agents.values():
            self._join(agent)
        for _ in range(int(60 * self.faults)):
            self._after(
                self.rng.uniform(0, 400),
                self.rng.choice([self._kill_program, self._kill_coordinator, self._cut_a_node, self._lose_a_node]),
            )
        for _ in range(5_000):
            timer = self.machine.deadline
            if timer is not None and (not self._due or timer <= self._due[0][0]):
                self.now = max(self.now, timer)
                self._post(TimePassed())
            elif self._due and self.machine.ledger.state not in TERMINAL:
                at, _, action = heapq.heappop(self._due)
                self.now = max(self.now, at)
                action()
            else:
                return self
        raise AssertionError(f"seed {self.seed}: the history does not end")

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, action))

    # ------------------------------------------------------------ the coordinator

    def _post(self, event: Event) -> None:
        effects = self.machine.receive(event, self.now)
        if self.rng.random() < 0.02 * self.faults:  # it dies before the event is on disk
            self._restart()
            return
        self.journal.append((self.now, event, effects))
        for effect in effects:
            if isinstance(effect, RecordExchange) and (exchange := self.machine.exchange(effect.exchange)) is not None:
                self.records[exchange.number] = exchange
        if self.rng.random() < 0.02 * self.faults:  # it dies before it has carried out an effect
            self._restart()
            return
        for effect in effects:
            self._act(effect)

    def _restart(self) -> None:
        for agent in self.agents.values():
            agent.is_connected = False
        self.lives.append(Life(iter(())))  # type: ignore[arg-type] - the program dies with the coordinator
        self.incarnation += 1
        place = self.rng.randrange(len(self.journal) + 1)  # of the snapshot from which the replay begins
        self.machine = self.make(RULES)
        for at, event, _ in self.journal[:place]:
            self.machine.receive(event, at)
        self.machine.ledger = decode(Ledger, encode(self.machine.ledger), "the snapshot")
        for at, event, _ in self.journal[place:]:
            self.machine.receive(event, at)
        self.records = {number: one for number, one in self.records.items() if not one.is_open}
        down_since, self.now = self.now, self.now + self.rng.uniform(0.1, 20)
        if not self.journal:
            self._post(RunStarted(Digest("")))
        else:
            self._post(CoordinatorStarted(down_since, self.rng.choice([0.0, 3.0, 30.0])))
            self._lose_files()
        for agent in self.agents.values():
            self._after(self.rng.uniform(0.1, 5), lambda agent=agent: self._join(agent))

    @property
    def lost(self) -> set[Digest]:
        """The replies that are lost; the event is on disk."""
        return {digest for _, event, _ in self.journal if isinstance(event, FilesLost) for digest in event.updates}

    def _lose_files(self) -> None:
        """Lose replies that the program has not had, and contents of messages, as an operator accepts it."""
        rng = random.Random(f"lost {self.seed} {len(self.journal)}")
        if rng.random() > 0.2 * self.faults:
            return
        sent = [
            one for exchange in self.machine.ledger.open.values() if exchange.call.is_waiting for one in exchange.sent
        ]
        replies = {one.reply for one in sent if one.reply is not None and rng.random() < 0.5}
        contents = {one.message.content for one in sent if one.is_waiting and rng.random() < 0.5}
        self._post(FilesLost(tuple(sorted(replies)), contents=tuple(sorted(contents)), detail="gone"))

    def _act(self, effect: Effect) -> None:
        match effect:
            case StartProgram():
                incarnation = self.incarnation
                self._after(0.5, lambda: self._start_program() if incarnation == self.incarnation else None)
            case Deliver(number, message):
                self._after(self.rng.uniform(0.01, 0.2), lambda: self._delivered(number, message))
            case Release(client_id, round_id):
                self._after(self.rng.choice([0.1, 8.0]), lambda: self._released(client_id, round_id))
            case Accept(client_id, round_id, of):
                self.acknowledged.append((client_id, round_id, of))
                self.agents[client_id].unanswered.pop(round_id, None)
            case AnswerMessages(call, numbers, is_pushed):
                self.answered.append(effect)
                self._answer(call, numbers if is_pushed else tuple(map(self.reply, numbers)))
            case AnswerNodes(call, nodes):
                self._answer(call, nodes)

    def reply(self, number: RoundId) -> tuple[object, ...]:
        """Return what the program sees of a reply."""
        sent = self.sent(number)
        assert sent is not None
        return (number, sent.message.client_id, str(sent.fate), sent.reply, sent.reason)

    def sent(self, number: RoundId) -> Sent | None:
        """Return a message, of the machine or of a record."""
        record = self.records.get(self.machine.ledger.exchange_of(number))
        of_record = None if record is None else record.sent[number - record.sent[0].number]
        return self.machine.ledger.sent(number) or of_record

    # ------------------------------------------------------------ the program

    def _start_program(self) -> None:
        life = Life(chain(self.seed, self.steps))
        self.lives.append(life)
        self._post(ProgramStarted())
        self._go_on(life, None)

    def _go_on(self, life: Life, answer: Answer | None) -> None:
        if life is not self.lives[-1]:
            return  # it is dead
        try:
            call = life.program.send(answer) if answer is not None else next(life.program)
        except StopIteration:
            self._post(ProgramEnded())
            return
        life.num_calls += 1
        life.waits_for = call = replace(call, call=life.num_calls)
        wait = 1.0 if isinstance(call, NodesAsked | RepliesPulled) else 0.01
        self._after(wait, lambda: self._ask(life, call))

    def _ask(self, life: Life, call: Call) -> None:
        if life is self.lives[-1]:
            self._post(call)

    def _answer(self, call: int, answer: Answer) -> None:
        life = self.lives[-1]
        if life.waits_for is None or life.waits_for.call != call:
            raise AssertionError(f"seed {self.seed}: an answer to call {call}, which waits for none")
        life.transcript.append((life.waits_for, answer))
        life.waits_for = None
        self._after(0.01, lambda: self._go_on(life, answer))

    # ------------------------------------------------------------ nodes

    def _join(self, agent: AgentState) -> None:
        if agent.is_connected:
            return
        agent.session, agent.is_connected = agent.session + 1, True
        working = {*agent.unanswered, *([agent.working_on] if agent.working_on else [])}
        self._post(ClientJoined(agent.client_id, str(agent.session), working_on=tuple(sorted(working))))
        for number in list(agent.unanswered):
            self._after(0.1, lambda number=number: self._upload(agent, number))

    def _delivered(self, number: RoundId, message: Message) -> None:
        agent = self.agents[message.client_id]
        if not agent.is_connected or number in agent.seen:
            return
        agent.seen.add(number)
        agent.working_on = number
        self._after(self.rng.choice([0.2, 1.0, 5.0, 25.0]), lambda: self._worked(agent, number, message))

    def _worked(self, agent: AgentState, number: RoundId, message: Message) -> None:
        if agent.working_on != number:
            return
        agent.working_on = None
        update = Update(agent.client_id, number, 0, digest("reply", message.content), 1, 1.0, 100)  # type: ignore[arg-type]
        agent.unanswered[number] = update
        if self.rng.random() < 0.3 and agent.is_connected:
            self._post(UploadBegun(agent.client_id, number))
        self._after(self.rng.choice([0.05, 2.0]), lambda: self._upload(agent, number))

    def _upload(self, agent: AgentState, number: RoundId) -> None:
        if not agent.is_connected or number not in agent.unanswered:
            return
        chance, update = self.rng.random(), agent.unanswered[number]
        if chance < 0.1 * self.faults:
            del agent.unanswered[number]
            self._post(ClientFailed(agent.client_id, number, FailureReason.TRAINING_FAILED, "no data"))
        elif chance < 0.2 * self.faults:
            del agent.unanswered[number]
            self._post(UpdateRefused(agent.client_id, number, RejectReason.NOT_FINITE, "NaN"))
        else:
            self._post(UpdateReceived(update))

    def _released(self, client_id: ClientId, number: RoundId) -> None:
        agent = self.agents[client_id]
        agent.unanswered.pop(number, None)
        if agent.working_on == number:
            agent.working_on = None

    # ------------------------------------------------------------ faults

    def _kill_program(self) -> None:
        if self.lives and self.lives[-1].num_calls and self.machine.ledger.is_open:
            self.lives.append(Life(iter(())))  # type: ignore[arg-type]
            self._post(ProgramEnded(is_dead=True))

    def _kill_coordinator(self) -> None:
        self._restart()

    def _cut_a_node(self) -> None:
        agent = self.rng.choice([*self.agents.values()])
        if agent.is_connected:
            agent.is_connected = False
            self._post(ClientDisconnected(agent.client_id, str(agent.session)))
            self._after(self.rng.uniform(0.1, 30), lambda: self._join(agent))

    def _lose_a_node(self) -> None:
        agent = self.rng.choice([*self.agents.values()])
        agent.is_connected = False
        self._post(ClientLost(agent.client_id, LossReason.LEASE_EXPIRED))
        self._after(self.rng.uniform(1, 30), lambda: self._join(agent))


# ---------------------------------------------------------------- checks


def faults_of(world: World) -> list[str]:
    """Return what is wrong with a history."""
    return [*_end(world), *_once(world), *_lives(world), *_deliveries(world), *_acknowledged(world), *_replay(world)]


def _end(world: World) -> list[str]:
    ledger = world.machine.ledger
    if ledger.state != "finished" or ledger.cause != f"main() returned after {ledger.num_exchanges} exchanges":
        return [f"the run is {ledger.state}: {ledger.cause}"]
    steps = {one.message.group for exchange in world.records.values() for one in exchange.sent} - {""}
    if len(steps) != world.steps:
        return [f"the run has finished after the steps {sorted(steps)} of {world.steps}"]
    if sorted(world.records) != [*range(1, ledger.num_exchanges + 1)] or ledger.open:
        return [f"the records are of {sorted(world.records)} of {ledger.num_exchanges} exchanges"]
    return [f"message {one.number} has not ended" for e in world.records.values() for one in e.sent if one.is_waiting]


def _once(world: World) -> list[str]:
    """Check that an answer has every reply of its exchange, once, in the order of the messages."""
    wrong = []
    for call, answer in (pair for life in world.lives for pair in life.transcript):
        if not isinstance(call, ExchangeAsked) or not call.is_waiting:
            continue
        numbers = [number for number, *_ in answer]
        exchange = next((e for e in world.records.values() if numbers and numbers[0] in e.numbers), None)
        if exchange is not None and numbers != [n for n in exchange.numbers if n in exchange.answered]:
            wrong.append(
                f"exchange {exchange.number} has the replies {exchange.answered}, and call {call.call} got {numbers}"
            )
        clients = [client for _, client, *_ in answer]
        places = [[message.client_id for message in call.messages].index(client) for client in clients]
        if places != sorted(set(places)):
            wrong.append(f"call {call.call} got the replies of {clients} to messages in another order")
    return wrong


def _lives(world: World) -> list[str]:
    """Check that each process of the program saw what the one before had seen, as far as both went."""
    wrong = []
    longest: list[tuple[Call, Answer]] = []
    for number, life in enumerate(world.lives):
        exchanges = [(_said(call), answer) for call, answer in life.transcript if isinstance(call, ExchangeAsked)]
        before = [(_said(call), answer) for call, answer in longest if isinstance(call, ExchangeAsked)]
        if any(one != two for one, two in zip(before, exchanges, strict=False)):
            wrong.append(f"process {number} of the program got other answers than an earlier one")
        if len(exchanges) >= len(before):
            longest = life.transcript
    return wrong


def _said(call: ExchangeAsked) -> object:
    return call.messages, call.timeout, call.is_waiting


def _deliveries(world: World) -> list[str]:
    """Check that a node has one message at a time, and gets each for the first time once."""
    wrong: list[str] = []
    under_way: dict[ClientId, RoundId] = {}
    machine = ExchangeMachine(RULES)
    for at, event, effects in world.journal:
        machine.receive(event, at)
        for effect in effects:
            if isinstance(effect, Deliver):
                client_id = effect.message.client_id
                other = under_way.get(client_id)
                sent = machine.ledger.sent(other) if other else None
                if other not in (None, effect.number) and sent is not None and sent.is_waiting:
                    wrong.append(f"{client_id} got message {effect.number} while it has {other}")
                under_way[client_id] = effect.number
    return wrong


def _acknowledged(world: World) -> list[str]:
    """Check that an acknowledged reply is the one of its message for good."""
    wrong = []
    for client_id, number, of in world.acknowledged:
        sent = world.sent(number)
        if of in world.lost:
            wrong += [f"the lost reply to message {number} counts"] if sent is not None and sent.reply == of else []
            continue
        if sent is None or sent.reply != of or sent.fate != "reported" or sent.message.client_id != client_id:
            wrong.append(f"the reply of {client_id} to message {number} was acknowledged and is {sent and sent.fate}")
    return wrong


def _replay(world: World) -> list[str]:
    machine = world.make(RULES)
    for place, (at, event, effects) in enumerate(world.journal):
        if machine.receive(event, at) != effects:
            return [f"entry {place}, {type(event).__name__}, replays to other effects"]
    if machine.ledger != world.machine.ledger:
        return ["the replayed ledger differs"]
    snapshot = encode(machine.ledger)
    return [] if decode(Ledger, snapshot, "here") == machine.ledger else ["the ledger of a snapshot differs"]
