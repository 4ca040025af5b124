"""One request to a client in one process and on a mesh, and the update that each of them has written."""

import hashlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.parallel.engine.mesh import Mesh
from atoll.parallel.engine.plan import Plan
from atoll.parallel.mesh_client.bench import MeshBench
from atoll.parallel.world import read_world
from atoll.task.deadline import Deadline
from atoll.tensors import safetensors_file
from atoll.tensors.codecs.chunks import decode_range
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import Piece
from atoll.tensors.pieces import part_name
from atoll.training.worker.operations import Operations
from tests.parallel.mesh_client import adapter_tasks, hook_tasks, tasks
from tests.parallel.ranks import call_on_ranks

Arrays = dict[str, NDArray[Any]]
Json = dict[str, Any]

SEED = 7


def plan_of(options: Mapping[str, Any]) -> Plan:
    """Return a plan; the degrees of the mesh are among the options."""
    degrees = {name: options[name] for name in ("pp", "dp_replicate", "dp_shard", "tp") if name in options}
    return Plan(mesh=Mesh(**degrees), **{name: value for name, value in options.items() if name not in degrees})


def request_of(folder: Path, out: str, **fields: Any) -> Json:
    """Return a request to train."""
    paths = {"model": str(folder / "version"), "out": str(folder / out), "own_out": str(folder / f"{out}.own")}
    return {**paths, "seed": SEED, "round_id": 1, "version": 0, "local": {}, "algorithm": "fedavg", **fields}


def write_version(folder: Path, task: str = "task", *, seed: int = 3, **load: Any) -> str:
    """Write version 0, with values of another seed than that of the training; return the digest of frozen tensors."""
    operations = Operations()
    assert "error" not in operations.answer(_load(task, **load), Deadline.never())
    answer = operations.answer({"op": "initial", "seed": seed, "out": str(folder / "version")}, Deadline.never())
    assert "error" not in answer, answer
    return str(answer["frozen"])


def in_one_process(folder: Path, *, name: str = "task", load: Json | None = None, **fields: Any) -> tuple[Json, Arrays]:
    """Train, evaluate and describe in this process; return the answer, and the update."""
    operations = Operations()
    assert "error" not in operations.answer(_load(name, **(load or {})), Deadline.never())
    answer = operations.answer({"op": "train", **request_of(folder, "one", **fields)}, Deadline.never())
    assert "error" not in answer, answer
    evaluation = {"op": "evaluate", **request_of(folder, "one", **fields, split="test")}
    answer["evaluation"] = operations.answer(evaluation, Deadline.never())
    answer["description"] = operations.answer({"op": "describe"}, Deadline.never())
    return answer, safetensors_file.read(folder / "one")


def evaluated_in_one_process(name: str, request: Json) -> tuple[Json, Json]:
    """Return the description of a task, and the evaluation of the version."""
    operations = Operations()
    assert "error" not in operations.answer(_load(name), Deadline.never())
    described, evaluated = (operations.answer(r, Deadline.never()) for r in ({"op": "describe"}, request))
    return described, evaluated


def evaluated_on_a_rank(name: str, options: Json, request: Json) -> tuple[Json, Json]:
    """Return what `evaluated_in_one_process` does, from this rank."""
    bench = MeshBench(_task(name), _load(name), plan_of(options), read_world())
    return bench.describe(), bench.evaluate(request)


def on_a_rank(name: str, options: Json, load: Json, request: Json) -> Json:
    """Train on this rank, evaluate the version, and describe the task."""
    bench = MeshBench(_task(name), _load(name, **load), plan_of(options), read_world())
    answer = bench.train(request, lambda: False)
    answer["evaluation"] = bench.evaluate(request | {"split": "test"})
    answer["description"] = bench.describe()
    return answer


def on_a_mesh(
    folder: Path, options: Json, *, name: str = "task", load: Json | None = None, **fields: Any
) -> tuple[Json, Arrays]:
    """Train on a mesh; return the answer of rank 0, and the update."""
    answer = call_on_ranks(
        on_a_rank, plan_of(options).mesh.size, name, options, load or {}, request_of(folder, "mesh", **fields)
    )[0]
    return answer, update_in(folder / "mesh", answer["parts"])


def killed_on_a_rank(name: str, options: Json, request: Json, after: int) -> None:
    """Train on this rank until it dies after some steps."""
    asked = 0

    def is_told() -> bool:
        nonlocal asked
        asked += 1
        if asked > after:
            os._exit(9)
        return False

    MeshBench(_task(name), _load(name), plan_of(options), read_world()).train(request, is_told)


def rank_1_killed(name: str, options: Json, request: Json, after: int) -> None:
    """Train on this rank, of which the second is killed after some steps."""
    asked = 0

    def is_told() -> bool:
        nonlocal asked
        asked += 1
        if asked > after and read_world().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    MeshBench(_task(name), _load(name), plan_of(options), read_world()).train(request, is_told)


def counted_on_a_rank(name: str, options: Json, request: Json) -> tuple[Json, int]:
    """Train on this rank; return the answer, and the number of steps that this attempt has made."""
    bench, asked = MeshBench(_task(name), _load(name), plan_of(options), read_world()), []
    return bench.train(request, lambda: bool(asked.append(None))), len(asked)


def told_on_a_rank(name: str, options: Json, request: Json, after: int) -> Json:
    """Train on this rank, of which the first is told to stop after some steps."""
    asked = 0

    def is_told() -> bool:
        nonlocal asked
        asked += 1
        return asked > after and read_world().is_first

    return MeshBench(_task(name), _load(name), plan_of(options), read_world()).train(request, is_told)


def update_in(folder: Path, parts: list[list[Any]]) -> Arrays:
    """Return the update in a folder of parts, each box of which must be there exactly once."""
    boxes: dict[str, list[tuple[Piece, NDArray[Any]]]] = {}
    assert sorted(os.listdir(folder)) == [part_name(index) for index in range(len(parts))]
    for index, fields in enumerate(parts):
        data, begin = (folder / part_name(index)).read_bytes(), 0
        for tensor, dtype, offsets, lengths, sha256, *encoded in fields:
            piece = Piece(tensor, dtype, tuple(offsets), tuple(lengths), sha256, *encoded)
            raw = data[begin : (begin := begin + piece.num_bytes)]
            assert hashlib.sha256(raw).hexdigest() == sha256
            boxes.setdefault(tensor, []).append((piece, _decoded(piece, raw).reshape(piece.lengths)))
        assert begin == len(data)
    return {tensor: _joined(found) for tensor, found in boxes.items()}


def _decoded(piece: Piece, raw: bytes) -> NDArray[Any]:
    if not piece.codec:
        return np.frombuffer(raw, safetensors_file.NUMPY_DTYPES[piece.dtype])
    size = piece.num_elements
    return decode_range(parse_codec(piece.codec), size, 0, size, lambda at, count: raw[at : at + count])


def _joined(boxes: list[tuple[Piece, NDArray[Any]]]) -> NDArray[Any]:
    shape = tuple(np.max([np.add(piece.offsets, piece.lengths) for piece, _ in boxes], axis=0).astype(int))
    whole, times = np.zeros(shape, boxes[0][1].dtype), np.zeros(shape, int)
    for piece, values in boxes:
        place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))
        whole[place] = values
        times[place] += 1
    assert (times == 1).all(), boxes[0][0].tensor
    return whole


def distance(found: Arrays, expected: Arrays) -> float:
    """Return the relative L2 distance of two updates, over all tensors."""
    assert found.keys() == expected.keys()
    difference = sum(float(((found[name].astype(float) - expected[name]) ** 2).sum()) for name in expected)
    return float(np.sqrt(difference / sum(float((array.astype(float) ** 2).sum()) for array in expected.values())))


def _load(name: str, **fields: Any) -> Json:
    return {"op": "load", "task": f"{_module(name).__name__}:{name}", "site": "here", **fields}


def _task(name: str) -> Any:
    return getattr(_module(name), name)


def _module(name: str) -> ModuleType:
    return next(module for module in (tasks, adapter_tasks, hook_tasks) if hasattr(module, name))
