"""A Flower `Grid` over the grid of a run of messages: a ServerApp runs unchanged.

    app = ServerApp(...)                      program.main = "server_app.py:app"

Replies have the order of the messages, and are handed over unchanged. For Flower's aggregation, a reply that does not
fit becomes an error of its node (`fitting`).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid as FlowerGridBase
from flwr.supercore.run import Run

from atoll.flower.app import SERVER, UNNUMBERED, node_id
from atoll.flower.client_host import code_of
from atoll.flower.hosted.fitting import FAILED, only_fitting
from atoll.flower.hosted.replies import records_of
from atoll.flower.records import to_content
from atoll.flower.secret_noise import NoisyContext, flower_noise
from atoll.task.content import Content
from atoll.task.programs.grid import TTL_S, Grid, Outgoing, Reply
from atoll.task.programs.link import LATE

NO_MESSAGE, UNAVAILABLE = 3, 5
"""Flower's error codes of a message whose time to live is over, and of an absent node."""


def as_program(app: Any, options: Mapping[str, Any]) -> Callable[[Grid], None]:
    """Return a ServerApp as the function of a server program; `options` is its run config."""

    def main(grid: Grid) -> None:
        run_id = grid.run_number or UNNUMBERED
        _identify(run_id)
        context = NoisyContext(run_id, SERVER, {}, RecordDict(), dict(options))
        context.source = lambda: grid.secret_rng
        flower_noise().begin(context.source if grid.has_secret else None, None)
        with only_fitting():
            app(FlowerGrid(grid), context)

    return main


def _identify(run_id: int) -> None:
    """Set Flower's run id and node id of the process, without which Flower makes no message."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # before 1.37
        return
    TaskIdentity.task_id = TaskIdentity.node_id = SERVER
    TaskIdentity.run_id = run_id


_Base: Any = FlowerGridBase  # flwr may not be installed where types are checked


class FlowerGrid(_Base):  # type: ignore[misc]
    """The nodes of a run as Flower's `Grid`.

    Args:
        grid: the grid of the run.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._run = grid, Run.create_empty(grid.run_number or UNNUMBERED)
        self._sites: dict[int, str] = {}
        self._pushed: dict[str, Message] = {}
        self._names = itertools.count(1)

    def set_run(self, run: Any) -> None:
        """Store Flower's facts about the run, which `run` returns."""
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
        """Send messages, and return the replies, in order, once all have arrived or after the timeout.

        As in Flower, the end of a message's time to live is an error of its node, the timeout is not.
        """
        sent = list(messages)
        for message in sent:
            _name(message, f"sent-{next(self._names)}")
        replies = self._grid.send(self._outgoing(sent), timeout)
        places = [reply.place for reply in replies]
        found = dict(zip(places, _messages([sent[place] for place in places], replies), strict=True))
        for place, message in enumerate(sent):
            if place not in found and (timeout is None or message.metadata.ttl < timeout):
                found[place] = _reply(message, f"late-{place}", LATE, message.metadata.created_at)
        return [found[place] for place in sorted(found)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, and return their ids at once."""
        sent = list(messages)
        numbers = [str(number) for number in self._grid.push(self._outgoing(sent))]
        for message, number in zip(sent, numbers, strict=True):
            _name(message, number)
            self._pushed[number] = message
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to pushed messages that have arrived and were not pulled before."""
        replies = self._grid.pull([int(number) for number in message_ids if number in self._pushed])
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
    """Set a message's id, to which its reply refers, as Flower's grids do."""
    message.metadata.__dict__["_message_id"] = text


def _messages(sent: list[Message], replies: list[Reply]) -> list[Message]:
    """Return the replies as Flower messages, each with a reference to its message."""
    return [
        _reply(message, f"reply-{reply.number}", found, reply.ended_at or message.metadata.created_at)
        for message, reply, found in zip(sent, replies, records_of(replies), strict=True)
    ]


def _reply(message: Message, name: str, found: RecordDict | str, created_at: float) -> Message:
    of = message.metadata
    metadata = Metadata(
        run_id=of.run_id,
        message_id=name,
        src_node_id=of.dst_node_id,
        dst_node_id=of.src_node_id,
        reply_to_message_id=of.message_id,
        group_id=of.group_id,
        created_at=created_at,  # from the journal: the same in a replay
        ttl=of.ttl,
        message_type=of.message_type,
    )
    if isinstance(found, str):
        code = UNAVAILABLE if found.startswith(("lease_expired", "left", "revoked")) else FAILED
        code = NO_MESSAGE if found == LATE else code
        return _made(metadata=metadata, error=Error(code_of(found) or code, found))
    return _made(metadata=metadata, content=found)


def _made(**named: Any) -> Message:
    """Make a message with given metadata, which Flower's signature calls internal."""
    make: Any = Message
    message: Message = make(**named)
    return message
