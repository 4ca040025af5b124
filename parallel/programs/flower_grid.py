"""A Flower `Grid` over the grid of a run of messages: a ServerApp runs unchanged. The only import of flwr in this room.

    app = ServerApp(...)                      program.main = "server_app.py:app"

Replies have the order of the messages. A reply that does not fit the others of its exchange (another record, key or
shape than most of them have, or a value that is not finite) becomes an error of its node: Flower's strategies would end
the run, or average the value into the model.
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, Context, Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid as FlowerGridBase
from flwr.supercore.run import Run

from atoll.parallel.flower.records import from_content, to_content
from atoll.parallel.programs.grid import TTL_S, Grid, Outgoing, Reply
from atoll.parallel.task.content import Content
from atoll.parallel.task.flower_app import RUN_ID, SERVER, node_id

FAILED, UNAVAILABLE = 2, 5
"""Flower's codes of an app that raised, and of a node that is away."""


def as_program(app: Any, options: Mapping[str, Any]) -> Callable[[Grid], None]:
    """Return a ServerApp as the function of a server program; `options` is its run config."""

    def main(grid: Grid) -> None:
        _identify()
        app(FlowerGrid(grid), Context(RUN_ID, SERVER, {}, RecordDict(), dict(options)))

    return main


def _identify() -> None:
    """Give the process the identity without which Flower makes no message."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # before 1.37
        return
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


_Base: Any = FlowerGridBase  # flwr may not be installed where types are checked


class FlowerGrid(_Base):  # type: ignore[misc]
    """Flower's view of the nodes of a run.

    Args:
        grid: the grid of the run.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._run = grid, Run.create_empty(RUN_ID)
        self._sites: dict[int, str] = {}
        self._pushed: dict[str, Message] = {}
        self._names = itertools.count(1)

    def set_run(self, run: Any) -> None:
        """Take what Flower knows of the run."""
        self._run = run

    @property
    def run(self) -> Any:
        """The facts of the run, in Flower's form."""
        return self._run

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected sites, in the order of their names."""
        sites = {node_id(site): site for site in self._grid.nodes()}
        self._sites |= sites
        return list(sites)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, and return the replies that are in by the last one or the timeout, in their order."""
        sent = list(messages)
        for message in sent:
            _name(message, f"sent-{next(self._names)}")
        replies = self._grid.send(self._outgoing(sent), timeout)
        return _messages([sent[reply.place] for reply in replies], replies)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids at once."""
        sent = list(messages)
        numbers = [str(number) for number in self._grid.push(self._outgoing(sent))]
        for message, number in zip(sent, numbers, strict=True):
            _name(message, number)
            self._pushed[number] = message
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to pushed messages that are in and were not pulled before."""
        replies = self._grid.pull([int(number) for number in message_ids])
        return _messages([self._pushed.pop(str(reply.number)) for reply in replies], replies)

    def _outgoing(self, messages: list[Message]) -> list[Outgoing]:
        contents: dict[int, Content] = {}  # one object for all nodes that get it
        for message in messages:
            if id(message.content) not in contents:
                contents[id(message.content)] = to_content(message.content)
        return [
            Outgoing(
                self._sites.get(message.metadata.dst_node_id, f"node {message.metadata.dst_node_id}"),
                message.metadata.message_type,
                contents[id(message.content)],
                message.metadata.group_id,
                message.metadata.ttl or TTL_S,
            )
            for message in messages
        ]


def _name(message: Message, text: str) -> None:
    """Give a message its id, to which its reply refers; Flower's own grids set it in this way."""
    message.metadata.__dict__["_message_id"] = text


def _messages(sent: list[Message], replies: list[Reply]) -> list[Message]:
    """Return the replies as Flower's, each to its message."""
    odd = faults_of(replies)
    return [_reply(m, r, r.error or odd.get(r.number, "")) for m, r in zip(sent, replies, strict=True)]


def _reply(message: Message, reply: Reply, error: str) -> Message:
    of = message.metadata
    metadata = Metadata(
        run_id=of.run_id,
        message_id=f"reply-{reply.number}",
        src_node_id=of.dst_node_id,
        dst_node_id=of.src_node_id,
        reply_to_message_id=of.message_id,
        group_id=of.group_id,
        created_at=of.created_at,  # no clock of ours: the same answers when the program repeats itself
        ttl=of.ttl,
        message_type=of.message_type,
    )
    if error or reply.content is None:
        code = UNAVAILABLE if error.startswith(("lease_expired", "left", "revoked")) else FAILED
        return _made(metadata=metadata, error=Error(code, error))
    return _made(metadata=metadata, content=from_content(reply.content))


def _made(**named: Any) -> Message:
    """Return a message with metadata of its own, which Flower's signature calls internal."""
    make: Any = Message
    message: Message = make(**named)
    return message


# ---------------------------------------------------------------- replies that do not fit


def faults_of(replies: list[Reply]) -> dict[int, str]:
    """Return why replies to train and evaluate messages do not fit the others of their exchange, by number.

    Compared are the names, kinds and keys of their records with those that most have, and the shape of each array with
    one that more than half of them have; ties go to the earlier message, so that equal sets give equal faults. A row of
    bytes, such as the trees of XGBoost, may have any length.
    """
    faults: dict[int, str] = {}
    for reply in replies:
        if reply.content is not None and (fault := _broken(reply.content)):
            faults[reply.number] = fault
    sound = [r for r in replies if r.content is not None and r.number not in faults]
    compared = [r for r in sound if r.kind.partition(".")[0] in ("train", "evaluate")]
    if len(compared) < 2:
        return faults
    for part, what in ((_keys, "records or keys"), (_shapes, "shapes")):
        counts = Counter(part(reply) for reply in compared)
        usual, number = counts.most_common(1)[0]
        if part is _shapes and 2 * number <= len(compared):
            continue
        for reply in compared:
            if part(reply) != usual:
                faults.setdefault(reply.number, f"its reply has other {what} than those of most nodes")
    return faults


def _broken(content: Content) -> str:
    """Return why a content is no sound reply; empty: it is."""
    try:
        records = from_content(content)
        for name, record in records.items():
            for key, item in record.items():
                if not _is_finite(item):
                    return f"its reply has a value that is not finite: {name}.{key}"
    except (ValueError, TypeError) as error:
        return f"its reply cannot be read: {error}"
    return ""


def _is_finite(item: Any) -> bool:
    if isinstance(item, Array):
        array = item.numpy()
        return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    return all(math.isfinite(one) for one in (item if isinstance(item, list) else [item]) if isinstance(one, float))


def _keys(reply: Reply) -> str:
    assert reply.content is not None
    return json.dumps([[name, kind, sorted(row[0] for row in rows)] for name, kind, rows in reply.content.plain])


def _shapes(reply: Reply) -> str:
    assert reply.content is not None
    return json.dumps(
        [
            [
                name,
                sorted(
                    [key, dtype, "any" if dtype == "uint8" and len(shape) == 1 else shape]
                    for key, dtype, shape, *_ in rows
                ),
            ]
            for name, kind, rows in reply.content.plain
            if kind == "arrays"
        ]
    )
