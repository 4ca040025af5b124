"""One of a client's ranks (a crew): `python -m atoll.parallel.mesh_client FOLDER`, under any launcher.

    rank 0          dials its agent, takes one request after another, orders it to all ranks, and answers
    reader thread   of rank 0: queues requests; obeys `stop` and `extend` at once, and answers to `ping`; ends the
                    process with the line
    other ranks     wait for orders at the store of the process group

A rank has no key and no connection to the coordinator, and does not import gRPC. Requests and answers are
`worker/main`'s, but an update is a folder of parts:

    load        task, site?, local?, algorithm?, settings?, plan   -> mesh, and why it was chosen ("auto")
    describe                                                       -> num_examples, layout, settings
    train       as there, and checkpoint, checkpoint_every(_s)     -> as there, and parts in place of pieces
    evaluate, statistics                                           as there
    mask        layout; parts: encoded, out, pieces; streams, share -> parts: the pieces of each masked part
    message                                                        an error: a server program asks other sites

An exit code other than 0 makes the launcher restart all ranks; the agent then sends the request again.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from atoll.ground.printable import count_of
from atoll.ground.process.loading import keep_modules
from atoll.ground.process.log_streams import open_log, write_to_log
from atoll.parallel.checkpoint.ranks import Ranks
from atoll.parallel.engine.plan import Plan
from atoll.parallel.launch.line import Line, dial
from atoll.parallel.launch.meeting import store_of
from atoll.parallel.launch.rank_fault import RankFault
from atoll.parallel.mesh_client.choice import plan_for
from atoll.parallel.mesh_client.crash_points import reached
from atoll.parallel.mesh_client.orders import Orders
from atoll.parallel.mesh_client.supervisor.shared_folder import check_shared
from atoll.parallel.mesh_client.supervisor.terms import Terms
from atoll.parallel.world import World, is_lost_peer, is_slurm, process_group, ranks_here, read_world
from atoll.task.deadline import Deadline
from atoll.task.errors import TaskBroken, TaskMismatch
from atoll.task.task import Task, load_task
from atoll.task.told import Told
from atoll.training.worker.inbox import Inbox, Job
from atoll.training.worker.operations import detail_of, kind_of

DIAL_TIMEOUT_S = 600.0
"""Seconds in which an agent must answer; the launcher starts the ranks again afterwards."""

RESTART, LINE_LOST = 75, 76
"""Exit codes: a rank has failed, or another one; the agent is gone."""

STREAMS, NOISE = "streams", "noise"
"""The fields with keys: of `mask`, [hex, sign] each, and that of the member's share of the noise, if `share` has its
deviation; of any request the key of its noise. Rank 0 alone gets them by the line, and the other ranks by a
collective."""

Json = dict[str, Any]


class Bench(Protocol):
    """A task loaded with one site's data on a mesh; every rank calls each method, and rank 0's results count."""

    @property
    def steps(self) -> int:
        """The number of steps that the running training has made."""
        ...

    def describe(self) -> Json:
        """Return the size of the site's data, the model's layout, and the settings that the task declares."""
        ...

    def train(self, request: Json, is_told: Callable[[], bool]) -> Json:
        """Train, and write each rank's part of the update."""
        ...

    def evaluate(self, request: Json) -> Json:
        """Return the statistics of a version on the site's data."""
        ...

    def statistics(self, request: Json, deadline: Deadline) -> Json:
        """Return the statistics of the site's data."""
        ...

    def mask(self, request: Json, streams: Sequence[Sequence[Any]]) -> Json:
        """Mask the parts of an update that was encoded for a secure sum; rank 0 has the keys of the streams."""
        ...


MakeBench = Callable[[Task, Json, Plan, World], Bench]


def main(folder: str) -> None:
    """Run one rank of the crew whose folder is given: train the client on a device mesh."""
    from atoll.parallel.mesh_client.bench import MeshBench

    work(Path(folder), partial(MeshBench, clock=time.monotonic))


def work(folder: Path, make_bench: MakeBench) -> None:
    """Run one rank of the crew (a client's ranks) whose folder is given, until rank 0 is told to quit.

    Raises:
        SystemExit: this rank or another one has failed, or the agent is gone; all ranks are to restart.
    """
    terms, world = Terms.read(folder, DIAL_TIMEOUT_S), read_world()
    keep_modules()
    _write_to(terms.log_of(world.rank))
    try:
        reached("crew.starting")
        device = _device(terms.device, world, torch.cuda.device_count())
        store = store_of(world, terms.collective_timeout)
        with process_group(world, device, store=_prefixed("group", store), timeout_s=terms.collective_timeout):
            orders = Orders(_prefixed("crew", store), world.rank, world.size, terms.collective_timeout)
            check = partial(check_shared, folder, _prefixed("folder", store), world)
            member = _Member(folder, world, orders, make_bench, check)
            if world.is_first:
                member.lead(_line(folder, world))
            else:
                member.follow()
    except Exception as error:  # before or between orders: there is no place to work, or rank 0 is gone with its store
        traceback.print_exc()
        is_lost = is_lost_peer(error) or isinstance(error, ConnectionError)  # the line, which is no code of the user's
        fault = RankFault(rank=world.rank, kind="task_broken", detail=detail_of(error), is_lost_peer=is_lost)
        fault.write(folder)
        raise SystemExit(RESTART) from error


def _device(wanted: str, world: World, num_gpus: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the kind of device, `cpu` or `cuda`; `auto` is cuda where there is a GPU.

    Raises:
        TaskBroken: this machine has fewer GPUs than ranks.
    """
    device = ("cuda" if num_gpus else "cpu") if wanted == "auto" else wanted
    here = max(world.local_rank + 1, ranks_here(environ) or 1)
    if is_slurm(environ) and num_gpus == 1:  # --gpus-per-task shows each rank its GPU alone
        here = 1
    if device == "cuda" and here > num_gpus:
        raise TaskBroken(
            f"{count_of(here, 'rank')} on {os.uname().nodename} need as many GPUs, and it has {num_gpus}; take a "
            'smaller mesh, or set device = "cpu"'
        )
    return device


class _Member:
    """One rank of a crew, with its `Bench`."""

    def __init__(
        self, folder: Path, world: World, orders: Orders, make_bench: MakeBench, check: Callable[[], None]
    ) -> None:
        self._folder, self._world, self._orders, self._make_bench = folder, world, orders, make_bench
        self._check, self._ranks = check, Ranks()
        self._bench: Bench | None = None
        self._told = Told()

    def lead(self, line: Line) -> None:
        """Carry out the agent's requests with all ranks, as rank 0."""
        inbox = Inbox()
        threading.Thread(target=_read, args=(line, inbox), name="line", daemon=True).start()
        while True:
            job = inbox.jobs.get()
            streams = job.request.pop(STREAMS, ())  # the store of the orders never has the keys
            noise = job.request.pop(NOISE, "")
            self._orders.give(job.request)
            if job.request["op"] == "quit":
                return
            answer, faults = self._carried_out(job.request, job.deadline, streams, noise)
            del streams, noise
            line.send(_answer(job, answer, faults) | self._told.take())
            inbox.finished(job)

    def follow(self) -> None:
        """Carry out the requests that rank 0 sends to all ranks."""
        while (request := self._orders.take())["op"] != "quit":
            self._carried_out(request, Deadline.never())

    def _carried_out(
        self, request: Json, deadline: Deadline, streams: Sequence[Sequence[Any]] = (), noise: str = ""
    ) -> tuple[Json, list[RankFault]]:
        """Carry out a request with all other ranks; return the result, or the faults of all ranks if all may continue.

        Raises:
            SystemExit: the ranks cannot continue, and must restart.
        """
        result: Json = {}
        fault = None
        try:
            of_noise = {NOISE: found} if (found := self._ranks.gather(noise)[0]) else {}
            result = self._done(request | of_noise, deadline, streams)
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # the full one, for the rank's log
            fault = self._fault(error, request["op"])
        is_lost = fault is not None and fault.is_lost_peer  # perhaps rank 0, which would not answer, with the store
        faults = None if is_lost else self._orders.vote(fault)
        if faults is None or any(each.is_lost_peer for each in faults):
            if fault is not None:
                fault.write(self._folder)
            raise SystemExit(RESTART)
        return result, faults

    def _done(self, request: Json, deadline: Deadline, streams: Sequence[Sequence[Any]]) -> Json:
        op = request["op"]
        if op == "load":
            self._check()
            reached("crew.loading")
            task = load_task(request["task"])
            if not isinstance(task, Task):
                raise TaskMismatch(f"{request['task']} is an ArrayTask, which trains with its own code, not on a mesh")
            choice = plan_for(task, request)
            self._bench = self._make_bench(task, request, choice.plan, self._world)
            return {"mesh": str(choice.plan.mesh), "why": choice.why}
        assert self._bench is not None, "load comes first"
        if op == "train":
            return self._bench.train(request, deadline.passed)
        carry_out: Mapping[str, Callable[[], Json]] = {
            "describe": self._bench.describe,
            "evaluate": lambda: self._bench.evaluate(request),  # type: ignore[union-attr]
            "statistics": lambda: self._bench.statistics(request, deadline),  # type: ignore[union-attr]
            "mask": lambda: self._bench.mask(request, streams),  # type: ignore[union-attr]
        }
        if op not in carry_out:
            known = ", ".join(("train", *carry_out))
            raise TaskMismatch(f"a mesh of ranks does not support {op!r}; allowed: {known}, or an agent without a mesh")
        return carry_out[op]()

    def _fault(self, error: BaseException, op: str) -> RankFault:
        return RankFault(
            rank=self._world.rank,
            kind=kind_of(error, op),
            detail=detail_of(error),
            step=0 if self._bench is None else self._bench.steps,
            is_lost_peer=is_lost_peer(error),
        )


def _answer(job: Job, result: Json, faults: list[RankFault]) -> Json:
    answer = {**result, "stopped": job.deadline.is_stopped}
    if faults:
        answer = {"error": faults[0].kind, "detail": f"rank {faults[0].rank}: {faults[0].detail}"}
    return answer | {"seconds": time.monotonic() - job.began}


def _read(line: Line, inbox: Inbox) -> None:
    """Deliver the agent's requests; end the process as soon as the agent is gone, whatever it is doing."""
    try:
        for request in line.messages():
            if request["op"] == "ping":
                line.tell({"op": "pong"})
            else:
                inbox.receive(request)
    except BaseException:
        traceback.print_exc()
    print("the agent is gone: the ranks end", file=sys.stderr)
    os._exit(LINE_LOST)


def _line(folder: Path, world: World) -> Line:
    return dial(folder, {"ranks": world.size, "pid": os.getpid(), "host": os.uname().nodename}, DIAL_TIMEOUT_S)


def _prefixed(name: str, store: Any) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _write_to(log: Path) -> None:
    """Append all output of this process to its log, and replace its standard input by an empty one."""
    with open_log(log) as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    write_to_log()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # of the launcher: end at once, also in a collective
