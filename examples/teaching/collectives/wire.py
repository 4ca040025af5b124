"""Sends between two ranks, and the number of bytes that each rank has sent and received."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Wait = Callable[[], None]


class Wire:
    """One rank's end of its connections to all others. An empty message is not sent, and not counted.

    Args:
        group: the ranks, numbered 0 .. size - 1 within it; None for all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None
        self._group = chosen
        self.rank, self.size = chosen.rank(), chosen.size()
        self.bytes_sent = 0
        self.bytes_received = 0

    def send(self, tensor: torch.Tensor, to: int) -> Wait:
        """Begin to send; the tensor must not change until the returned wait is over."""
        if not tensor.numel():
            return _nothing
        self.bytes_sent += tensor.nbytes
        work = dist.isend(tensor.contiguous(), group=self._group, group_dst=to)
        return _waiting(work)

    def receive(self, into: torch.Tensor, source: int) -> Wait:
        """Begin to receive into a contiguous tensor."""
        if not into.numel():
            return _nothing
        self.bytes_received += into.nbytes
        return _waiting(dist.irecv(into, group=self._group, group_src=source))

    def receive_from_any(self, into: torch.Tensor) -> int:
        """Receive from the first sender, and return its rank."""
        self.bytes_received += into.nbytes
        return dist.get_group_rank(self._group, dist.recv(into, group=self._group))

    def exchange(self, tensor: torch.Tensor, to: int, into: torch.Tensor, source: int) -> None:
        """Send and receive at once: in a ring where all ranks send first, all would wait forever."""
        both = self.send(tensor, to), self.receive(into, source)
        wait_all(both)


def wait_all(waits: Sequence[Wait]) -> None:
    """Wait until all of them are over."""
    for wait in waits:
        wait()


def _nothing() -> None:
    return None


def _waiting(work: dist.Work | None) -> Wait:
    assert work is not None, "this process is not in the group"
    sent = work

    def wait() -> None:
        sent.wait()

    return wait
