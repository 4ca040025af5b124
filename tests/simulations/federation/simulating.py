"""Simulated federations of the small task, for other tests."""

import json
from pathlib import Path

from atoll.operations.load import load_run, load_user_task
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from atoll.tensors import safetensors_file

TASK = str(Path(__file__).with_name("line_task.py")) + ":task"


def settings(*overrides, task=TASK):
    return load_run(task, ["simulation.engine=sequential", *overrides], kind=SimulationFile)


def simulate(folder, *overrides, task=TASK, on_round=lambda line: None):
    """Run to the end; return the result and the lines of the rounds."""
    file = settings(*overrides, task=task)
    with opened(file, load_user_task(file.task), folder, on_round=on_round, is_fresh=False) as federation:
        result = federation.run()
    return result, lines(folder)


def lines(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def without_real_time(found):
    return [{name: value for name, value in line.items() if name not in ("real_s", "trainings")} for line in found]


def model(folder, version):
    return safetensors_file.read(folder / "models" / "versions" / f"{version:06d}.safetensors")
