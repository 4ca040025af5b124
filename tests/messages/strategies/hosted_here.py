"""A hosted run in this process: the grid of a server program, the contents on disk, and a bench for each site.

The wire, the journal and the processes are left out; `python -m tests.messages.strategies` has them.
"""

import threading

from atoll.flower.bench import ClientBench
from atoll.flower.hosted.grid import as_program
from atoll.protocol.vocabulary import Digest
from atoll.server.programs.contents import Contents
from atoll.task.content import from_tensors, to_tensors
from atoll.task.given import OPTION
from atoll.task.programs.grid import Grid
from atoll.task.randomness import seeded
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece


class LinkHere:
    """The calls of a program, answered at once."""

    def __init__(self, app, sites, folder, options=()):
        self._contents, self._folder, self._lock = Contents(folder, None), folder, threading.RLock()
        local = {f"{OPTION}{key}": value for key, value in dict(options).items()}
        partitions = {site: {"partition-id": n, "num-partitions": len(sites)} for n, site in enumerate(sites)}
        self._benches = {
            site: ClientBench(app, {"site": site, "settings": settings, "local": local})
            for site, settings in partitions.items()
        }
        self._own, self._pulled, self._num_sent = {}, {}, 0

    def call(self, op, **fields):
        with self._lock:
            return getattr(self, f"_{op}")(**fields)

    def _nodes(self):
        return {"nodes": sorted(self._benches)}

    def _content(self, pieces, piece_bytes):
        digest, path = self._contents.offer(tuple(Piece(t, d, tuple(o), tuple(n), s) for t, d, o, n, s in pieces),
                                            piece_bytes)  # fmt: skip
        return {"digest": digest, "path": path and str(path)}

    def _send(self, messages, contents, timeout, waits, in_order):
        rows = [self._row(place, *message) for place, message in enumerate(messages)]
        self._contents.sent(map(Digest, contents))
        if waits:
            return {"replies": rows}
        self._pulled |= {row["number"]: row for row in rows}
        return {"numbers": [row["number"] for row in rows]}

    def _pull(self, numbers):
        return {"replies": [self._pulled.pop(number) for number in numbers if number in self._pulled]}

    def _row(self, place, site, kind, digest, group, ttl):
        self._num_sent += 1
        row = {"number": self._num_sent, "place": place, "node": site, "kind": kind, "group": group, "error": ""}
        row["ended_at"] = 0.0
        tensors = safetensors_file.read(self._contents.keep(Digest(digest)).path)
        request = {"kind": kind, "group": group, "seed": self._num_sent}
        try:
            with seeded(0):  # the generators of main() are another process's
                answer = self._benches[site].message(from_tensors(tensors), self._own.get(site), request)
        except Exception as error:
            return row | {"error": f"task_failed: {type(error).__name__}: {error}"}
        if answer.own is not None:
            self._own[site] = answer.own
        reply, path = to_tensors(answer.content), self._folder / f"reply-{self._num_sent}"
        path.write_bytes(b"".join(array.tobytes() for array in reply.values()))
        return row | {"path": str(path), "tensors": [[name, array.nbytes] for name, array in reply.items()]}


def run(app, sites, folder, options):
    """Run the main() of an app, hosted."""
    as_program(app.load(app.serverapp), app.run_config(options))(Grid(LinkHere(app, sites, folder)))
