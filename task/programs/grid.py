"""The grid of a server program: the nodes of its run, and the messages to them.

    def main(grid):
        weights = np.zeros(10)
        for _ in range(3):
            content = Content({"lr": 0.1}, {"w": weights})
            replies = grid.send([Outgoing(node, "train", content) for node in grid.nodes()], timeout=600)
            weights = np.mean([reply.content.arrays["w"] for reply in replies if reply.content], axis=0)

Every input of the program comes from these calls, and the coordinator's journal has each answer. So a killed program is
replayed from its first line and gets the same answers, as long as it sends the same messages. It has to draw random
numbers from generators that are seeded (Python's, numpy's and torch's are), and to send no clock readings.
"""

import hashlib
import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.ground.folders import sync_folder
from atoll.task.arrays import Arrays
from atoll.task.content import Content, from_tensors, is_encodable, tensor_name, to_tensors
from atoll.task.noise import Noise, noise_of
from atoll.task.programs.link import Link
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor, in_order
from atoll.tensors.pieces import piece_bytes_of

if TYPE_CHECKING:
    from atoll.ground.noise.generator import SecretGenerator

TTL_S = 43200.0
"""Default time in which a reply is of use [s]."""

MAPPED_MIN = 1 << 20
"""Size from which a reply stays in its file until its arrays are used [bytes]; each such reply holds one descriptor."""

KINDS = ("train", "evaluate", "query", "get_parameters", "get_properties")
NAME_MAX = 256


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to a node."""

    node: str
    """The name of the site."""
    kind: str
    """One of `KINDS`, with an action if there is a dot: "query.stats"."""
    content: Content
    group: str = ""
    """Any text of the program, such as the number of its round."""
    ttl: float = TTL_S
    """Time in which its reply is of use [s]; positive."""

    def __post_init__(self) -> None:
        if self.kind.partition(".")[0] not in KINDS or len(self.kind) > NAME_MAX or not self.kind.isprintable():
            raise ValueError(f"kind: got {self.kind!r}; allowed: {', '.join(KINDS)}, with an action as in query.stats")
        for name, text in (("node", self.node), ("group", self.group)):
            if len(text) > NAME_MAX:
                raise ValueError(f"{name}: got {len(text)} characters; allowed: at most {NAME_MAX}")
            if not is_encodable(text):
                raise ValueError(f"{name}: got {text!r}; allowed: text without lone surrogates")
        if not 0.0 < self.ttl < math.inf:
            raise ValueError(f"ttl: got {self.ttl!r} s; allowed: a positive and finite time")


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of a node, or the reason why there is none."""

    number: int
    """The number of the message in its run."""
    node: str
    kind: str
    group: str
    content: Content | None
    error: str = ""
    """The reason why the reply has no content."""
    place: int = 0
    """The place of its message in the call that sent it, from 0."""
    ended_at: float = 0.0
    """The instant at which the coordinator received it [s since the epoch]; 0: it did not arrive."""


class Grid:
    """The nodes of a run, for one process of its server program; any thread may use it.

    Args:
        link: the socket to the coordinator.
        order: the coordinator's order, which has the key of its noise.
    """

    def __init__(self, link: Link, order: Mapping[str, Any] | None = None) -> None:
        self._link, self._order = link, order or {}
        self._storing = threading.Lock()
        self._replies_so_far = 0
        self._noise = self._noise_now()

    @property
    def has_secret(self) -> bool:
        """Return whether `secret_rng` is drawn from a secret."""
        return self._noise.is_secret

    @property
    def run_number(self) -> int:
        """Return the public number of the run, the same after a kill, from 1 to 2^63 - 1; 0: it has none."""
        return int(self._order.get("run_number") or 0)

    @property
    def secret_rng(self) -> "SecretGenerator":
        """The generator of secret noise, from a secret of the coordinator's state directory.

        It is reseeded at each reply, from all replies so far: so a replayed program draws the same noise, and a program
        that gets other replies, as after the restoration of a backup, draws other noise: the difference of two results
        does not reveal the hidden values. Without a secret, as in a simulation, it follows from the seed of the run and
        protects nothing.
        """
        return self._noise.generator(self._order.get("seed") or 0)

    def _noise_now(self) -> Noise:
        return noise_of(self._order, "replies", self._replies_so_far.to_bytes(32).hex())

    def nodes(self) -> list[str]:
        """Return the names of the connected sites, sorted."""
        return list(self._link.call("nodes")["nodes"])

    def send(self, messages: Sequence[Outgoing], timeout: float | None = None) -> list[Reply]:
        """Send messages, and return the replies that are in when the last one is, or after `timeout` seconds.

        The replies have the order of the messages; a node without one by then has no reply in the list. A node that
        cannot answer, or whose reply is not sound, has one with an `error`.

        Raises:
            ValueError: `timeout` is negative or no number.
            OSError: the file of a reply cannot be read here, such as for want of descriptors: no fault of its node.
        """
        if timeout is not None and not timeout >= 0.0:
            raise ValueError(f"timeout: got {timeout!r} s; allowed: None, or a time of at least 0")
        if not messages:
            return []
        return self._replies(self._link.call("send", timeout=timeout, waits=True, **self._said(messages)))

    def push(self, messages: Sequence[Outgoing]) -> list[int]:
        """Send messages, and return their numbers at once."""
        if not messages:
            return []
        return list(self._link.call("send", timeout=None, waits=False, **self._said(messages))["numbers"])

    def pull(self, numbers: Sequence[int]) -> list[Reply]:
        """Return the replies to pushed messages that have arrived and were not pulled before, in the order given."""
        return self._replies(self._link.call("pull", numbers=list(numbers))) if numbers else []

    def _said(self, messages: Sequence[Outgoing]) -> dict[str, Any]:
        stored: dict[int, str] = {}  # a content for several nodes is one object, hashed and stored once
        for message in messages:
            if id(message.content) not in stored:
                stored[id(message.content)] = self._store(message.content)
        listed = [[m.node, m.kind, stored[id(m.content)], m.group, m.ttl] for m in messages]
        offered = list(stored.values())
        return {
            "messages": listed,
            "contents": offered,
            "in_order": threading.current_thread() is threading.main_thread(),
        }

    def _store(self, content: Content) -> str:
        """Write a content into the coordinator's folder, unless it has it, and return its digest."""
        tensors = to_tensors(content)
        layout = in_order(Tensor(name, "U8", array.shape) for name, array in tensors.items())
        piece_bytes = piece_bytes_of(layout)
        pieces = safetensors_file.pieces_of(layout, tensors, piece_bytes)
        rows = [[p.tensor, p.dtype, p.offsets, p.lengths, p.sha256] for p in pieces]
        with self._storing:  # threads may send the same: one of them writes it, and none sees a half of it
            answer = self._link.call("content", pieces=rows, piece_bytes=piece_bytes)
            if answer["path"] and not Path(answer["path"]).exists():
                _write(Path(answer["path"]), tensors, pieces, piece_bytes, content)
        return str(answer["digest"])

    def _replies(self, answer: dict[str, Any]) -> list[Reply]:
        replies = [_reply(row) for row in answer["replies"]]
        if replies:
            for row in answer["replies"]:  # in any order: threads take theirs as it happens
                said = json.dumps([row["number"], row["error"] or row.get("digest", "")])
                self._replies_so_far ^= int.from_bytes(hashlib.sha256(said.encode()).digest())
            self._noise = self._noise_now()
        if answer.get("is_read"):  # the coordinator deletes old replies, and waits for those that are being read
            self._link.tell("read", call=answer["call"])
        return replies


def _write(path: Path, tensors: Arrays, hashed: tuple[Piece, ...], piece_bytes: int, content: Content) -> None:
    """Write a content with the digest of the hashed pieces; the file gets its name once it has these bytes.

    Raises:
        ValueError: another thread has changed an array in place since it was hashed.
    """
    unchecked = path.with_name(f"{path.name}.unchecked")
    written = safetensors_file.write(unchecked, tensors, piece_bytes=piece_bytes)
    changed = {piece.tensor for piece in set(hashed) ^ set(written)}
    if changed:
        unchecked.unlink()
        names = [name for number, name in enumerate(content.arrays, start=1) if tensor_name(number) in changed]
        raise ValueError(f"{', '.join(names)}: changed by another thread while being sent; send a copy of the array")
    os.replace(unchecked, path)
    sync_folder(path.parent)


def _reply(row: dict[str, Any]) -> Reply:
    content, error = None, row["error"]
    if not error:
        try:
            content = _content(Path(row["path"]), row["tensors"])
        except ValueError as fault:  # an OSError is a fault of this machine: without this node the model would differ
            error = f"its reply cannot be read: {fault}"
    return Reply(row["number"], row["node"], row["kind"], row["group"], content, error, row["place"], row["ended_at"])


def _content(path: Path, tensors: list[list[Any]]) -> Content:
    """Read the bytes of a reply, tensor after tensor."""
    is_mapped = path.stat().st_size >= MAPPED_MIN  # the pages of an array come with its first use
    data = np.memmap(path, np.uint8, "c") if is_mapped else np.fromfile(path, np.uint8)
    position, found = 0, {}
    for name, num_bytes in tensors:
        found[name] = data[position : position + num_bytes]
        position += num_bytes
    return from_tensors(found)
