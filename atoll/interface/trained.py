"""`atoll.train`, and the training that it returns."""

import html
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.ground.faults import faults_in
from atoll.interface.arguments import folder_of
from atoll.interface.errors import AtollError, one_error
from atoll.interface.overrides import plain_table, words_of
from atoll.interface.progress import Show, bar_of
from atoll.interface.tables import Table
from atoll.interface.tasks import IN_NO_FILE, Named, named
from atoll.interface.turns import in_turn
from atoll.operations.requests import TrainRequest
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

if TYPE_CHECKING:
    from atoll.parallel.trainer.job import Job
    from atoll.task.arrays import Arrays


@one_error()
@in_turn()
def train(
    task: Task | ArrayTask | str,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    mesh: str | None = None,
    set: Mapping[str, Any] | None = None,
    out: Path | str | None = None,
    device: str = "auto",
    progress: bool = True,
) -> "Training":
    """Train a task on the pooled data of its sites, as `atoll train` does.

    Args:
        task: the task, or its reference.
        epochs: passes over the pooled data; None: the settings'.
        steps: optimizer steps; None: as many as the epochs have.
        mesh: the mesh, such as "dp=2": its ranks are separate processes, for a task in a file; None: this process.
        set: settings of `local`, `train`, `plan` and `task` by their keys, such as `{"train.batch_size": 64}`.
        out: the folder of the training, in which an interrupted one resumes from its newest checkpoint; None: a
            temporary one, which lasts as long as the returned object.
        device: "auto", "cpu" or "cuda".
        progress: show a progress bar, on a terminal or in a notebook.

    Raises:
        AtollError: settings or task have faults, with all of them before the first step; or the training fails.
    """
    length = {"train.epochs": epochs, "train.steps": steps}
    by_argument = {key: value for key, value in length.items() if value is not None}
    settings = plain_table(set)
    if twice := [f"{key}: got {by_argument[key]} and {settings[key]} in set" for key in by_argument if key in settings]:
        raise AtollError(*(f"{fault}; allowed: one of them" for fault in twice))
    overrides = words_of(settings | by_argument)
    of_call = named(task)
    folder = Path(tempfile.mkdtemp(prefix="atoll-")) if out is None else folder_of("out", out)
    found = Training(folder, is_temporary=out is None, task=of_call.task)
    from atoll.operations.training.job import ready

    request, job = ready(_request(of_call, mesh, found.folder, device, overrides), of_call.task)
    with bar_of("steps", is_shown=progress) as bar:
        train_with(job, request, bar)
    return found


def _request(of_call: Named, mesh: str | None, folder: Path, device: str, overrides: list[str]) -> TrainRequest:
    """Return the request of a call; `nproc` is None for one rank, this process."""
    from atoll.parallel.engine.mesh import parse_mesh

    if not isinstance(mesh, str | None):
        raise AtollError(f'mesh: got {mesh!r}; allowed: a string, such as "dp=2", or None')
    try:
        num_ranks = 1 if mesh is None else parse_mesh(mesh, replicate=True).size
    except ValueError as error:
        raise AtollError(*faults_in(error)) from None
    if num_ranks > 1 and of_call.is_of_a_cell:
        raise AtollError(f"mesh: got {mesh!r}: {IN_NO_FILE}, or use one")
    nproc = num_ranks if num_ranks > 1 else None
    return TrainRequest(task=of_call.reference, nproc=nproc, mesh=mesh, out=folder, device=device, overrides=overrides)


def train_with(job: "Job", request: TrainRequest, bar: Show) -> None:
    """Train in this process, whose signals and random generators stay unchanged, or on ranks in processes."""
    from atoll.operations.training.launch import launch
    from atoll.operations.training.process import train_here

    def show(event: Mapping[str, Any]) -> None:
        bar(event.get("step", 0), event.get("steps"))

    if request.nproc is None:
        train_here(job, request, show)
    else:
        with open(os.devnull, "wb") as log:
            launch(request, show, log=log)


class Training:
    """A centralized training in its folder.

    Args:
        folder: the folder, also one that `atoll train --out` has written.
        is_temporary: the folder is deleted with this object.
        task: the task, with which a comparison measures its data; None: unknown.
        owner: the object with which the folder is deleted; None: there is none.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        is_temporary: bool = False,
        task: Task | ArrayTask | None = None,
        owner: object = None,
    ) -> None:
        self.folder, self.task, self._owner = folder_of("folder", folder), task, owner
        if is_temporary:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    @property
    def result(self) -> Mapping[str, Any]:
        """The result, as `result.json` has it; empty while it runs."""
        path = self.folder / "result.json"
        found: Mapping[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        return found

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The metrics of the last model, by DATA/METRIC."""
        found: Mapping[str, Any] = self.result.get("metrics", {})
        return found

    @property
    def steps(self) -> Table:
        """The logged steps, a row each: loss, learning rate, examples per second."""
        return self._events("step")

    @property
    def evaluations(self) -> Table:
        """The evaluations, a row each, with a column for each metric."""
        return self._events("evaluation")

    def _events(self, kind: str) -> Table:
        from atoll.parallel.trainer.logs import read_log

        if not (path := self.folder / "log.jsonl").exists():
            raise AtollError(f"{self.folder}: has no log.jsonl; allowed: a folder that `atoll train --out` has written")
        log = read_log(path, kind)
        return Table([{name: value for name, value in log[step].items() if name != "event"} for step in sorted(log)])

    def model(self, version: str = "newest") -> "Arrays":
        """Return the tensors of the last model by name, or of the `best` one, which early stopping keeps.

        Raises:
            AtollError: there is none.
        """
        from atoll.tensors import safetensors_file

        names = {"newest": "model.safetensors", "best": "best.safetensors"}
        if not isinstance(version, str) or version not in names or not (path := self.folder / names[version]).exists():
            there = [name for name, file in names.items() if (self.folder / file).exists()]
            raise AtollError(f"version: got {version!r}; available: {', '.join(there) or 'none'}")
        return safetensors_file.read(path)

    def plot(self, metric: str | None = None) -> Any:
        """Return a figure of matplotlib with a metric over the steps of the evaluations.

        Args:
            metric: `accuracy`, or with its data `test/accuracy`; None: the first one that is no loss.

        Raises:
            AtollError: matplotlib is not installed, or the training has not measured it.
        """
        from atoll.interface.figures import line, main_of, metric_of

        table = self.evaluations
        known = [name for name in table.columns if "/" in name]
        chosen = metric_of(known, metric or main_of(known))
        return line({row["step"]: row[chosen] for row in table if row.get(chosen) is not None}, chosen, "step")

    def __repr__(self) -> str:
        return f"Training({self.result.get('why', 'unfinished')}, {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        try:
            return f"<p>{self.result.get('why', 'unfinished')}</p>{self.evaluations[-10:]._repr_html_()}"
        except AtollError as error:
            return f"<p>{html.escape(str(error))}</p>"
