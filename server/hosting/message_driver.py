"""The driver of a run of messages: its program's process, and the execution of its machine's effects.

The answer to a call of the program is an effect, sent once its event is on disk: so the journal contains everything
that the program knows.
"""

import logging
import math
from dataclasses import replace
from functools import partial

from atoll.ground.printable import count_of
from atoll.ground.process import crash_points
from atoll.protocol.atoll_pb2 import ServerMessage
from atoll.protocol.manifest import parse_update
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, RunState, Version
from atoll.server.config.run import RunConfig
from atoll.server.errors import StoreCorrupted
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
from atoll.server.exchanges.exchange import Sent
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.files.run_store import KeptUpdate
from atoll.server.hosting import messages
from atoll.server.hosting.event_rows import Decided, add_rows_of_any
from atoll.server.hosting.journaled_driver import Decision, JournaledDriver
from atoll.server.hosting.message_retention import MessageRetention
from atoll.server.hosting.run_parts import SharedParts
from atoll.server.journal.codec import decode_meta, encode
from atoll.server.journal.rows import Batch, ExchangeRow, Snapshot
from atoll.server.programs.calls import asked, offered, order_of, reply_row
from atoll.server.programs.contents import Contents
from atoll.server.programs.process import Json, ProgramProcess
from atoll.server.rounds.events import EndRun, Invite, Release, Update
from atoll.server.views.exchange_sentences import nodes_in_words
from atoll.server.views.message_lines import lines_of
from atoll.task.randomness import training_seed
from atoll.task.task import task_name
from atoll.tensors.layout import Piece

logger = logging.getLogger(__name__)


SNAPSHOT_ENTRIES = 500
"""Entries after which a snapshot is taken, plus one for each value that grows with the run: so snapshots cost no more
than the entries, and a replay reads few entries."""

LOOKING_S = 15.0
"""Time for which a program asks only for the nodes before the log says so [s]."""


class MessageDriver(JournaledDriver[Event, Effect]):
    """Driver of one run of messages.

    Args:
        run_id: the run.
        config: its settings.
        machine: its machine, new or replayed.
        seq: the number of the last event that the machine has received.
        contents: the contents of its messages, with the files of its replies.
        shared: the parts that all runs of the coordinator share.
        noise: the key of the noise of its program; empty: there is no secret here.
        number: the number of the run, for Flower apps.
    """

    def __init__(
        self,
        run_id: RunId,
        config: RunConfig,
        machine: ExchangeMachine,
        seq: int,
        contents: Contents,
        shared: SharedParts,
        noise: bytes = b"",
        number: int = 0,
    ) -> None:
        super().__init__(run_id, machine, seq, shared)
        self.config, self.machine = config, machine
        self.store, self.contents, self.task = contents.store, contents, task_name(config.task)
        self.versions = contents
        self._terms = replace(messages.RunTerms.of(run_id, self.task, config, number), algorithm="")  # there is none
        self._looking: list[int] = []
        self._num_left_out = 0  # calls for the nodes since the last one that was an event
        self._tell_at: float | None = None  # when to log that the program asks only for the nodes
        self._offered: dict[int, list[Digest]] = {}  # by the call that sends them, until it is on disk
        self._generation = 0  # of the process, incremented by its start and by the end of the run
        self._snapshot_due = seq + SNAPSHOT_ENTRIES
        self.retention = MessageRetention(
            run_id, lambda: machine.ledger, contents, shared, machine.rules.keep_replies, self._spawn
        )
        order = order_of(config, number) | {"noise": noise.hex()}
        self.program = ProgramProcess(
            order, contents.folder / "program", contents.folder / "program.log", self._called, self._program_ended
        )

    # ------------------------------------------------------------ events in

    def _decided(self, event: Event, effects: Effects, now: float, kept: KeptUpdate | None) -> Decision:
        rows, ledger = self._rows, self.machine.ledger
        add_rows_of_any(rows, Decided(self.run_id, self._seq, now, event, effects), ledger, kept)
        changed = [self.machine.exchange(effect.exchange) for effect in effects if isinstance(effect, RecordExchange)]
        rows.records += [ExchangeRow.of(self.run_id, one) for one in changed if one is not None and not one.is_open]
        is_over = any(isinstance(effect, EndRun) for effect in effects)
        if is_over or self._seq >= self._snapshot_due:
            rows.snapshots.append(Snapshot(self.run_id, self._seq, now, encode(ledger)))
            self._snapshot_due = self._seq + SNAPSHOT_ENTRIES + ledger.num_rows
        is_news = isinstance(event, ExchangeAsked) or bool(changed)
        lines = tuple(lines_of(self.machine, event, effects))
        offered = self._offered.pop(event.call, []) if isinstance(event, ExchangeAsked) else []
        return Decision(lines, self.retention.after(offered) if is_over or is_news else None)

    @property
    def where(self) -> str:
        """The stage of the run, for the log."""
        return f"exchange {self.machine.ledger.num_exchanges}"

    async def has_reply(self, update: Update) -> bool:
        """Return whether this reply was already accepted, so that only the answer to its upload was lost."""
        if self.machine.is_accepted(update):
            return True
        journal = self._shared.journal
        return await on_thread(self._shared.journal_thread, journal.has_update, self.run_id, update.digest)

    def is_news(self, client_id: ClientId, number: RoundId) -> bool:
        """Return whether a client's failure to answer a message changes the state."""
        return self.machine.waits_for(client_id, number)

    def is_first_upload(self, update: Update) -> bool:
        """Return whether the beginning of a reply's upload changes the state."""
        sent = self.machine.ledger.sent(update.round_id)
        return sent is not None and not sent.has_begun

    def start(self) -> None:
        """Start the task that writes and executes effects, and delete the remains of an earlier process."""
        super().start()
        self.retention.after()()

    async def stop(self) -> None:
        """End all tasks and the program's process, as a crash would: the next process continues from the journal."""
        await super().stop()
        await self.program.stop()

    def _written(self, rows: Batch) -> None:
        for entry in rows.entries:
            crash_points.reached("exchange.entry", entry.kind)

    def _acted(self) -> None:
        self._look()

    # ------------------------------------------------------------ effects out

    def _act(self, effect: Effect) -> None:
        crash_points.reached("exchange.effect", type(effect).__name__)
        match effect:
            case Deliver(message=message):
                self._shared.hub.send(message.client_id, self._invitation(effect))
            case Release(client_id):
                self._shared.hub.send(client_id, messages.release(effect, run_id=self.run_id))
            case AnswerNodes(call, nodes):
                self.program.answer(call, nodes=nodes)
            case AnswerMessages(call, numbers, is_pushed):
                if is_pushed:
                    self.program.answer(call, numbers=numbers)
                else:
                    self._spawn(self._answer(call, numbers, self._generation))
            case StartProgram():
                self._generation += 1
                self._spawn(self._start_program())
            case EndRun(state, cause):
                self._generation += 1
                self._spawn(self._end(state, cause))

    def _invitation(self, effect: Deliver) -> ServerMessage:
        """Return the order to answer a message: an invitation whose model is the content."""
        message, config = effect.message, self.config
        content = self.contents.keep(message.content)
        model = messages.OfferedModel(content.digest, content.manifest_bytes, content.small_data)
        client = messages.ClientTerms(training_seed(config.seed, config.name, effect.number, message.client_id))
        base, until = Version(effect.number), effect.deadline
        invite = Invite(message.client_id, effect.number, base, until, effect.counted, effect.asked_at)
        order = messages.invitation(invite, self._terms, model, client, now=self._clock.now())
        order.invite.message, order.invite.group = message.kind, message.group
        return order

    async def _answer(self, call: int, numbers: tuple[RoundId, ...], generation: int) -> None:
        """Answer the process with the requested replies: of open exchanges from the machine, else from the records."""
        ledger, journal = self.machine.ledger, self._shared.journal
        exchanges = {self.machine.ledger.exchange_of(number) for number in numbers}
        closed = exchanges - ledger.open.keys()
        if self.retention.keep_replies and exchanges:
            self.retention.being_read[call] = min(exchanges)
        of_open = {number: ledger.sent(number) for number in numbers}
        await self.on_disk()  # a record may be newer than the answer's event
        records = await on_thread(self._shared.journal_thread, partial(journal.exchanges, self.run_id, closed))
        of_closed = {one.number: one for exchange in records.values() for one in exchange.sent}
        if generation != self._generation:
            return  # another process has a call with this number
        if lost := [number for number in numbers if not of_open[number] and number not in of_closed]:
            raise StoreCorrupted(f"run {self.run_id}: the journal has no record of message {lost[0]}")
        found = [of_open[number] or of_closed[number] for number in numbers]
        digests = [sent.reply for sent in found if sent.reply is not None]
        read = partial(journal.updates, self.run_id, digests)
        rows = await on_thread(self._shared.journal_thread, read) if digests else {}
        if generation != self._generation:
            return
        metas = {digest: decode_meta(row.meta, where=f"reply {digest}") for digest, row in rows.items()}
        pieces = {digest: parse_update(meta.manifest).pieces for digest, meta in metas.items()}
        answer = {"replies": [self._reply(sent, pieces) for sent in found]}
        self.program.answer(call, **answer, is_read=bool(self.retention.keep_replies))

    def _reply(self, sent: Sent, pieces: dict[Digest, tuple[Piece, ...]]) -> Json:
        place = self.machine.ledger.place(sent.number)
        if sent.reply is None:
            return reply_row(sent, place)
        tensors = [(piece.tensor, piece.num_bytes) for piece in pieces[sent.reply]]
        return reply_row(sent, place, self.store.update_path(sent.reply), tensors)

    async def _start_program(self) -> None:
        if not self.machine.ledger.is_open:
            return
        self._looking.clear()  # from a process that died
        self._num_left_out = 0
        self.retention.being_read.clear()
        self.contents.forget_offers()
        try:
            await self.program.start()
        except OSError as error:
            self.post(ProgramEnded(f"the process of the server program cannot be started: {error}"))
            return
        self.post(ProgramStarted())

    async def _end(self, state: RunState, cause: str) -> None:
        await self.program.stop()
        self._shared.announce_end(self.run_id, self.machine.ledger.membership.members, state, cause)
        self.ended.set()

    # ------------------------------------------------------------ the program

    def _called(self, call: Json) -> None:
        """Handle a call of the program's process, which is our code around the operator's."""
        number = call["call"]
        match call["op"]:
            case "nodes":
                self._looking.append(number)
                self._look()
            case "content":
                self.program.answer(number, **offered(call, self.contents))
            case "send":
                event = asked(call, self.contents)
                self._offered[number] = [Digest(digest) for digest in call["contents"]]
                self.post(event)
            case "pull":
                self._pulled(number, tuple(map(RoundId, call["numbers"])))
            case "read":
                self.retention.being_read.pop(number, None)

    def _look(self) -> None:
        """Return the nodes to the calls that ask for them; the first query of a run waits for `round.min_available`."""
        ledger, fewest = self.machine.ledger, self.config.round.min_available
        if self._looking and not ledger.looks and len(ledger.membership.present) < fewest:
            few = f"main() gets no nodes before {count_of(fewest, 'is', 'are')} connected (round.min_available)"
            self._tell_of_nodes(few, 0.0)
            return
        looking, self._looking = self._looking, []
        for number in looking:
            if self.machine.has_looked():
                self.program.answer(number, nodes=ledger.membership.present)
                self._num_left_out += 1
                if not ledger.open:
                    self._tell_of_nodes("main() keeps asking for the nodes", LOOKING_S)
            else:
                self.post(NodesAsked(number, self._num_left_out))
                self._num_left_out, self._tell_at = 0, None

    def _tell_of_nodes(self, what: str, after: float) -> None:
        """Log once per series of calls for the nodes, `after` seconds from the first, that the program may wait."""
        now = self._clock.now()
        if self._tell_at is None:
            self._tell_at = now + after
        if now >= self._tell_at:
            self._tell_at = math.inf
            connected = nodes_in_words(self.machine.ledger.membership.present)
            logger.info("%s: %s; %s; its output is in %s", self.run_id, what, connected, self.program.log)

    def _pulled(self, number: int, numbers: tuple[RoundId, ...]) -> None:
        if self.machine.has_pull_for(numbers):
            self.post(RepliesPulled(number, numbers))
        else:
            self.program.answer(number, replies=[])

    def _program_ended(self, error: str, is_dead: bool) -> None:
        self.post(ProgramEnded(error, is_dead))
