"""The exchange between rank processes over torch.distributed's gloo, on one network interface.

A process group lives for one fold, so that the death of a rank costs the others only that fold. Only tensors are
exchanged, never objects (torch would pickle them). gloo does not encrypt: the operator chooses the interface, by
default loopback.
"""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from atoll.aggregation.fold.exchange import Bytes, ExchangeBroken

SIOCGIFADDR = 0x8915
"""Linux' ioctl for the IPv4 address of an interface, from sockios.h."""

POLL_S = 0.01
"""Interval between two checks whether all ranks have arrived [s]."""

KEYS_MAX = 10_000
"""Number of keys that a meeting point may hold, of about 200 bytes each; a fold leaves two for each rank."""

STORE_TIMEOUT_S = 10.0
"""Time within which the meeting point must answer [s]: its process is alive, or the coordinator ends the attempt."""


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        OSError: no interface has this name, or it has no address; the message lists the existing ones.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError as error:
            there = ", ".join(name for _, name in socket.if_nameindex())
            raise OSError(f"interface {interface!r}: {error.strerror} (there are: {there})") from error


class MeetingPoint:
    """Rendezvous store of the ranks of a fold, in rank 0's process.

    Its keys are never deleted, so it is replaced before it grows large.
    """

    def __init__(self, interface: str) -> None:
        host = interface_address(interface)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"

    @property
    def is_full(self) -> bool:
        """Whether the keys of past folds fill the store, so that it should be replaced."""
        return self._store.num_keys() > KEYS_MAX


class Gloo:
    """One rank of one fold: `with Gloo(...) as exchange`. One at a time in a process, used by one thread.

    Args:
        rank: the number of this rank, from 0.
        size: the number of ranks.
        store_address: the address of rank 0's meeting point.
        key: the key of this attempt at this fold, the same at each rank and never used before.
        interface: the network interface that the ranks exchange over.
        timeout_s: the time within which the others must answer once all have arrived [s].
        waiting: called repeatedly until all have arrived; its exception ends the wait.

    Raises:
        ExchangeBroken: the meeting point is gone, or a rank does not answer.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        store_address: str,
        key: str,
        interface: str,
        timeout_s: float,
        waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = rank, size
        self.sent_bytes = 0
        self._args = (store_address, key, interface, timedelta(seconds=timeout_s))
        self._waiting = waiting

    def __enter__(self) -> Self:
        store_address, key, interface, timeout = self._args
        host, _, port = store_address.rpartition(":")
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
            prefixed = PrefixStore(key, store)
            self._wait_for_all(prefixed)
            dist.init_process_group("gloo", store=prefixed, rank=self.rank, world_size=self.size, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            self._leave()
            raise ExchangeBroken(f"the ranks cannot meet at {store_address}: {_first_line(error)}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _wait_for_all(self, store: PrefixStore) -> None:
        """Wait until all ranks have arrived: some inspect large files first, and torch's wait cannot be interrupted."""
        store.set(f"here.{self.rank}", "")
        everyone = [f"here.{rank}" for rank in range(self.size)]
        while not store.check(everyone):
            self._waiting()
            time.sleep(POLL_S)

    def _leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def swap(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """Exchange parts, see `Exchange.swap`: one all-to-all of the sizes, one of the bytes."""
        try:
            return self._swap(parts)
        except RuntimeError as error:
            raise ExchangeBroken(f"another rank is gone, or does not answer: {_first_line(error)}") from error

    def _swap(self, parts: Sequence[Bytes]) -> list[Bytes]:
        sent_sizes = [part.nbytes for part in parts]
        sizes = torch.empty(self.size, dtype=torch.int64)
        dist.all_to_all_single(sizes, torch.tensor(sent_sizes))
        received_sizes = [int(size) for size in sizes]
        received = np.empty(sum(received_sizes), np.uint8)
        sent = np.concatenate(parts) if sum(sent_sizes) else np.empty(0, np.uint8)
        dist.all_to_all_single(torch.from_numpy(received), torch.from_numpy(sent), received_sizes, sent_sizes)
        self.sent_bytes += sum(sent_sizes) - sent_sizes[self.rank]
        ends = np.cumsum(received_sizes)
        return [received[end - size : end] for end, size in zip(ends, received_sizes, strict=True)]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
