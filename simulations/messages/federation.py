"""A simulated run of messages: the machine of exchanges, the clients' sessions, and the server program in its process.

    with MessageFederation(setting, folder) as federation:
        result = federation.run()

Virtual time advances only while the program waits for replies: its work takes none. Its calls are answered as by a
coordinator; a pull waits until one of its replies has arrived. If devices sleep, repeated queries of the nodes take
virtual time, so that a polling program waits for the clients instead of looping for ever.
"""

import json
import queue
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunState
from atoll.server.config.run import RunConfig
from atoll.server.exchanges.events import (
    AnswerMessages,
    AnswerNodes,
    NodesAsked,
    ProgramEnded,
    ProgramStarted,
    RepliesPulled,
)
from atoll.server.exchanges.exchange import Exchange, Sent
from atoll.server.files.run_store import RunStore
from atoll.server.programs.calls import asked, offered, order_of, reply_row
from atoll.server.programs.contents import Contents
from atoll.server.rounds.events import RunStarted
from atoll.server.views.exchange_sentences import exchange_document, sentence
from atoll.simulations.devices.fleet import Fleet
from atoll.simulations.federation.client_states import ClientStates
from atoll.simulations.federation.config import SimulationConfig
from atoll.simulations.federation.report import RESULT, SETTINGS, Json
from atoll.simulations.federation.seal import seal
from atoll.simulations.federation.site import sites_of
from atoll.simulations.federation.timeline import Timeline
from atoll.simulations.messages.answering import Benches, Pool, Sequential
from atoll.simulations.messages.program import Lines, Program
from atoll.simulations.messages.recorded import Recorded
from atoll.simulations.messages.service import MessageService
from atoll.simulations.messages.work import MessageWork
from atoll.task.array_task import ArrayTask
from atoll.task.json_text import to_json
from atoll.task.noise import NOT_PRIVATE

EXCHANGES = "exchanges.jsonl"
TEMPORARY = ("contents", "clients", "updates", "incoming", "versions")
"""Folders that a process needs until its end."""

REPLIES = "replies"
"""Folder of the answers, which stays until the run has ended, so that the next process can repeat them."""

THREADS_S = 0.05
"""Real time in which further threads of a program may make calls before virtual time advances [s]."""

LOOK_S, LOOK_MAX_S = 1.0, 600.0
"""Virtual time of a second successive query of the nodes, which doubles with each further one, and its maximum [s]."""


@dataclass(frozen=True, kw_only=True)
class MessageSetting:
    """Parts of which a simulated run of messages is built."""

    config: RunConfig
    task: ArrayTask
    num_examples: Mapping[ClientId, int]
    """The number of each client's examples, in the order of the clients; 1 if the task does not say."""
    fleet: Fleet
    simulation: SimulationConfig
    lease: float = 30.0


class MessageFederation:
    """Simulated run of messages: the program's process, and a federation in virtual time.

    Args:
        setting: its parts.
        folder: the folder of the run, without files of an earlier run.
        on_exchange: a callback for the line of each exchange that has closed.
        tell: a callback for notes to the operator.
        clock: the real time [s].

    Raises:
        WorkerDied: a process of the engine could not start.
    """

    service_type: ClassVar = MessageService
    program_type: ClassVar = Program

    def __init__(
        self,
        setting: MessageSetting,
        folder: Path,
        *,
        on_exchange: Callable[[Json], None] = lambda line: None,
        tell: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, simulation = setting.config, setting.simulation
        folder = folder.absolute()  # the program has a different current folder
        self.setting, self._folder, self._on_exchange, self._clock = setting, folder, on_exchange, clock
        self._began, self._tell = clock(), tell
        benches = Benches(setting.task, config.given, simulation.threads)
        is_pooled = simulation.engine == "processes"
        self.engine = Recorded(Pool(benches, simulation.workers) if is_pooled else Sequential(benches))
        self.timeline = Timeline()
        self.contents = Contents(folder, RunStore(folder, has_files_only=True, is_durable=False))
        states = ClientStates(folder / "clients", {name: n for n, name in enumerate(setting.num_examples)})
        self.work = MessageWork(self.engine, self.contents, states, setting.num_examples, folder / REPLIES)
        self.service = self.service_type(self, self.timeline, self.contents, config, setting.lease)
        self.sites = sites_of(self.setting, self.timeline, self.service, self.work)
        self._lines: Lines = queue.SimpleQueue()
        self._program: Program | None = None
        self._waiting: dict[int, bool] = {}  # unanswered calls, and whether other threads may still call
        self._closed: dict[int, Exchange] = {}  # for a program that crashes and repeats its calls
        self._pulls: dict[int, tuple[RoundId, ...]] = {}
        self._first_looks: list[int] = []
        self._looks_in_a_row, self._is_quiet = 0, False
        self._is_over = self._is_interrupted = False
        self._records = (folder / EXCHANGES).open("w", encoding="utf-8")

    # ------------------------------------------------------------ life

    def run(self) -> Json:
        """Run to the end, or to an interruption; return the result, which is also written to the folder."""
        self.service.post(RunStarted(Digest("")))
        for name, site in self.sites.items():
            if self.setting.fleet.is_awake(name, self.timeline.now):
                site.wake()
            site.follow(self.setting.fleet)
        while not (self._is_over or self._is_interrupted):
            self._step()
        result = self._result()
        (self._folder / RESULT).write_text(to_json(result, indent=2) + "\n", encoding="utf-8")
        seal(self._folder, (RESULT, SETTINGS))
        return result

    def interrupt(self) -> None:
        """Make `run` return as soon as possible; the same run in the folder resumes."""
        self._is_interrupted = True
        self._lines.put(None)

    def _step(self) -> None:
        """Handle the next call of the program, or advance virtual time while it waits."""
        heard = None
        with suppress(queue.Empty):
            heard = self._lines.get(timeout=self._patience())
        if heard is not None:
            self._is_quiet = False
            if heard[0] is self._program:
                self._heard(heard[1])
        elif not self._is_interrupted:
            self._is_quiet = True
            self._pass_time()

    def _patience(self) -> float | None:
        """Return the time to wait for a call before virtual time advances [s]; None: the program is computing."""
        if not self._waiting:
            return None
        return THREADS_S if all(self._waiting.values()) and not self._is_quiet else 0.0

    def _pass_time(self) -> None:
        if not self.timeline.step():
            fewest = self.setting.config.round.min_available
            self._end_program(
                f"the server program waits for {count_of(fewest, 'client')}, and no further one will become available"
            )
            return
        for call, numbers in [*self._pulls.items()]:
            self._pull(call, numbers)
        self._look_first()

    # ------------------------------------------------------------ the program

    def start_program(self) -> None:
        """Start a process of the program, after stopping the previous one."""
        self._stop_program()
        order = order_of(self.setting.config, self.service.run_number)
        self._program = self.program_type(order, self._folder / "program", self._folder / "program.log", self._lines)
        self.service.post(ProgramStarted())

    def _stop_program(self) -> None:
        if self._program is not None:
            self._program.stop()
        self._waiting, self._pulls, self._first_looks, self._looks_in_a_row = {}, {}, [], 0

    def _end_program(self, error: str) -> None:
        self.service.post(ProgramEnded(error))

    def _heard(self, line: Json | None) -> None:
        if line is None:
            self.service.post(ProgramEnded(is_dead=True))
        elif line["op"] in ("returned", "raised"):
            self._end_program(line.get("detail", ""))
        else:
            self._called(line["call"], line)

    def _called(self, number: int, call: Json) -> None:
        """Handle a call, like `hosting.message_driver`."""
        match call["op"]:
            case "nodes":
                self._look(number)
            case "content":
                self._answer(number, **offered(call, self.contents))
            case "send":
                self._looks_in_a_row = 0
                self._waiting[number] = not call["in_order"]
                self.service.post(asked(call, self.contents))
            case "pull":
                self._waiting[number] = False
                self._pull(number, tuple(map(RoundId, call["numbers"])))
            case "public":
                self._tell(NOT_PRIVATE)

    def _pull(self, call: int, numbers: tuple[RoundId, ...]) -> None:
        """Answer a pull once a reply has arrived; at once, if none will come."""
        machine, found = self.service.machine, [self.service.machine.ledger.sent(number) for number in numbers]
        if machine.has_pull_for(numbers):
            self._pulls.pop(call, None)
            self.service.post(RepliesPulled(call, numbers))
        elif any(sent is not None and sent.is_waiting for sent in found):
            self._pulls[call] = numbers
        else:
            self._answer(call, replies=[])

    def _look(self, call: int) -> None:
        self._waiting[call] = False
        if self._looks_in_a_row and not self.setting.fleet.is_always_awake:
            pause = min(LOOK_S * 2.0 ** min(self._looks_in_a_row - 1, 60), LOOK_MAX_S)
            self._looks_in_a_row += 1
            self.timeline.after(pause, self._look_now, self._program, call)
            return
        self._looks_in_a_row = 1
        self._first_looks.append(call)
        self._look_first()

    def _look_first(self) -> None:
        """Return the nodes to the calls that ask for them; the first query of a run waits for `round.min_available`."""
        ledger = self.service.machine.ledger
        if ledger.looks or len(ledger.membership.present) >= self.setting.config.round.min_available:
            looking, self._first_looks = self._first_looks, []
            for call in looking:
                self.service.post(NodesAsked(call))

    def _look_now(self, program: Program, call: int) -> None:
        if program is self._program:
            self.service.post(NodesAsked(call))

    # ------------------------------------------------------------ the coordinator's effects

    def answer_nodes(self, effect: AnswerNodes) -> None:
        """Answer a call of the program with the connected nodes."""
        self._answer(effect.call, nodes=effect.nodes)

    def answer_messages(self, effect: AnswerMessages) -> None:
        """Answer a call with replies, or with the numbers of pushed messages."""
        if effect.is_pushed:
            self._answer(effect.call, numbers=effect.numbers)
            return
        found = map(self._sent, effect.numbers)
        self._answer(effect.call, replies=[self._reply(sent) for sent in found if sent is not None])

    def _sent(self, number: RoundId) -> Sent | None:
        """Return a message of an open or closed exchange, or None."""
        ledger = self.service.machine.ledger
        closed = self._closed.get(ledger.exchange_of(number))
        return ledger.sent(number) if closed is None else closed.sent[ledger.place(number)]

    def _reply(self, sent: Sent) -> Json:
        place = self.service.machine.ledger.place(sent.number)
        if sent.reply is None:
            return reply_row(sent, place)
        reply = self.work.replies[sent.reply]
        return reply_row(sent, place, reply.path, reply.tensors)

    def _answer(self, call: int, **fields: Any) -> None:
        self._waiting.pop(call, None)
        if self._program is not None:
            self._program.answer(call, **fields)

    def exchange_changed(self, number: int) -> None:
        """Write the line of a closed exchange."""
        exchange = self.service.machine.exchange(number)
        if exchange is not None and not exchange.is_open:
            self._closed[number] = exchange
            line = {"exchange": number, "sentence": sentence(exchange), **exchange_document(exchange)}
            self._records.write(json.dumps(line) + "\n")
            self._records.flush()
            self._on_exchange(line)

    def run_ended(self) -> None:
        """Make `run` return, because the run has ended."""
        self._is_over = True

    # ------------------------------------------------------------ the result

    def _result(self) -> Json:
        ledger = self.service.machine.ledger
        state = RunState.STOPPED if self._is_interrupted and not self._is_over else ledger.state
        return {
            "state": "interrupted" if state is RunState.STOPPED else str(state),
            "cause": ledger.cause,
            "exchanges": ledger.num_exchanges,
            "messages": ledger.num_messages,
            "answers": self.work.num_answers,
            "repeated": self.engine.num_repeated,
            "engine": self.engine.name,
            "seed": self.setting.config.seed,
            "virtual_s": self.timeline.now,
            "real_s": self._clock() - self._began,
            "bytes_down": self.service.bytes_down,
            "bytes_up": self.service.bytes_up,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_program()
        self.engine.close()
        self._records.close()
        for name in (*TEMPORARY, *([REPLIES] if self._is_over else [])):
            shutil.rmtree(self._folder / name, ignore_errors=True)
