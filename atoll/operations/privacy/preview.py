"""The preview of a privacy plan: a task simulated with the plan and without privacy, by the one simulator."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.load import load_user_task
from atoll.operations.reporter import note
from atoll.operations.requests import PrivacyPlanRequest, SimulateRequest
from atoll.operations.simulate import check_simulation, load_simulation, run_simulation
from atoll.protocol.signals import ExitCode
from atoll.simulations.experiments.plots import main_metric
from atoll.simulations.experiments.report import RunReport, read_run
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.report import NOISE_COHORT
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

COHORT = "round.cohort_size"


class Stopped(CommandError):
    """The end of a preview by a signal."""

    code = ExitCode.STOPPED


@dataclass(frozen=True, slots=True)
class Preview:
    """What the noise of a plan costs a task, in a simulation.

    Attributes:
        metric: by its name, WHO/METRIC.
        private: its value after each round of the private run; None where it was not measured.
        plain: the same of the run without privacy.
        epsilon: that the private run has spent; None: it has released nothing.
        cause: of the end of the private run.
        sentence: its account, which is no guarantee.
    """

    metric: str
    private: tuple[float | None, ...]
    plain: tuple[float | None, ...]
    epsilon: float | None
    cause: str
    sentence: str

    @property
    def last(self) -> tuple[float | None, float | None]:
        """The last values with the plan and without privacy."""
        return _last(self.private), _last(self.plain)


def preview(asked: PrivacyPlanRequest, settings: Mapping[str, Any], task: Task | ArrayTask | None = None) -> Preview:
    """Simulate the task of a request twice, with the settings of its plan and without privacy.

    Args:
        asked: the request, which names the task.
        settings: of the plan, by their keys.
        task: the task that it names; None: it is loaded.

    Raises:
        ConfigError: all mistakes in the settings, before anything runs.
        CommandError: the task cannot be loaded, or a run has failed.
        Stopped: by a signal.
    """
    private = load_simulation(_request(asked, settings))
    # Loaded as the other is, so that both have the clients and data of one seed; nothing else differs.
    plain = private.model_copy(update={"privacy": None, "secure": None, "simulation": _without_cohort(private)})
    loaded = load_user_task(private.task) if task is None else task
    for line in check_simulation(private, loaded):
        note(line)
    with tempfile.TemporaryDirectory(prefix="atoll-plan-") as folder:
        reports = [_run(file, loaded, Path(folder) / name) for name, file in (("private", private), ("plain", plain))]
    metric = main_metric(reports)
    account = reports[0].result["privacy"]
    return Preview(
        metric=metric,
        private=_values(reports[0], metric),
        plain=_values(reports[1], metric),
        epsilon=reports[0].epsilon,
        cause=str(reports[0].result["cause"]),
        sentence=str(account["sentence"]),
    )


def _request(asked: PrivacyPlanRequest, settings: Mapping[str, Any]) -> SimulateRequest:
    """Return the request of the private run: the plan's settings, and those of `--set`, which decide."""
    given = {key.strip(): value for key, _, value in (each.partition("=") for each in asked.overrides)}
    taken = {key: value for key, value in settings.items() if key not in given}
    if COHORT in given and COHORT in settings and NOISE_COHORT not in given and asked.noise_by == "coordinator":
        taken[NOISE_COHORT] = settings[COHORT]
    overrides = [f"{key}={json.dumps(value)}" for key, value in taken.items()]
    return SimulateRequest(
        what=asked.simulate, clients=_clients(asked, given), overrides=[*overrides, *asked.overrides]
    )


def _clients(asked: PrivacyPlanRequest, given: Mapping[str, str]) -> int | None:
    """Return how many clients a task's data is dealt to; None: those of the task, of its TOML or of `--set`."""
    if asked.clients is not None or asked.unit == "example" or str(asked.simulate).endswith(".toml"):
        return asked.clients
    if any(key.startswith("population.") for key in given):
        return None
    cohort = given.get(COHORT, "")
    size = int(cohort) if cohort.strip().isdecimal() else asked.cohort_size
    return size * (asked.separation or 1) if size is not None else None  # a cohort for each version of a separation


def _without_cohort(file: SimulationFile) -> Any:
    return file.simulation.model_copy(update={"noise_cohort_size": None})


def _run(file: SimulationFile, task: Task | ArrayTask, folder: Path) -> RunReport:
    note(f"simulating {'without privacy' if file.privacy is None else 'the plan'}: {count_of(file.rounds, 'round')}")
    result = run_simulation(file, task, folder, lambda line: None, is_fresh=True)
    if result["state"] == "interrupted":
        raise Stopped("interrupted; nothing is kept, and the same command begins again")
    if result["state"] != "finished":
        raise CommandError(f"the simulated run has {result['state']}: {result['cause']}")
    return read_run(folder)


def _values(report: RunReport, metric: str) -> tuple[float | None, ...]:
    group, _, name = metric.partition("/")
    return tuple((line.get(group) or {}).get(name) for line in report.rounds)


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
