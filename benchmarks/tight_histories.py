"""The same number of events as in histories, by hand: the baseline for judging histories.

An event of a history is planned (a draw of its latency, a push to the heap of the world), comes (a pop), changes a
state (a dict), and is recorded for the checks. After that, every event is replayed into a second state, and a third
state judges it. The coordinator's events are replayed from JSON, as from a disk. Those are the duties: no event has
rules, effects or faults. Histories are spread over the processors as ours are.
"""

import heapq
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from pydantic_core import from_json, to_json

CLIENTS = 8
HISTORIES_AT_ONCE = 25

Counts = tuple[int, int]
"""Events of the coordinator, and of its agents."""

Event = tuple[float, int, dict[str, Any]]


def history(seed: int, counts: Counts) -> int:
    """Run one history; return the number of events that all three states agree about."""
    rng, heap = random.Random(seed), list[Event]()
    written: list[tuple[float, dict[str, Any]]] = []
    live: dict[str, Any] = {}
    now, number, total = 0.0, 0, sum(counts)
    while len(written) < total:
        if number < total:
            body: dict[str, Any] = {
                "client_id": f"c{number % CLIENTS:02}",
                "round_id": number >> 4,
                "digest": f"{seed:040x}",
            }
            heapq.heappush(heap, (now + rng.lognormvariate(0, 0.7), number, body))
            number += 1
        if number == total or len(heap) > CLIENTS:
            now, _, body = heapq.heappop(heap)
            live[body["client_id"]] = (now, body["round_id"], body["digest"])
            written.append((now, body))
    replayed: dict[str, Any] = {}
    judged: dict[str, Any] = {}
    for place, (at, body) in enumerate(written):
        again = from_json(to_json(body)) if place < counts[0] else body
        replayed[again["client_id"]] = (at, again["round_id"], again["digest"])
        judged[body["client_id"]] = (at, body["round_id"], body["digest"])
    assert live == replayed == judged
    return len(written)


def histories(first: int, counts: Sequence[Counts], jobs: int) -> int:
    """Run all of them in `jobs` processes; return the number of their events."""
    begins = range(0, len(counts), HISTORIES_AT_ONCE)
    parts = [counts[begin : begin + HISTORIES_AT_ONCE] for begin in begins]
    seeds = [first + begin for begin in begins]
    if jobs == 1 or len(parts) <= 1:
        return sum(map(_some, seeds, parts))
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        return sum(pool.map(_some, seeds, parts))


def _some(first: int, counts: Sequence[Counts]) -> int:
    return sum(history(first + number, both) for number, both in enumerate(counts))
