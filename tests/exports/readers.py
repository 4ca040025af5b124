"""What the tools themselves read in an export: each number by name and step, with every time that it is there."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from atoll.exports.folders import SimulatedFolder
from atoll.exports.tools import Target

Points = dict[tuple[str, int], list[float]]

TOOLS = ("tensorboard", "mlflow", "wandb", "jsonl")


def points(tool: str, place: Path, run: str) -> Points:
    """Return the numbers that the tool's own reader finds in a run."""
    return {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb, "jsonl": _jsonl}[tool](place, run)


def _tensorboard(place: Path, run: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(place / run), size_guidance={"scalars": 0}).Reload()
    found: Points = defaultdict(list)
    for name in read.Tags()["scalars"]:
        for event in read.Scalars(name):
            found[name, event.step].append(event.value)
    return found


def mlflow_run(place: Path, run: str) -> tuple[Any, Any]:
    """Return MLflow's client and its only run of a name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{place / 'mlflow.db'}")
    experiments = [each.experiment_id for each in client.search_experiments()]
    (found,) = [each for each in client.search_runs(experiments) if each.info.run_name == run]
    return client, found


def _mlflow(place: Path, run: str) -> Points:
    client, of_run = mlflow_run(place, run)
    found: Points = defaultdict(list)
    for key in of_run.data.metrics:
        for each in client.get_metric_history(of_run.info.run_id, key):
            found[key, each.step].append(each.value)
    return found


def wandb_records(place: Path) -> list[Any]:
    """Return the records of the only offline run in a folder."""
    from wandb.proto import wandb_internal_pb2 as pb

    from atoll.exports.wandb_file import read_records

    (file,) = place.glob("offline-run-*/run-*.wandb")
    records, ends = read_records(file.read_bytes())
    assert ends[-1] == file.stat().st_size
    return [pb.Record.FromString(record) for record in records]


def _wandb(place: Path, _run: str) -> Points:
    found: Points = defaultdict(list)
    for record in wandb_records(place):
        row = {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        step = next((row[axis] for axis in ("round", "version", "step") if axis in row), 0)
        for name, value in row.items():
            if name not in ("_step", "_timestamp", "_runtime", "round", "version", "step"):
                found[name, step].append(value)
    return found


def _jsonl(place: Path, run: str) -> Points:
    found: Points = defaultdict(list)
    for line in (place / f"{run}.jsonl").read_text().splitlines():
        document = json.loads(line)
        if document["kind"] == "row":
            for name, value in document["values"].items():
                found[name, document["step"]].append(value)
    return found


def expected(folder: Path) -> Points:
    """Return the numbers of a simulated run, each once."""
    return {(name, row.step): [value] for row in SimulatedFolder(folder).rows() for name, value in row.values.items()}


def export(tool: str, folder: Path, place: Path) -> int:
    """Export a simulated run; return the number of rows."""
    from atoll.exports.exporter import export as export_run

    source, destination = SimulatedFolder(folder), Target(tool, str(place)).open()
    try:
        destination.begin(source.about())
        return export_run(source, destination)[0]
    finally:
        destination.close()
