"""`atoll.simulate`, and the run that it returns."""

import html
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.exports.rows import BY_CLIENT
from atoll.interface.arguments import folder_of
from atoll.interface.errors import AtollError, number_of, one_error
from atoll.interface.overrides import overrides_of, plain_of, plain_table
from atoll.interface.progress import bar_of
from atoll.interface.tables import Table, of_sites
from atoll.interface.tasks import IN_NO_FILE, Named, named, refuse_within_a_load
from atoll.interface.turns import in_turn, threads_kept
from atoll.operations.reporter import Reporter, reporting_to
from atoll.operations.requests import SimulateRequest
from atoll.protocol.json_values import flat
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

if TYPE_CHECKING:
    from atoll.simulations.experiments.report import RunReport
    from atoll.simulations.federation.config import SimulationFile
    from atoll.task.arrays import Arrays


@one_error()
@in_turn()
def simulate(
    task: Task | ArrayTask | str,
    *,
    rounds: int | None = None,
    clients: int | None = None,
    set: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    progress: bool = True,
) -> "SimulatedRun":
    """Simulate a federation, as `atoll simulate` does: the same settings end at the same model, to the bit.

    Args:
        task: the task, its reference, or a run's TOML.
        rounds: the rounds of the run; None: the settings'.
        clients: simulated clients, with an iid split of the data unless `population.kind` is set; None: the sites.
        set: settings by their keys, such as `{"round.cohort_size": 20}`.
        out: the folder of the run, in which an interrupted one resumes; None: a temporary one, which lasts as long as
            the returned object.
        progress: show a progress bar, on a terminal or in a notebook.

    Raises:
        AtollError: settings or task have faults, with all of them before anything runs; or the task's code fails.
    """
    from atoll.operations.simulate import run_simulation

    notes: list[str] = []
    folder = None if out is None else folder_of("out", out)
    with reporting_to(Reporter(notes.append)):
        file, of_call = _settings(task, plain_of(rounds), plain_of(clients), set)
        run = SimulatedRun(
            folder or tempfile.mkdtemp(prefix="atoll-"), notes, is_temporary=folder is None, task=of_call.task
        )
        with bar_of("rounds", is_shown=progress) as bar, threads_kept():
            run_simulation(file, of_call.task, run.folder, lambda line: bar(line["version"] or 0, file.rounds))
    return run


def _settings(
    task: Task | ArrayTask | str, rounds: int | None, clients: int | None, settings: Mapping[str, Any] | None
) -> "tuple[SimulationFile, Named]":
    """Return the settings of a call, and its task with its reference."""
    from atoll.operations.simulate import with_task

    refuse_within_a_load()
    overrides = overrides_of(settings)
    of_call = None if isinstance(task, str) else named(task)
    if of_call is not None and of_call.is_of_a_cell:
        overrides = [*in_this_process(settings), *overrides]
    what = str(task) if of_call is None else of_call.reference
    request = SimulateRequest(what=what, rounds=rounds, clients=clients, overrides=overrides)
    file, loaded = with_task(request, None if of_call is None else of_call.task)
    return file, of_call or Named(loaded, file.task, is_of_a_cell=False)


def in_this_process(settings: Mapping[str, Any] | None) -> list[str]:
    """Check that settings need no other process, which cannot import the task; return them as overrides.

    Raises:
        AtollError: an engine of several processes is asked for.
    """
    plain = plain_table(settings)
    engine, workers = plain.get("simulation.engine", "auto"), plain.get("simulation.workers", 1)
    if engine in ("processes", "ray") or workers != 1:
        wanted = f"simulation.engine = {engine!r}, simulation.workers = {workers}"
        raise AtollError(f"{wanted}: {IN_NO_FILE}, or leave these out")
    return ["simulation.workers=1"]


class SimulatedRun:
    """A simulated run in its folder.

    Args:
        folder: the folder of the run, also one that `atoll simulate --out` has written.
        notes: the sentences that the simulation reported, such as the engine that it chose.
        is_temporary: the folder is deleted with this object.
        task: the task, with which a comparison counts passes over the data; None: unknown.
        owner: the object with which the folder is deleted; None: there is none.
    """

    def __init__(
        self,
        folder: Path | str,
        notes: Sequence[str] = (),
        *,
        is_temporary: bool = False,
        task: Task | ArrayTask | None = None,
        owner: object = None,
    ) -> None:
        self.folder, self.notes, self.task = folder_of("folder", folder), notes, task
        self._owner = owner
        if is_temporary:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    @cached_property
    def report(self) -> "RunReport":
        """The report on the run: curves, targets, participation, fairness.

        Raises:
            AtollError: the folder has no simulated run.
        """
        from atoll.simulations.experiments.report import NoReport, read_run

        with one_error(NoReport):
            return read_run(self.folder)

    @property
    def result(self) -> Mapping[str, Any]:
        """The result of the run, as `result.json` has it."""
        return self.report.result

    @property
    def state(self) -> str:
        """The state in which the run has ended: finished, failed, paused or interrupted."""
        return str(self.result.get("state", ""))

    @property
    def document(self) -> Mapping[str, Any]:
        """The run in plain values: state, cause, task, version, and the metrics of each round as thinned curves.

        A run without a result is `running` while a process holds its folder, and `interrupted` otherwise.
        """
        from atoll.protocol.json_values import plain
        from atoll.server.journal.holder import is_held
        from atoll.server.views.thinning import thinned_metrics
        from atoll.simulations.experiments.report import GROUPS

        report = self.report
        groups = {
            group: [(line["round"], line[group]) for line in report.rounds if line.get(group)] for group in GROUPS
        }
        without_result = "running" if is_held(self.folder) else "interrupted"
        created = (self.folder / "run.toml").stat().st_mtime if report.settings else None
        found: Mapping[str, Any] = plain(
            {
                "run": report.name,
                "name": report.settings.get("name", report.name),
                "task": report.settings.get("task", ""),
                "state": self.state or without_result,
                "cause": report.result.get("cause", ""),
                "version": report.rounds[-1].get("version") or 0 if report.rounds else 0,
                "rounds": report.settings.get("rounds"),
                "created_at": created,
                "ended_at": None,
                "metrics": thinned_metrics({group: rows for group, rows in groups.items() if rows}),
            }
        )
        return found

    @property
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """The rounds as `rounds.jsonl` has them, with the fates and the values of each client."""
        return self.report.rounds

    @property
    def settings(self) -> str:
        """The settings of the run, as TOML; empty: the folder has none."""
        path = self.folder / "run.toml"
        return path.read_text("utf-8") if path.exists() else ""

    @property
    def digest(self) -> str:
        """The digest of the last version of the model."""
        return str(self.result.get("model_digest", ""))

    @property
    def privacy(self) -> Mapping[str, Any] | None:
        """The account of a private run, with `epsilon`, `epsilon_max` and the `sentence`; None: it has no `[privacy]`.

        It is no guarantee: the noise of a simulation follows from its seed.
        """
        found: Mapping[str, Any] | None = self.result.get("privacy")
        return found

    @property
    def rounds(self) -> Table:
        """The rounds, a row each: fates in numbers, bytes, seconds, and metrics by `server.accuracy` and the like."""
        lines = [{name: value for name, value in line.items() if name not in BY_CLIENT} for line in self.report.rounds]
        return Table([flat(line) for line in lines])

    @property
    def sites(self) -> Table:
        """The metrics of each client by its evaluations: site, version, and a column for each metric."""
        from atoll.simulations.experiments.sites import sites

        return of_sites(sites(self.report.rounds)["evaluation"])

    def model(self, version: int | str = "newest") -> "Arrays":
        """Return the model's tensors in a version by name: of its number, of the `newest`, or of the `best` one.

        Raises:
            AtollError: the version is not there; the message says which are.
        """
        from atoll.tensors import safetensors_file
        from atoll.tensors.layout import BESIDE

        folder = self.folder / "models" / "versions"
        there = sorted(int(path.stem) for path in folder.glob("*.safetensors") if path.stem.isdecimal())
        if not there:
            self.report  # noqa: B018 - raises where there is no run at all
        wanted = self._number(version, there)
        if wanted not in there:
            listed, newest = ", ".join(map(str, there)) or "none", int(self.result.get("version", 0))
            if wanted > newest:
                cause = f": {self.result['cause']}" if self.result.get("cause") else ""
                raise AtollError(f"version {wanted} was not made: the run is {self.state} at version {newest}{cause}")
            raise AtollError(f"version {wanted} is not kept (available: {listed}); model.keep_versions keeps more")
        arrays = safetensors_file.read(folder / f"{wanted:06d}.safetensors")
        return {name: array for name, array in arrays.items() if not name.startswith(BESIDE)}

    def _number(self, version: int | str, there: list[int]) -> int:
        if version == "newest":
            return there[-1] if there else 0
        if version != "best":
            return number_of(version)
        if "best" not in self.result:
            raise AtollError('the run has no best version: set {"model.best": METRIC}')
        return int(self.result["best"]["version"])

    def plot(self, metric: str | None = None) -> Any:
        """Return a figure of matplotlib with a metric over the rounds.

        Args:
            metric: `accuracy`, or with its group `server/accuracy`; None: the first one that is no loss.

        Raises:
            AtollError: matplotlib is not installed, or the run has not measured it.
        """
        from atoll.interface.figures import curves

        return curves([self.report], metric)

    def __repr__(self) -> str:
        try:
            of_run = f"{self.state}, version {self.result.get('version')}"
        except AtollError:
            of_run = "no run"
        return f"SimulatedRun({of_run}, {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        try:
            return f"<p>{self.state}: {self.result.get('cause', '')}</p>{self.rounds[-10:]._repr_html_()}"
        except AtollError as error:
            return f"<p>{html.escape(str(error))}</p>"
