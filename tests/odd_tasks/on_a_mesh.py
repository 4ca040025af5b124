"""The odd tasks as clients on a mesh: each with the update of one process, or refused before its first step."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll import Task
from atoll.parallel.mesh_client.bench import MeshBench
from atoll.parallel.world import read_world
from atoll.task.deadline import Deadline
from atoll.tensors import safetensors_file
from atoll.training.worker.operations import Operations
from tests.odd_tasks.cells import IN_BF16
from tests.odd_tasks.table import TASKS
from tests.parallel.mesh_client.clients import distance, plan_of, request_of, update_in
from tests.parallel.ranks import call_on_ranks

Json = dict[str, Any]

CLOSE = 1e-6
ROUNDED = {"computes_bfloat16": IN_BF16, "sparse_embedding": 1e-5}
"""Tasks whose own numbers are rounded more: bfloat16, and entries of a sparse gradient that are added one by one."""

REFUSED: dict[str, dict[str, str]] = {
    "bounded_embedding": {"": "max_norm=0.5 changes the weight in every forward pass"},
    "batch_norm": {"": "batchnorm must be sync", "accumulate": "2 micro-batches divide it"},
    "odd_parameters": {"dp_shard": "nothing: no elements"},
    "running_sums": {"": "each rank sees different ones"},
    "weight_in_the_loss": {"dp_shard": "holds beside its module"},
    "counting_passes": {"accumulate": "each forward pass changes them"},
    "tied_by_views": {"dp_shard": "are views of one memory"},
    "clamped": {"dp_shard": "forward changes them in place"},
    "held_weights": {"dp_shard": "that it holds beside its module"},
    **{
        name: {"accumulate": "each forward pass changes them"}
        for name in ("byte_counter", "short_counter", "long_counter", "spectral_norm")
    },
    "growing_buffer": {"": "a pass leaves values there that depend on its examples"},
    "jit_scripted": {"": "compiled by torch.jit"},
    "checkpointed_reentrant": {"dp_replicate": "use_reentrant=True"},
}
"""Words of the refusals of a mesh alone, by task and a word of the options; the last one counts."""

NAMES = [name for name, (_, task) in TASKS.items() if isinstance(task, Task)]


def refusal(name: str, options: Json) -> str | None:
    """Return a word of the sentence with which a mesh refuses a task that one process trains; None: it is equal."""
    found = [word for option, word in REFUSED.get(name, {}).items() if not option or option in options]
    return found[-1] if found else None


def verdicts(options: Json, folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return what is wrong with each task on a mesh, by its name."""
    alone = {name: _in_one_process(name, folder / name) for name in names}
    begun = [name for name in names if (folder / name / "version").exists()]
    found = call_on_ranks(_on_a_rank, plan_of(options).mesh.size, begun, options, str(folder), timeout_s=400)[0]
    faults = {name: _fault(name, options, alone[name], found[name], folder / name) for name in begun}
    return {name: fault for name, fault in faults.items() if fault}


def _fault(name: str, options: Json, alone: Json, mesh: Json, folder: Path) -> str:
    word = refusal(name, options)
    if "refused" in mesh:
        expected = _without_numbers(alone.get("detail", "")) if word is None else word
        is_same = _without_numbers(mesh["refused"]) == expected or (word is not None and word in mesh["refused"])
        return "" if is_same and not mesh["steps"] else f"refused in step {mesh['steps']}: {mesh['refused']}"
    if "error" in alone:
        return f"trained, where one process says {alone['detail']}"
    if word is not None:
        return f"not refused ({word})"
    update, expected = update_in(folder / "mesh", mesh["parts"]), safetensors_file.read(folder / "one")
    if not (far := distance(update, expected)) < ROUNDED.get(name, CLOSE):
        return f"{far:.1e} from the update of one process"
    if not math.isclose(mesh["num_examples"], alone["num_examples"], rel_tol=1e-6):  # sums of fractions in float32
        return f"another weight: {mesh['num_examples']!r} for {alone['num_examples']!r}"
    (found, weight), (seen, counted) = (answer["statistics"]["loss"] for answer in (mesh, alone))
    is_same = abs(found / weight - seen / counted) <= 1e-4 * abs(seen / counted)
    return "" if is_same else f"another mean loss: {found / weight} for {seen / counted}"


def _without_numbers(sentence: str) -> str:
    """Return the sentence of a refusal, which may count the rows of a rank: here one word for each number."""
    return re.sub(r"\d+", "N", sentence.splitlines()[-1] if sentence else "").removeprefix("TypeError: ")


def _in_one_process(name: str, folder: Path) -> Json:
    folder.mkdir()
    operations = Operations()
    initial = {"op": "initial", "seed": 3, "out": str(folder / "version")}
    answer: Json = {}
    for request in (_load(name), initial, {"op": "train", **request_of(folder, "one")}):
        answer = operations.answer(request, Deadline.never())
        if "error" in answer:
            break
    return answer


def _on_a_rank(names: Sequence[str], options: Json, folder: str) -> dict[str, Json]:
    return {name: _trained(name, options, Path(folder, name)) for name in names}


def _trained(name: str, options: Json, folder: Path) -> Json:
    bench = None
    try:
        bench = MeshBench(TASKS[name][1], _load(name), plan_of(options), read_world())
        return bench.train(request_of(folder, "mesh"), lambda: False)
    except Exception as error:  # whatever a task's code raises, on all ranks
        return {"refused": str(error), "steps": 0 if bench is None else bench.steps}


def _load(name: str) -> Json:
    return {"op": "load", "task": TASKS[name][0], "site": "a"}
