"""A server program for tests: ten exchanges, some from threads, whose every message depends on all replies before."""

import hashlib
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from atoll.parallel.programs.grid import Outgoing
from atoll.parallel.task.content import Content


def main(grid):
    while len(grid.nodes()) < 2:
        time.sleep(0.05)
    weights, seen = np.zeros(1000), hashlib.sha256()
    for step in range(10):
        nodes = grid.nodes()[:2]
        noise = random.random() + float(np.random.random())  # seeded by the run
        content = Content({"step": step, "noise": noise}, {"w": weights, "flag": np.array([step % 2 == 0])})
        replies = grid.send([Outgoing(node, "train", content, str(step)) for node in nodes], timeout=60)
        assert [reply.node for reply in replies] == nodes, replies
        assert not any(reply.error for reply in replies), replies
        weights = np.mean([reply.content.arrays["w"] for reply in replies], axis=0)
        seen.update(weights.tobytes() + repr([reply.content.plain for reply in replies]).encode())
        _stop_at(f"step {step}")
    with ThreadPoolExecutor(2) as threads:  # as Flower's legacy strategies send
        one_each = [[Outgoing(node, "query.stats", Content({"to": node}))] for node in nodes]
        answers = [reply for replies in threads.map(grid.send, one_each) for reply in replies]
    _stop_at("threads")
    left, pulled = grid.push([Outgoing(node, "query.fail", Content(None)) for node in nodes]), {}
    while left:
        pulled |= {reply.number: reply.error for reply in grid.pull(left)}
        left = [number for number in left if number not in pulled]
        time.sleep(0.02)
    found = {
        "seen": seen.hexdigest(),
        "answers": [a.content.plain["echo"] for a in answers],
        "errors": [pulled[number] for number in sorted(pulled)],
    }
    Path("result.json").write_text(json.dumps(found))


def _stop_at(place):
    """Die once, or wait, at a place that the environment names."""
    mark = Path("died")
    if os.environ.get("DIES_AT") == place and not mark.exists():
        mark.write_text(place)
        os.kill(os.getpid(), 9)
    if os.environ.get("WAITS_AT") == place:
        Path("waits").touch()
        time.sleep(3600)


def changed(grid):
    """Become another program after the first process: its second message says something else."""
    while not grid.nodes():
        time.sleep(0.05)
    node = grid.nodes()[0]
    grid.send([Outgoing(node, "train", Content("first"))])
    is_again = Path("died").exists()
    grid.send([Outgoing(node, "train", Content("again" if is_again else "second"))])
    _stop_at("changed")


def raises(grid):
    """Raise."""
    raise RuntimeError("no strategy today")
