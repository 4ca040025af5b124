"""Atoll's sides of `simulation`, processes that run rounds on demand: the path of `atoll simulate`, and the tight loop.

python -m benchmarks.simulation_side atoll SETTING ENGINE WORKERS
python -m benchmarks.simulation_side tight SETTING PROCESSES
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from atoll.operations.load import load_run, load_user_task
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.federation import Federation
from atoll.simulations.federation.run import opened
from atoll.task.local import Local
from atoll.task.task import Task
from atoll.training.model.parameters import state_of
from benchmarks.learners import BATCH_SIZE, LR, RoundRequests, accuracy, clients_of, model_of, say
from benchmarks.tight_loops import SETTINGS, Lean, LeanProcesses

ROUNDS = 10**6


def task_of(name: str) -> Task:
    """Return a setting as the task that a user would write."""
    clients = {f"client-{number:04d}": TensorDataset(*data) for number, data in enumerate(clients_of(name))}
    return Task(
        model=lambda: model_of(name),
        data=lambda site, split: clients[site] if split == "train" else None,
        sites=list(clients),
        loss=nn.functional.cross_entropy,
        metrics={},
        local=Local(epochs=1, batch_size=BATCH_SIZE, optimizer="sgd", lr=LR),
    )


def atoll(name: str, engine: str, workers: str) -> None:
    """Run `atoll simulate`, which pauses between rounds."""
    requests, running = RoundRequests(), list[Federation]()

    def between(line: dict[str, Any]) -> None:
        assert line["counted"] == SETTINGS[name][4], line
        if not requests.another():
            running[0].interrupt()

    overrides = [
        f"rounds={ROUNDS}",
        f"round.cohort_size={SETTINGS[name][4]}",
        f"simulation.engine={engine}",
        f"simulation.workers={workers}",
    ]
    file = load_run(
        f"{Path(__file__).with_name('simulation_tasks.py')}:of_{name.replace('-', '_')}", overrides, kind=SimulationFile
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(file, load_user_task(file.task), Path(folder), on_round=between, is_fresh=True) as federation,
    ):
        running.append(federation)
        result = federation.run()
        arrays = federation.versions.arrays(result["model_digest"])
        weights = [torch.tensor(arrays[parameter]) for parameter in state_of(model_of(name))]
        say(accuracy=accuracy(name, weights), engine=result["engine"])


def tight(name: str, processes: str) -> None:
    """Run the lean loop, in one process for each core."""
    torch.set_num_threads(1)
    _, _, num_clients, _, cohort = SETTINGS[name]
    clients, requests, begin = clients_of(name), RoundRequests(), 0
    weights: Sequence[torch.Tensor] = [parameter.detach() for parameter in model_of(name).parameters()]
    loop = Lean(lambda: model_of(name), nn.functional.cross_entropy, lr=LR, batch_size=BATCH_SIZE)
    with LeanProcesses(loop, weights, clients, processes=int(processes)) as every:
        while True:
            weights = every.round(weights, [(begin + i) % num_clients for i in range(cohort)])
            begin += cohort
            if not requests.another():
                break
    say(accuracy=accuracy(name, weights))


if __name__ == "__main__":
    {"atoll": atoll, "tight": tight}[sys.argv[1]](*sys.argv[2:])
