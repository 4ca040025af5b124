"""The measured sides of `guard`, processes that do units of work on demand, with the code of the tree in PYTHONPATH.

    python -P guard_side.py fold|step|sharded|latency|data_plane

Each measures by the functions of its tree's own `benchmarks`, so that a side fits its tree.

    to the side     run SECONDS       do units of work for this time
                    end               exit
    from the side   @ {json}          ready; then {"units", "seconds"} for each `run`; "cpu_s" where the processor time
                                      of the side's processes has other things in it; "bytes" of memory where measured
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "@ "
MB = 1_000_000
NUM_UPDATES, TRANSFER_MB, CLIENTS, ROUNDS = 4, 64, 10, 20
OVER = "the guard is over"


class Requests:
    """The guard's requests, read from standard input."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "w")  # what else is printed must not come between the answers
        self._until, self._begun, self._units = 0.0, 0.0, 0
        self.more: dict[str, float] = {}
        """Figures of the present request beside units and seconds."""
        self._say(ready=True)
        self._next()

    def done(self, units: int = 1) -> bool:
        """Count units of work; return whether to do more, if necessary after a wait for the next request."""
        self._units += units
        if (now := time.perf_counter()) >= self._until:
            self._say(**{"seconds": now - self._begun, "units": self._units} | self.more)
            return self._next()
        return True

    def _next(self) -> bool:
        command, _, seconds = sys.stdin.readline().partition(" ")
        if command != "run":
            return False
        self._units, self.more, self._begun = 0, {}, time.perf_counter()
        self._until = self._begun + float(seconds)
        return True

    def _say(self, **what: Any) -> None:
        print(MARK + json.dumps(what), file=self._output, flush=True)


def fold() -> None:
    """Fold updates of 25 M float32 from files into a durable version."""
    from benchmarks.fold import NUM_PARAMETERS, TILE_ELEMENTS, make_updates, np, ours, safetensors_file

    with tempfile.TemporaryDirectory(prefix="atoll-guard-") as name:
        folder = Path(name)
        safetensors_file.write(folder / "base", {"w": np.zeros(NUM_PARAMETERS, np.float32)})
        updates = make_updates(folder, NUM_UPDATES)
        requests = Requests()
        ours(folder, updates, TILE_ELEMENTS)
        while requests.done():
            ours(folder, updates, TILE_ELEMENTS)


def step(kind: str = "plain") -> None:
    """Take steps of `atoll train`."""
    import torch
    import torch.distributed as dist

    from benchmarks.step_overhead import _held, ours

    torch.set_num_threads(1)
    if kind == "fsdp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before, requests = _held("cpu"), list[Requests]()

    def report(event: dict[str, Any]) -> None:
        if event["event"] != "step":
            return
        if not requests:  # the first step builds the optimizer's state
            requests.append(Requests())
            return
        requests[0].more["bytes"] = _held("cpu") - before
        if not requests[0].done():
            raise KeyboardInterrupt(OVER)

    ours(kind, "cpu", 10**6, 1, report)


def latency() -> None:
    """Run empty rounds of ten clients, a run of twenty after the other."""
    from atoll.server.views.history import History
    from benchmarks.processes import Processes, coordinator_command, wait_for_address
    from benchmarks.round_latency import connect, start_run, wait_for_end

    with tempfile.TemporaryDirectory(prefix="atoll-guard-") as name, Processes(Path(name)) as processes:
        state = Path(name) / "coordinator"
        settings = {"coordinator__state": state, "coordinator__listen": "127.0.0.1:0"}
        processes.start("coordinator", coordinator_command(**settings, coordinator__keep_rounds=ROUNDS))
        address = wait_for_address(processes, "coordinator", state)
        connect(processes, address, state, CLIENTS)
        requests, is_wanted = Requests(), True
        while is_wanted:
            before = _used(processes)
            start_run(state, CLIENTS, ROUNDS)
            wait_for_end(processes, state)
            assert len(History(state).runs()) > 0
            requests.more["cpu_s"] = requests.more.get("cpu_s", 0.0) + _used(processes) - before
            is_wanted = requests.done(ROUNDS)


def data_plane() -> None:
    """Download a version and upload an update durably, by one client."""
    from benchmarks.data_plane import Ours, Processes, Side, touch

    with tempfile.TemporaryDirectory(prefix="atoll-guard-") as name, Processes(Path(name)) as processes:
        ours, size = Ours(processes, "guard", TRANSFER_MB * MB, 1, rounds=10**6), TRANSFER_MB * MB
        requests, is_wanted = Requests(), True
        while is_wanted:
            ours.invited()
            side = Side()
            for way in ("down", "up"):
                touch(processes.folder, size, 1024)
                ours.transfer(side, way)
            for key, value in (("cpu_s", side.cpu_s), ("seconds", side.seconds)):
                requests.more[key] = requests.more.get(key, 0.0) + sum(map(sum, value.values()))
            is_wanted = requests.done()


def _used(processes: Any) -> float:
    """Return the processor seconds of all child processes so far."""
    return sum(processes.usage(name).cpu_s for name in processes.running)


SIDES: dict[str, Callable[[], None]] = {
    "fold": fold,
    "step": step,
    "sharded": lambda: step("fsdp"),
    "latency": latency,
    "data_plane": data_plane,
}

if __name__ == "__main__":
    with (
        contextlib.suppress(KeyboardInterrupt),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        SIDES[sys.argv[1]]()
