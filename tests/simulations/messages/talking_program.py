"""Server programs for simulated runs."""

import time
from pathlib import Path

import numpy as np

from atoll.task.content import Content
from atoll.task.programs.grid import Outgoing


def once(grid):
    """Send one message to each node, and note who replied."""
    replies = grid.send([Outgoing(node, "train", Content({})) for node in grid.nodes()], timeout=10.0)
    Path("replied").write_text(" ".join(reply.node for reply in replies if not reply.error))


def errors(grid):
    """Note why there is no reply."""
    nodes = grid.nodes()
    replies = grid.send([Outgoing(nodes[0], "query.fail", Content({})), Outgoing("nowhere", "train", Content({}))])
    Path("errors").write_text("\n".join(reply.error.splitlines()[-1] for reply in replies))


def polls(grid):
    """Look at the nodes until all have woken up."""
    while len(grid.nodes()) < 3:
        time.sleep(0.001)
    once(grid)


def raises(grid):
    """Raise."""
    raise RuntimeError("no strategy today")


def dies(grid):
    """Die by itself, each time."""
    import os

    os._exit(3)


def goes_on(grid):
    """Send three messages to each node, wait until the test lets it go on, and send what the last replies make."""
    for number in range(3):
        content = Content({"number": number}, {"w": np.full(3, number, np.float32)})
        replies = grid.send([Outgoing(node, "train", content, f"{number}") for node in grid.nodes()])
    while not Path("../go_on").exists():
        time.sleep(0.01)
    last = Content({}, {"w": sum(reply.content.arrays["w"] for reply in replies)})
    grid.send([Outgoing(node, "train", last, "3") for node in grid.nodes()])


def sleeps(grid):
    """Send, and do not come back."""
    once(grid)
    time.sleep(3600)
