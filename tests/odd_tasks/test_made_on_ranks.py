"""The models of `tasks.made`, trained by shares and in stages in one process group: the plain loop's, or refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from atoll.parallel.exchange import initial
from atoll.parallel.trainer.config import TrainConfig
from atoll.parallel.trainer.job import JobRefused
from atoll.task.errors import TaskBroken
from tests.odd_tasks.cells import compare, has_chain
from tests.odd_tasks.table import TASKS
from tests.odd_tasks.tasks import made
from tests.parallel.engine.cases import plan
from tests.parallel.forked import run_ranks
from tests.parallel.trainer.training import run

NAMES = [name for name, (reference, _) in TASKS.items() if reference.startswith(f"{made.__name__}:")]
PLANS = {
    "zero=1": plan(dp_shard=2, zero=1),
    "zero=3": plan(dp_shard=2, zero=3, accumulate=2),
    "hsdp": plan(dp_replicate=2, dp_shard=2),
    "pp=2": plan(pp=2),
    "pp x fsdp": plan(pp=2, dp_shard=2),
}
CONFIG = TrainConfig(batch_size=24, eval_every=9)


def verdicts(layout: str, whole_max: int, place: str) -> dict[str, str]:
    """Return what is wrong with each model on this rank; `whole_max` as of `exchange.initial`."""
    torch.set_num_threads(1)
    initial.WHOLE_MAX = whole_max
    return {name: word for name in NAMES if (word := _verdict(name, layout, Path(place, name)))}


def _verdict(name: str, layout: str, folder: Path) -> str:
    chosen, task = PLANS[layout], TASKS[name][1]
    task = replace(task, local=replace(task.local, batch_size=24))
    try:
        run(folder, task=task, config=CONFIG, plan=chosen)
    except (JobRefused, TaskBroken) as error:
        if chosen.mesh.pp > 1 and not has_chain(task):
            return "" if "a pipeline needs a chain" in str(error) else str(error)
        return "" if name == "held_weights" and "that it holds beside its module" in str(error) else str(error)
    found: dict[str, Any] = load_file(folder / "model.safetensors")
    verdict = compare(TASKS[name][1], "zero=3", found)
    return "" if verdict.word == "equal" and name != "held_weights" else str(verdict)


@pytest.mark.real
@pytest.mark.parametrize(
    ("layout", "whole_max"),
    [
        ("zero=3", initial.WHOLE_MAX),
        ("zero=3", 0),
        ("pp=2", initial.WHOLE_MAX),
        *(pytest.param(layout, 0, marks=pytest.mark.long) for layout in ("zero=1", "hsdp", "pp=2", "pp x fsdp")),
    ],
)
def test_a_model_trains_by_shares_as_in_one_process(layout: str, whole_max: int, tmp_path: Path) -> None:
    found = run_ranks(verdicts, PLANS[layout].mesh.size, layout, whole_max, str(tmp_path), timeout_s=400)
    assert found == [{}] * PLANS[layout].mesh.size
