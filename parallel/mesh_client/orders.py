"""Requests (orders) of rank 0 to all ranks of a client, and the vote at the end of each, through a torch store.

    order/N        the request number N, as JSON
    end/N/RANK     the fault of a rank in it, as JSON; empty: none

A rank waits for its next order as long as it takes, which no collective may. All ranks vote at the end of an order, so
that an error on every rank, such as a task that does not fit, costs no restart. A rank that fails alone leaves
the others in a collective, where they cannot vote: it ends, and all restart. So when a rank does not vote in time.
"""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from atoll.parallel.launch.rank_fault import RankFault
from atoll.task.json_text import to_json

LOOK_S = 60.0
"""Seconds of one wait at the store."""

GRACE_S = 2.0
"""Seconds that a failed rank waits for the votes of the others."""

Json = dict[str, Any]


class Orders:
    """Requests (orders) of rank 0 to the other ranks of a group, and the votes on each.

    Args:
        store: the store of the group.
        rank: the rank of this process.
        size: the number of ranks.
        timeout_s: longest wait of rank 0 for the others' votes after its vote [s].
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._rank, self._size, self._timeout_s = store, rank, size, timeout_s
        self._number = 0

    def give(self, request: Mapping[str, Any]) -> None:
        """Send all other ranks their next order (a request as JSON); called by rank 0."""
        self._number += 1
        self._store.set(self._order(self._number), to_json(request))
        if self._number > 2:  # every rank is past it: it has voted about the next one
            for key in (self._order(self._number - 2), *self._ends(self._number - 2)):
                self._store.delete_key(key)

    def take(self) -> Json:
        """Wait for the next order; called by the other ranks."""
        self._number += 1
        key = self._order(self._number)
        while not self._wait([key], LOOK_S):
            pass
        order: Json = json.loads(self._store.get(key))
        return order

    def vote(self, fault: RankFault | None) -> list[RankFault] | None:
        """Vote at the end of an order, and return the faults of all ranks.

        None: this rank has failed, and others are still at work; its process must end. Of the ranks without a fault,
        the first waits for all votes.

        Raises:
            DistError: a rank has not voted in time.
        """
        ends = self._ends(self._number)
        self._store.set(ends[self._rank], "" if fault is None else fault.encode())
        if fault is not None:
            if not self._wait(ends, GRACE_S):
                return None
        elif self._rank == 0:
            self._store.wait(ends, timedelta(seconds=self._timeout_s))
        else:
            return []
        return [RankFault.decode(found) for end in ends if (found := self._store.get(end).decode())]

    def _order(self, number: int) -> str:
        return f"order/{number}"

    def _ends(self, number: int) -> list[str]:
        return [f"end/{number}/{rank}" for rank in range(self._size)]

    def _wait(self, keys: list[str], timeout_s: float) -> bool:
        """Wait for keys of the store; return whether all were set in time.

        Raises:
            DistError: rank 0, which holds the store, is gone.
        """
        until = time.monotonic() + timeout_s
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            if time.monotonic() < until - 0.5:
                raise
            return False
        return True
