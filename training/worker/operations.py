"""The operations of a worker process, one for each request. Task, data and model stay in memory between requests."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.ground.folders import finds_no_room
from atoll.ground.process.exit_functions import run_exit_functions
from atoll.task.apps import framework, is_app
from atoll.task.arrays import Arrays, layout_of
from atoll.task.content import from_tensors, to_tensors
from atoll.task.deadline import Deadline
from atoll.task.errors import NotFinite, OutOfTime, TaskBroken, TaskMismatch, TaskNotFound
from atoll.task.metrics import Metric, as_statistics, sound, values
from atoll.task.overrides import OverridesRefused
from atoll.task.task import load_task
from atoll.task.told import Told
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Layout, Piece
from atoll.training.worker.bench import PROCESS, AppBench, Bench, MessageBench, Received
from atoll.training.worker.benches import bench_of
from atoll.training.worker.model_files import write_initial, write_update
from atoll.training.worker.warm_start import Start, StartRefused

Json = dict[str, Any]

DETAIL_LINES = 12
DETAIL_CHARS_MAX = 2000


class Operations:
    """The operations of a worker by name; their state is the `Bench` (task loaded with data) that `load` makes."""

    def __init__(self) -> None:
        self._bench: Bench | None = None
        self._told = Told()
        self._by_name: dict[str, Callable[[Json, Deadline], Json]] = {
            "load": self._load,
            "describe": self._describe,
            "initial": self._initial,
            "try_out": self._try_out,
            "write_whole": self._write_whole,
            "train": self._train,
            "message": self._message,
            "evaluate": self._evaluate,
            "values": self._values,
            "values_of": self._values_of,
            "measures": self._measures,
            "statistics": self._statistics,
            "plan": self._plan,
            "conclude": self._conclude,
        }

    def answer(self, request: Json, deadline: Deadline) -> Json:
        """Carry out a request. Errors of the task's code are returned as `error` and `detail`."""
        op = request["op"]
        try:
            answer = self._by_name[op](request, deadline)
        except (Exception, SystemExit) as error:
            traceback.print_exc()  # the full one, for the worker's log
            answer = {"error": kind_of(error, op), "detail": detail_of(error)}
        return answer | self._told.take()

    def _load(self, request: Json, deadline: Deadline) -> Json:
        if is_app(request["task"]):
            self._bench = framework().bench(request["task"], request)
            return {}
        task = load_task(request["task"])
        self._bench = bench_of(task, request | {"warm": PROCESS})
        return {}

    def _describe(self, request: Json, deadline: Deadline) -> Json:
        bench = self._loaded()
        layout = layout_fields(layout_of(bench.initial(0)))
        described = {"num_examples": bench.num_examples(), "layout": layout, "settings": bench.settings()}
        if described["num_examples"] is not None:
            bench.try_out()
        return described

    def _initial(self, request: Json, deadline: Deadline) -> Json:
        start = Start(Path(request["start"]), request["strict"]) if request.get("start") else None
        pieces, note = write_initial(Path(request["out"]), self._loaded(), request["seed"], start)
        return {"pieces": piece_fields(pieces), "note": note, "frozen": self._loaded().frozen(request["seed"])}

    def _try_out(self, request: Json, deadline: Deadline) -> Json:
        self._loaded().try_out()
        return {}

    def _write_whole(self, request: Json, deadline: Deadline) -> Json:
        version = Path(request["model"]) if request.get("model") else None
        self._loaded().write_whole(Path(request["out"]), version, request["seed"], request.get("only") or ())
        return {}

    def _train(self, request: Json, deadline: Deadline) -> Json:
        outcome = self._loaded().train(_received(request), request, deadline)
        trained = outcome.trained
        pieces = self._write(trained.update, request)
        if outcome.own:
            safetensors_file.write(Path(request["own_out"]), outcome.own, durable=False)
        return {
            "num_examples": trained.num_examples,
            "work": trained.work,
            "statistics": sound(self._loaded().metrics, trained.statistics),
            "stopped": deadline.is_stopped,
            "pieces": piece_fields(pieces),
            "has_own": bool(outcome.own),
            **outcome.report,
        }

    def _write(self, update: Arrays, request: Json) -> tuple[Piece, ...]:
        """Write the file of the update, encoded if requested; the spool makes it durable."""
        residual = request.get("residual")
        return write_update(
            Path(request["out"]),
            update,
            codec=request.get("codec") or "",
            seed=request["seed"],
            buffers=self._loaded().buffers(),
            residuals=[Path(path) for path in request.get("owed", ())],
            residual=Path(residual) if residual else None,
        )

    def _message(self, request: Json, deadline: Deadline) -> Json:
        bench = self._loaded()
        if not isinstance(bench, MessageBench):
            raise TaskBroken(f"the task answers no messages, and was asked for {request['kind']!r}")
        own = safetensors_file.read(Path(request["own"])) if request.get("own") else None
        answer = bench.message(from_tensors(safetensors_file.mapped(Path(request["message"]))), own, request)
        pieces = safetensors_file.write(Path(request["out"]), to_tensors(answer.content), durable=False)
        if answer.own:
            safetensors_file.write(Path(request["own_out"]), answer.own, durable=False)
        return {"pieces": piece_fields(pieces), "has_own": bool(answer.own)}

    def _evaluate(self, request: Json, deadline: Deadline) -> Json:
        split = request["split"]
        if split not in ("train", "test", "server"):
            raise ValueError(f"split {split!r} is not one of train, test, server")
        found = self._loaded().evaluate(_received(request), request)
        if isinstance(found, str):
            return {"statistics": None, "reason": found}
        return {"statistics": sound(self._loaded().metrics, found)}

    def _values(self, request: Json, deadline: Deadline) -> Json:
        return {"values": values(self._loaded().metrics, as_statistics(request["statistics"]))}

    def _values_of(self, request: Json, deadline: Deadline) -> Json:
        metrics = self._loaded().metrics
        return {"values": [values(metrics, as_statistics(statistics)) for statistics in request["statistics"]]}

    def _measures(self, request: Json, deadline: Deadline) -> Json:
        measures = self._loaded().measures()
        own = sorted(name for name, metric in self._loaded().metrics.items() if isinstance(metric, Metric))
        return {"names": measures.names, "why_not_here": measures.why_not_here, "own": own}

    def _statistics(self, request: Json, deadline: Deadline) -> Json:
        if request.get("only_whether"):  # the coordinator, which has no site's data
            return {"why_not": self._loaded().no_statistics()}
        return {"statistics": self._loaded().statistics(request, deadline).plain()}

    def _plan(self, request: Json, deadline: Deadline) -> Json:
        return self._app().plan(request["nodes"])

    def _conclude(self, request: Json, deadline: Deadline) -> Json:
        try:
            self._app().conclude(_received(request).version, request["history"])
        finally:
            run_exit_functions()  # this process is killed at the end of the run
        return {}

    def _app(self) -> AppBench:
        bench = self._loaded()
        assert isinstance(bench, AppBench), "only an app has a main()"
        return bench

    def _loaded(self) -> Bench:
        assert self._bench is not None, "load comes first"
        return self._bench


def _received(request: Json) -> Received:
    own = safetensors_file.read(Path(request["own"])) if request.get("own") else None
    return Received(safetensors_file.mapped(Path(request["model"])), own)


def layout_fields(layout: Layout) -> list[tuple[Any, ...]]:
    """Return [name, dtype, shape] of each tensor."""
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in layout]


def piece_fields(pieces: tuple[Piece, ...]) -> list[tuple[Any, ...]]:
    """Return [tensor, dtype, offsets, lengths, sha256] of each piece; if encoded, also [codec, encoded_bytes]."""
    return [
        (p.tensor, p.dtype, p.offsets, p.lengths, p.sha256, *((p.codec, p.encoded_bytes) if p.codec else ()))
        for p in pieces
    ]


def kind_of(error: BaseException, op: str) -> str:
    """Return the protocol's name for an error (its FailureReason)."""
    if isinstance(error, TaskNotFound | TaskBroken):
        return "task_broken"
    if isinstance(error, TaskMismatch):
        return "task_mismatch"
    if isinstance(error, NotFinite):
        return "not_finite"
    if isinstance(error, OutOfTime):
        return "out_of_time"
    if finds_no_room(error):
        return "disk_full"
    return "training_failed" if op in ("train", "evaluate", "statistics", "message") else "task_broken"


def detail_of(error: BaseException) -> str:
    """Describe an error for a person: by the message of Atoll's errors, the last traceback lines of any other.

    Faults of settings are a line each.
    """
    if isinstance(error, OverridesRefused):
        return "\n".join(error.faults)[:DETAIL_CHARS_MAX]
    if isinstance(error, StartRefused):
        return "\n".join(f"model.start: {fault}" for fault in error.faults)[:DETAIL_CHARS_MAX]
    if isinstance(error, TaskNotFound | TaskBroken | TaskMismatch | NotFinite | OutOfTime):
        return str(error)[:DETAIL_CHARS_MAX]
    while not str(error).strip() and (cause := error.__cause__ or error.__context__) is not None:
        error = cause  # an exception without words gives way to its cause
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return "\n".join(lines[-DETAIL_LINES:])[-DETAIL_CHARS_MAX:]
