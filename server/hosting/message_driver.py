"""The asyncio shell around one run of messages: its program's process, its timers, the write-ahead journal, effects.

As in `run_driver`, every event enters through `post`, and its effects leave once the event is on disk. The answer to a
call of the program is such an effect: whatever the program knows, the journal has.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.aggregation.tensors.layout import Piece
from atoll.parallel.task.task import task_name
from atoll.protocol import crash_points
from atoll.protocol.atoll_pb2 import Invite, ServerMessage
from atoll.protocol.durable import DiskFull
from atoll.protocol.manifest import parse_update
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, RunState
from atoll.server.config.run import RunConfig
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
    RepliesPulled,
    StartProgram,
)
from atoll.server.exchanges.exchange import Sent
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.files.run_store import KeptUpdate, RunStore
from atoll.server.hosting import messages
from atoll.server.hosting.run_parts import SharedParts
from atoll.server.journal.codec import decode_meta, encode_event
from atoll.server.journal.journal import Batch, Entry, RunChange, UpdateRow
from atoll.server.programs.answers import reply_row
from atoll.server.programs.contents import Contents
from atoll.server.programs.process import Json, ProgramProcess
from atoll.server.rounds.events import Accept, EndRun, Release, ResumeRequested, RunStarted, TimePassed
from atoll.server.views.message_lines import lines_of

logger = logging.getLogger(__name__)

DISK_RETRY_S = 1.0


@dataclass(slots=True)
class _Posted:
    """An event that the machine has decided and that is not yet on disk."""

    effects: Effects
    lines: tuple[str, ...]
    done: "asyncio.Future[Effects]"


class MessageDriver:
    """The driver of one run of messages.

    Args:
        run_id: the run.
        config: its settings.
        machine: its machine, new or replayed.
        seq: the number of the last event that the machine has received.
        store: the files of its replies.
        contents: the contents of its messages.
        shared: the parts that all runs of the coordinator share.
    """

    def __init__(
        self,
        run_id: RunId,
        config: RunConfig,
        machine: ExchangeMachine,
        seq: int,
        store: RunStore,
        contents: Contents,
        shared: SharedParts,
    ) -> None:
        self.run_id, self.config, self.machine = run_id, config, machine
        self.store, self.contents, self.task = store, contents, task_name(config.task)
        self.versions = contents
        self.ended = asyncio.Event()
        self.listeners: list[Callable[[Effects], None]] = []
        self._seq, self._shared, self._clock = seq, shared, shared.clock
        self._local = json.dumps(config.given, sort_keys=True)
        self._posted: list[_Posted] = []
        self._looking: list[int] = []
        self._rows = Batch()
        self._wake = asyncio.Event()
        self._last: asyncio.Future[Effects] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._is_broken = False
        order = {"program": config.program.main, "seed": config.seed, "options": config.options}
        self.program = ProgramProcess(
            order, contents.folder / "program", contents.folder / "program.log", self._called, self._program_ended
        )

    # ------------------------------------------------------------ events in

    def post(self, event: Event, kept: KeptUpdate | None = None) -> "asyncio.Future[Effects]":
        """Let the machine decide about an event, and return its effects as soon as they are on disk and carried out.

        Args:
            event: the event.
            kept: the durable reply that the event received; its row is written with the event that accepts it.
        """
        try:
            return self._post(event, kept)
        except BaseException as error:  # the machine may be ahead of the journal: nothing more is written
            self._is_broken = True
            self._shared.crash(error)
            raise

    def _post(self, event: Event, kept: KeptUpdate | None) -> "asyncio.Future[Effects]":
        if self._is_broken:
            raise RuntimeError(f"run {self.run_id} is broken until a restart replays its journal")
        now = self._clock.now()
        effects = self.machine.receive(event, now)
        self._seq += 1
        done = self._last = self._loop.create_future()
        self._add_rows(event, effects, now, kept)
        self._posted.append(_Posted(effects, tuple(lines_of(self.machine, event, effects)), done))
        self._wake.set()
        self._arm_timer()
        return asyncio.shield(done)

    def _add_rows(self, event: Event, effects: Effects, now: float, kept: KeptUpdate | None) -> None:
        rows, ledger = self._rows, self.machine.ledger
        rows.entries.append(Entry(self.run_id, self._seq, now, *encode_event(event)))
        for effect in effects:
            if isinstance(effect, Accept) and kept is not None:
                rows.updates.append(UpdateRow(self.run_id, effect.digest, kept.meta, kept.data))
        is_over = any(isinstance(effect, EndRun) for effect in effects)
        if is_over or isinstance(event, RunStarted | ResumeRequested):
            rows.changes.append(RunChange(self.run_id, ledger.state, ledger.cause, now if is_over else None))

    @property
    def where(self) -> str:
        """The place of the run in its course, for the log."""
        return f"exchange {len(self.machine.ledger.exchanges)}"

    def is_news(self, client_id: ClientId, number: RoundId) -> bool:
        """Return whether a client's failure to answer a message changes anything."""
        return self.machine.waits_for(client_id, number)

    async def on_disk(self) -> None:
        """Wait until all past decisions are on disk; an answer that rests on them may leave only then."""
        if self._last is not None and not self._last.done():
            await asyncio.shield(self._last)

    def start(self) -> None:
        """Start the task that writes and acts."""
        self._spawn(self._write_and_act())

    async def stop(self) -> None:
        """End the program's process and all tasks, as a crash would: the next process goes on from the journal."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.program.stop()

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (deadline := self.machine.deadline) is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._clock.now()), self._time_passed)

    def _time_passed(self) -> None:
        deadline = self.machine.deadline
        if deadline is None or self._clock.now() < deadline:
            self._arm_timer()  # the deadline moved, or the loop's timer fired a little early
            return
        self.post(TimePassed())

    # ------------------------------------------------------------ onto the disk

    async def _write_and_act(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            posted, self._posted = self._posted, []
            rows, self._rows = self._rows, Batch()
            if not posted:
                continue
            crash_points.reached("journal.before_write")
            await self._commit(rows)
            crash_points.reached("journal.after_write")
            for entry in rows.entries:
                crash_points.reached("exchange.entry", entry.kind)
            for one in posted:
                for line in one.lines:
                    logger.info("%s: %s", self.run_id, line)
                for effect in one.effects:
                    self._act(effect)
                one.done.set_result(one.effects)
                for listener in self.listeners:
                    listener(one.effects)
            self._look()

    async def _commit(self, rows: Batch) -> None:
        while True:
            try:
                await self._loop.run_in_executor(self._shared.journal_thread, self._shared.journal.commit, rows)
                return
            except DiskFull as error:
                logger.error("the journal cannot be written, the run waits for space: %s", error)
                await asyncio.sleep(DISK_RETRY_S)

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
                    self._spawn(self._answer(call, numbers))
            case StartProgram():
                self._spawn(self._start_program())
            case EndRun(state, cause):
                self._spawn(self._end(state, cause))

    def _invitation(self, effect: Deliver) -> ServerMessage:
        message, config = effect.message, self.config
        content = self.contents.keep(message.content)
        seed = messages.training_seed(config.seed, config.name, effect.number, message.client_id)
        invite = Invite(
            run_id=self.run_id,
            round_id=effect.number,
            task=self.task,
            base_version=effect.number,
            model_digest=content.digest,
            time_left_s=max(0.0, effect.deadline - self._clock.now()),
            seed=seed,
            local=self._local,
            grace_s=config.round.grace,
            manifest=messages.inline(content.manifest_bytes),
            data=content.small_data,
            counted_round=effect.counted,
            model_seed=config.seed,
            message=message.kind,
            group=message.group,
        )
        return ServerMessage(invite=invite)

    async def _answer(self, call: int, numbers: tuple[RoundId, ...]) -> None:
        found = [sent for sent in map(self.machine.ledger.sent, numbers) if sent is not None]
        digests = [sent.reply for sent in found if sent.reply is not None]
        read = partial(self._shared.journal.updates, self.run_id, digests)
        rows = await on_thread(self._shared.journal_thread, read) if digests else {}
        metas = {digest: decode_meta(row.meta, where=f"reply {digest}") for digest, row in rows.items()}
        pieces = {digest: parse_update(meta.manifest).pieces for digest, meta in metas.items()}
        self.program.answer(call, replies=[self._reply(sent, pieces) for sent in found])

    def _reply(self, sent: Sent, pieces: dict[Digest, tuple[Piece, ...]]) -> Json:
        if sent.reply is None:
            return reply_row(sent)
        tensors = [(piece.tensor, piece.num_bytes) for piece in pieces[sent.reply]]
        return reply_row(sent, self.store.update_path(sent.reply), tensors)

    async def _start_program(self) -> None:
        if not self.machine.ledger.is_open:
            return
        self._looking.clear()  # of a process that died
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
        """Take a call of the program's process, which is code of ours around the operator's own."""
        number = call["call"]
        match call["op"]:
            case "nodes":
                self._looking.append(number)
                self._look()
            case "content":
                pieces = tuple(Piece(t, d, tuple(o), tuple(n), s) for t, d, o, n, s in call["pieces"])
                digest, path = self.contents.offer(pieces, call["piece_bytes"])
                self.program.answer(number, digest=digest, path=None if path is None else str(path))
            case "send":
                self.post(self._asked(number, call))
            case "pull":
                self._pulled(number, tuple(map(RoundId, call["numbers"])))

    def _look(self) -> None:
        """Tell the nodes to the calls that ask for them; the first look of a run waits for `round.min_available`."""
        ledger = self.machine.ledger
        if ledger.looks or len(ledger.membership.present) >= self.config.round.min_available:
            looking, self._looking = self._looking, []
            for number in looking:
                self.post(NodesAsked(number))

    def _asked(self, number: int, call: Json) -> ExchangeAsked:
        listed = []
        for node, kind, digest, group, ttl in call["messages"]:
            content = self.contents.keep(Digest(digest))
            listed.append(Message(node, kind, content.digest, content.manifest.num_bytes, group, float(ttl)))
        return ExchangeAsked(number, tuple(listed), call["timeout"], call["in_order"], call["waits"])

    def _pulled(self, number: int, numbers: tuple[RoundId, ...]) -> None:
        if self.machine.has_pull_for(numbers):
            self.post(RepliesPulled(number, numbers))
        else:
            self.program.answer(number, replies=[])

    def _program_ended(self, error: str, is_dead: bool) -> None:
        self.post(ProgramEnded(error, is_dead))

    # ------------------------------------------------------------ tasks

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        """End the process after a mistake of ours: the next process recovers by replay."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("run %s ends this process after a mistake of ours", self.run_id, exc_info=error)
            self._shared.crash(error)
