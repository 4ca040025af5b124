"""A server program for tests: ten exchanges, some from threads, whose every message depends on all replies before."""

import hashlib
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from atoll.task.content import Content
from atoll.task.programs.grid import Outgoing


def main(grid):
    while len(grid.nodes()) < 2:
        time.sleep(0.05)
    weights, seen = np.zeros(1000), hashlib.sha256()
    for step in range(10):
        nodes = grid.nodes()[:2]
        noise = random.random() + float(np.random.random())  # seeded by the run
        content = Content({"step": step, "noise": noise}, {"w": weights, "flag": np.array([step % 2 == 0])})
        replies = grid.send([Outgoing(node, "train", content, str(step)) for node in nodes], timeout=600)
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
        while not Path("go").exists():
            time.sleep(0.05)


def changed(grid):
    """Become another program after the first process: its second message says something else."""
    while not grid.nodes():
        time.sleep(0.05)
    node = grid.nodes()[0]
    grid.send([Outgoing(node, "train", Content("first"))])
    is_again = Path("died").exists()
    grid.send([Outgoing(node, "train", Content("again" if is_again else "second"))])
    _stop_at("changed")


def odd_shapes(grid):
    """Send contents of every shape and compare what comes back, bit for bit."""
    while not grid.nodes():
        time.sleep(0.05)
    node = grid.nodes()[0]
    dtypes = ["f8", "f4", "f2", "?", "i1", "u1", "i8", "u2", ">f8", "c16", "S5", "U3", "M8[s]"]
    arrays = {f"flat.{dtype}": np.zeros(3, dtype) for dtype in dtypes}
    arrays |= {f"empty.{dtype}": np.zeros((0, 4), dtype) for dtype in dtypes}
    arrays |= {f"zero-dim.{dtype}": np.array(np.ones((), dtype)) for dtype in dtypes if dtype[0] not in "SUM"}
    arrays |= {"nan": np.array([np.nan, np.inf, -0.0]), "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    plain = {"lists": [[1, 2.5, None], [["deep"], {}]], "text": '\u00e9\n"', "big": 2**70, "none": None, "true": True}
    contents = [Content(plain, arrays), Content(None), Content([], {}), Content("no metrics", {"": np.ones(2)})]
    for content in contents:
        (reply,) = grid.send([Outgoing(node, "query.echo", content)])
        assert reply.error == "", reply.error
        assert reply.content.plain == content.plain
        assert [*reply.content.arrays] == [*content.arrays]
        for name, array in content.arrays.items():
            found = reply.content.arrays[name]
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes()), name
    refused = {}
    for kind in ("query.objects", "query.bytes", "query.keys", "query.odd"):
        (reply,) = grid.send([Outgoing(node, kind, Content(None))])
        refused[kind] = reply.error
    for content in (Content(b"bytes"), Content({1: "a key"}), Content(None, {"w": np.array([object()])})):
        try:
            grid.send([Outgoing(node, "query.echo", content)])
            refused[repr(content)] = ""
        except ValueError as error:
            refused[repr(content)] = f"here: {error}"
    Path("result.json").write_text(json.dumps(refused))


def raises(grid):
    """Raise."""
    raise RuntimeError("no strategy today")
