"""The comparison of a task's federated training with its centralized one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.operations.faults import CommandError
from atoll.operations.reporter import note
from atoll.operations.requests import CompareRequest, SimulateRequest, TrainRequest
from atoll.operations.simulate import with_drop_empty, with_task
from atoll.operations.training.job import job_of, with_settings
from atoll.parallel.trainer.run import LOG
from atoll.simulations.experiments import compare as sides_of
from atoll.simulations.experiments.compare import Side, document_of
from atoll.simulations.experiments.plots import main_metric
from atoll.simulations.experiments.report import RunReport, read_run
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.report import Json
from atoll.simulations.federation.setting import as_given
from atoll.task.array_task import ArrayTask
from atoll.task.given import Given
from atoll.task.task import Task

FEDERATED, CENTRALIZED, RESULT = "federated", "centralized", "compare.json"


@dataclass(frozen=True, slots=True)
class Compared:
    """A federated training beside a centralized one, in a folder."""

    sides: Sequence[Side]
    target: float | None
    folder: Path

    @property
    def document(self) -> dict[str, Any]:
        """The result in JSON types."""
        return document_of(self.sides, self.target)


def compare_trainings(
    request: CompareRequest,
    *,
    federated: Callable[[SimulationFile, Task, Path], Json],
    centralized: Callable[[TrainRequest, Task], object],
    task: Task | ArrayTask | None = None,
) -> Compared:
    """Train a task federated and centralized, and compare the two.

    Args:
        request: a run's TOML, or the task's reference, and the options.
        federated: runs the simulation in its folder, and returns its result.
        centralized: runs the centralized training.
        task: the task that the request names; None: it is loaded.

    Raises:
        ConfigError, CommandError: all mistakes, before anything runs; later a run that has failed.
    """
    overrides = with_drop_empty(request.overrides, request.drop_empty, train__epochs=request.epochs)
    central = [override for override in overrides if override.startswith(("train.", "plan."))]
    of_federation = [override for override in overrides if override not in central]
    simulation = SimulateRequest(
        what=request.what[0], rounds=request.rounds, clients=request.clients, overrides=of_federation
    )
    file, as_is, given = _load(simulation, task)
    _check_metric(request.metric, file, given)
    folder = request.out or Path(f"atoll-compare-{file.name}")
    of_training = [*_of_both(file), *central]
    _request(file, as_is, folder, of_training, request.epochs or 1)
    result = federated(file, given, folder / FEDERATED)
    if result["state"] != "finished":
        raise CommandError(f"the federated run has {result['state']}: {result['cause']}")
    report = read_run(folder / FEDERATED, FEDERATED)
    data = sides_of.pooled(given)

    def in_a_round(round_: int) -> float:
        local = Given.read(file.run.given).local_of(given.local, round_)
        return sides_of.epochs_of(local, data.num_examples, report.num_clients)

    epochs = request.epochs or sides_of.passes_of(report, epochs=in_a_round)
    training = _request(file, as_is, folder, of_training, epochs)
    centralized(training, as_is)
    chosen = request.metric or main_metric([report])
    sides = [
        sides_of.federated(report, chosen, epochs=in_a_round),
        sides_of.centralized(training.folder / LOG, chosen, data_bytes=data.bytes),
    ]
    _check_measured(sides, report)
    sides_of.write(sides, request.target, folder / RESULT)
    return Compared(sides, request.target, folder)


def _of_both(file: SimulationFile) -> list[str]:
    """Return the settings of the federated run that are also those of the centralized training."""
    both = [f"local.{key}={_text(value)}" for key, value in file.local.items()]
    both += [f"task.{key}={_text(value)}" for key, value in file.options.items()]
    for site, values in file.sites.items():
        both += [f"sites.{site}.{key}={_text(value)}" for key, value in values.items()]
    return both


def _load(request: SimulateRequest, task: Task | ArrayTask | None) -> tuple[SimulationFile, Task, Task]:
    """Load the settings of the federated run, and its PyTorch task, both plain and with the settings applied."""
    file, task = with_task(request, task)
    if not isinstance(task, Task):
        raise CommandError(f"{file.task} is an ArrayTask, which trains only federated; `atoll compare` takes a Task")
    if file.schedule.local:
        names = ", ".join(f"local.{name}" for name in file.schedule.local)
        of_federation = f"the schedule of {names} applies only to the federated run"
        note(f"{request.what}: {of_federation}: `train.schedule` is the centralized training's")
    given = as_given(file, task)
    assert isinstance(given, Task)
    return file, task, given


def _check_metric(metric: str | None, file: SimulationFile, task: Task) -> None:
    """Check, as far as the settings tell, that both trainings measure the metric, before either begins."""
    groups = ["server"] * (task.test_data is not None and file.evaluation.server_every > 0)
    groups += ["clients"] * (file.evaluation.clients_every > 0)
    known = [f"{group}/{name}" for group in groups for name in ("loss", *task.metrics)]
    if not known:
        raise CommandError(
            "no metric to compare by: give the task a test_data and leave evaluation.server_every above 0, or set "
            "evaluation.clients_every"
        )
    if metric is not None and metric not in known:
        raise CommandError(f"--metric: got {metric!r}; allowed: {', '.join(known)}")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _request(file: SimulationFile, task: Task, folder: Path, overrides: list[str], epochs: int) -> TrainRequest:
    """Return the options of the centralized training, checked before the federated run begins."""
    has_length = any(override.startswith(("train.epochs=", "train.steps=")) for override in overrides)
    start = [f"train.start={file.model.start}", f"train.strict={_text(file.model.is_strict)}"]
    request = TrainRequest(
        task=file.task,
        out=folder / CENTRALIZED,
        device=file.simulation.device,
        overrides=[
            *(start if file.model.start else []),  # both begin alike, unless train.start is given beside it
            *overrides,
            *([] if has_length else [f"train.epochs={epochs}"]),
        ],
    )
    request = with_settings(request)
    job_of(request, task)
    return request


def _check_measured(sides: Sequence[Side], report: RunReport) -> None:
    if missing := [side.kind for side in sides if not side.points]:
        raise CommandError(
            f"--metric: {sides[0].metric} was not measured in the {' and the '.join(missing)} training; the federated "
            f"one has {', '.join(report.metrics) or 'none'}, and both need test data of the server or of the clients"
        )
