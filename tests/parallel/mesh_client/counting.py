"""A bench that adds numbers over all ranks, and does at one step on one rank what it is told: for tests of a crew.

`local` of a `train` request has steps, deed, step, rank, and `file`, in which a deed notes that it was done once.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from atoll.parallel.mesh_client.main import work
from atoll.task.errors import TaskMismatch

PAUSE_S = 0.01


class CountingBench:
    def __init__(self, task, request, plan, world):
        self.steps, self._world, self._plan = 0, world, plan

    def describe(self):
        seen = sorted(name for name in sys.modules if name.partition(".")[0] in ("grpc", "atoll"))
        sockets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        mine = {"modules": seen, "environment": dict(os.environ), "open": sockets, "pid": os.getpid()}
        found = [None] * self._world.size
        dist.all_gather_object(found, mine)
        return {"num_examples": 7, "layout": [], "settings": [], "ranks": found, "plan": str(self._plan.mesh)}

    def train(self, request, is_told):
        """Return the sum of (rank + 1) over ranks and steps."""
        given, kept = request["local"], Path(request.get("checkpoint", "."), "count.json")
        self.steps, total = 0, 0
        if kept.exists():
            self.steps, total = json.loads(kept.read_text())
        begun = self.steps
        while self.steps < given["steps"] and not self._is_told(is_told):
            time.sleep(PAUSE_S)
            self._do(given)
            value = torch.tensor(self._world.rank + 1)
            dist.all_reduce(value)
            self.steps, total = self.steps + 1, total + int(value)
            if self._world.is_first:
                Path(given["file"] + ".step").write_text(f"{self.steps} {time.monotonic()}")
                if (every := request.get("checkpoint_every")) and self.steps % every == 0:
                    kept.with_suffix(".part").write_text(json.dumps([self.steps, total]))
                    kept.with_suffix(".part").replace(kept)
        return {"total": total, "steps": self.steps, "begun": begun}

    def evaluate(self, request):
        return {"statistics": None}

    def statistics(self, request, deadline):
        return {"statistics": {}}

    def mask(self, request, streams):
        """Return what each rank was given; the second rank may die once, as `file` notes."""
        if self._world.rank == 1 and not Path(request["file"]).exists():
            Path(request["file"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        found = [None] * self._world.size
        dist.all_gather_object(found, {"request": request, "streams": list(streams)})
        return {"ranks": found}

    def _is_told(self, is_told):
        told = torch.tensor(int(is_told()))
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return bool(told)

    def _do(self, given):
        if self.steps != given.get("step") or given.get("rank", self._world.rank) != self._world.rank:
            return
        deed, done = given["deed"], Path(given["file"])
        if deed == "raise":
            raise KeyError(f"odd data in batch {self.steps}, no connection to its peer")
        if deed == "mismatch":
            raise TaskMismatch("the tensors do not fit")
        if done.exists():
            return
        done.touch()
        if deed == "raise once":
            raise OSError("a link of the network was down")
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "exit":
            os._exit(3)
        if deed == "hang":
            time.sleep(600)
        if deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def _is_open(fd):
    try:
        return bool(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        return False


def rank(folder):
    """The function of a rank."""
    work(Path(folder), CountingBench)
