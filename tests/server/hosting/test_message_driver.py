"""The driver of a run of messages with a real journal; its program and nodes are lists of what they were told."""

import asyncio
import hashlib
import json
import struct
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.ground.durable import DiskFull
from atoll.protocol.vocabulary import ClientId, Digest, FailureReason, RoundId, RunId
from atoll.server.clock import MonotoneClock
from atoll.server.config.run import RunConfig
from atoll.server.exchanges.events import Event, ExchangeAsked, Message, ProgramEnded, ProgramStarted, RepliesPulled
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.files.run_store import RunStore
from atoll.server.hosting import journaled_driver, message_driver, retention
from atoll.server.hosting.message_driver import MessageDriver
from atoll.server.hosting.run_parts import SharedParts
from atoll.server.journal.journal import Journal
from atoll.server.journal.pruning import Stay
from atoll.server.journal.rows import Batch, RunRow
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.programs.contents import Contents
from atoll.server.rounds.events import ClientFailed, ClientJoined, RunStarted
from atoll.server.views.message_views import wait_of_program, what_a_program_waits_for
from atoll.tensors.layout import Piece
from tests.waiting import BOUND_S
from tests.wire.test_round import live

NORTH, NOBODY = ClientId("north"), ClientId("nobody")
RUN = RunId("talk-1")


class FullDisk(Journal):
    """A journal on a disk that has room for some commits."""

    room: int | None = None

    def commit(self, batch: Batch) -> None:
        if self.room == 0:
            raise DiskFull("no space left on device")
        self.room = None if self.room is None else self.room - 1
        super().commit(batch)


class Program:
    """A program's process: the answers that it got."""

    log = Path("program.log")

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, Any]]] = []

    def answer(self, call: int, **fields: Any) -> None:
        self.answers.append((call, fields))

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


class Nodes:
    """The control streams of the nodes: the numbers of the messages that were sent to them."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def send(self, client_id: ClientId, message: Any) -> None:
        self.numbers.append(message.invite.round_id)


class Hosted:
    """A run of messages with one node."""

    def __init__(self, state: StateDirectory, thread: ThreadPoolExecutor, **program: Any) -> None:
        self.journal, self.nodes, self.crashes = FullDisk(state), Nodes(), list[BaseException]()
        shared = SharedParts(
            journal=self.journal,
            journal_thread=thread,
            hub=self.nodes,  # type: ignore[arg-type]
            clock=MonotoneClock(),
            keep_rounds=10,
            crash=self.crashes.append,
            is_in_flight=lambda *_: False,
            assign_rank=lambda: 0,
            codecs_of_rank=None,
            announce_end=lambda *_: None,
        )
        config = RunConfig(name="talk", task="m:t", program={"main": "m:main", **program})
        self.journal.add_run(RunRow.new(RUN, config, config.rules, shared.clock.now()))
        folder = state.run(RUN)
        store = RunStore(folder, has_files_only=True)
        machine = ExchangeMachine(config.exchange_rules)
        self.driver = MessageDriver(RUN, config, machine, 0, Contents(folder, store), shared)
        self.driver.program = self.program = Program()  # type: ignore[assignment]

    async def all(self, *events: Event) -> None:
        """Post events, and wait until they are carried out."""
        await asyncio.gather(*[self.driver.post(event) for event in events])

    async def answer(self, call: int) -> dict[str, Any]:
        """Return the answer to a call, once it is there."""
        async with asyncio.timeout(BOUND_S):
            while call not in dict(self.program.answers):
                await asyncio.sleep(0.01)
        return dict(self.program.answers)[call]

    def content(self, value: int = 1) -> Digest:
        """Offer a content of one byte, write it as a program does, and return its digest."""
        data = bytes([value])
        piece = Piece("w", "U8", (0,), (1,), hashlib.sha256(data).hexdigest())
        digest, path = self.driver.contents.offer((piece,), 4 << 20)
        if path is not None:
            header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
            path.write_bytes(struct.pack("<Q", len(header)) + header + data)
        self.driver.contents.keep(digest)
        return digest

    def push(self, *nodes: ClientId, call: int = 1, value: int = 1) -> ExchangeAsked:
        """Return a call that pushes a message to each of these; one to a node that is not here ends at once."""
        content = self.content(value)
        listed = tuple(Message(node, "train", content, 1) for node in nodes)
        return ExchangeAsked(call, listed, None, is_waiting=False)


@asynccontextmanager
async def hosted(path: Path, **program: Any) -> AsyncIterator[Hosted]:
    """Host a run whose program has started and whose node is connected."""
    with StateDirectory.open(path) as state, ThreadPoolExecutor(1) as thread:
        run = Hosted(state, thread, **program)
        run.driver.start()
        await run.all(RunStarted(Digest("")), ClientJoined(NORTH, "1"))
        try:
            yield run
            assert not run.crashes
        finally:
            await run.driver.stop()


@live
async def test_a_pull_waits_for_the_record_of_an_exchange_that_is_not_yet_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journaled_driver, "DISK_RETRY_S", 0.01)
    async with hosted(tmp_path) as run:
        await run.all(run.push(NOBODY, NORTH))
        run.journal.room = 1
        pulled = run.driver.post(RepliesPulled(2, (RoundId(1), RoundId(2))))
        while run.driver._posted:
            await asyncio.sleep(0)
        closed = run.driver.post(ClientFailed(NORTH, RoundId(2), FailureReason.TRAINING_FAILED, "no data"))
        await pulled
        await asyncio.sleep(0.1)
        assert 2 not in dict(run.program.answers), "the exchange has closed, and its record is not on disk"
        run.journal.room = None
        await closed
        assert [one["number"] for one in (await run.answer(2))["replies"]] == [1]


@live
async def test_an_answer_for_a_process_that_has_died_does_not_reach_the_next_one(tmp_path: Path) -> None:
    async with hosted(tmp_path) as run:
        await run.all(run.push(NOBODY))
        await run.all(RepliesPulled(2, (RoundId(1),)), ProgramEnded(is_dead=True))
        await run.all(ProgramStarted(), run.push(NOBODY), RepliesPulled(3, (RoundId(1),)))
        await run.answer(3)
        assert 2 not in dict(run.program.answers)


@live
async def test_a_content_stays_until_the_event_that_sends_it_is_on_disk(tmp_path: Path) -> None:
    async with hosted(tmp_path) as run:
        await run.all(run.push(NORTH))
        digest = run.content(2)
        first = run.driver.post(ClientFailed(NORTH, RoundId(1), FailureReason.TRAINING_FAILED, "no data"))
        row = [NORTH, "train", digest, "", 60.0]
        run.driver._called(
            {"op": "send", "call": 2, "messages": [row], "contents": [digest]}
            | {"timeout": None, "in_order": True, "waits": False}
        )
        last = run.driver.post(ClientFailed(NORTH, RoundId(2), FailureReason.TRAINING_FAILED, "no data"))
        await asyncio.gather(first, last)
        assert run.nodes.numbers == [1, 2], "each is delivered, though its exchange has closed in memory"
        assert run.driver.contents.by_digest(digest) is None, "nothing needs it now"


@live
async def test_the_rows_of_replies_go_before_their_files_and_their_records_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def prune(run_id: RunId, stay: Stay) -> None:
        done.extend(["rows"] * (stay.live is not None) + ["records"] * (stay.rounds is not None))

    monkeypatch.setattr(retention, "INTERVAL_S", 0.01)
    async with hosted(tmp_path) as run:
        monkeypatch.setattr(run.journal, "prune", prune)
        monkeypatch.setattr(run.driver.store, "collect_garbage", lambda *_, **__: done.append("files"))
        await run.all(run.push(NOBODY), ProgramEnded())
        while "records" not in done:
            await asyncio.sleep(0.01)
        assert done[:3] == ["rows", "files", "records"], "a backup between two of them lacks no file that a row names"


@live
async def test_a_program_that_asks_for_the_nodes_and_nothing_else_is_in_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(message_driver, "LOOKING_S", 0.0)
    caplog.set_level("INFO")
    async with hosted(tmp_path) as run:
        for call in range(1, 5):
            run.driver._called({"op": "nodes", "call": call})
            await run.answer(call)
    (told,) = [record.message for record in caplog.records if "main()" in record.message]
    assert told == (
        f"{RUN}: main() keeps asking for the nodes; 1 node is connected (north); its output is in program.log"
    )


@live
async def test_the_first_look_at_the_nodes_says_how_many_it_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with hosted(tmp_path) as run:
        three = run.driver.config.round.model_copy(update={"min_available": 3})
        run.driver.config = run.driver.config.model_copy(update={"round": three})
        run.driver._called({"op": "nodes", "call": 1})
        await run.all(ClientJoined(ClientId("south"), "1"))
        assert not run.program.answers
        ledger = run.driver.machine.ledger
        waits = what_a_program_waits_for(ledger, 3)
        assert waits == (
            "its server program gets no nodes before 3 are connected (round.min_available); "
            "2 nodes are connected (north, south)"
        )
        wait = wait_of_program(ledger, 3, 17.0)
        assert wait is not None
        assert (wait.cause, wait.since) == ("too_few_clients", 17.0)
        await run.all(ClientJoined(ClientId("west"), "1"))
        assert len((await run.answer(1))["nodes"]) == 3
        assert wait_of_program(ledger, 3, 17.0) is None
        assert "works, or waits for more nodes; 3 nodes are connected" in what_a_program_waits_for(ledger, 3)
        await run.all(run.push(NORTH))
        assert what_a_program_waits_for(ledger, 3) == "it waits for replies of north"
    (told,) = [record.message for record in caplog.records if "main()" in record.message]
    assert "main() gets no nodes before 3 are connected (round.min_available); 1 node is connected (north)" in told
