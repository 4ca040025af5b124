"""`atoll.train`, and the training that it returns."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.interface.overrides import words_of
from atoll.interface.progress import bar_of
from atoll.interface.tables import Table
from atoll.interface.tasks import Named, named
from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.task import Task
from atoll.protocol.settings import ConfigError

if TYPE_CHECKING:
    from atoll.cli.training.request import Request
    from atoll.parallel.task.arrays import Arrays


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
        epochs: passes over the pooled data; None: those of the settings.
        steps: optimizer steps; None: those of the epochs.
        mesh: the mesh, such as "dp=2": its ranks are processes of their own, for a task in a file; None: this process.
        set: settings of `local`, `train`, `plan` and `task` by their keys, such as `{"train.batch_size": 64}`.
        out: the folder of the training, in which an interrupted one goes on from its newest checkpoint; None: a
            temporary one, which lasts as long as the returned object.
        device: "auto", "cpu" or "cuda".
        progress: show a progress bar, on a terminal or in a notebook.

    Raises:
        ConfigError: settings or task have faults; with all of them, before the first step.
        JobRefused, NotFinite: the training cannot begin with these data, or has left the finite numbers.
        TrainingFailed: a rank of a mesh has failed; with its last lines.
    """
    from atoll.cli.faults import CommandError
    from atoll.cli.training.request import Request
    from atoll.parallel.engine.mesh import parse_mesh

    length = {"train.epochs": epochs, "train.steps": steps}
    overrides = words_of({**(set or {}), **{key: value for key, value in length.items() if value is not None}})
    of_call = named(task)
    folder = Path(tempfile.mkdtemp(prefix="atoll-") if out is None else out)
    found = Training(folder, is_temporary=out is None)
    try:
        num_ranks = 1 if mesh is None else parse_mesh(mesh, replicate=True).size
        request = Request(
            task=of_call.reference,
            nproc=None,
            mesh=mesh,
            zero=None,
            out=folder,
            device=device,
            overrides=overrides,
            is_fresh=False,
        )
        if num_ranks > 1:
            _on_ranks(request, of_call, num_ranks)
        else:
            _here(request, of_call.task, is_shown=progress)
    except CommandError as error:
        raise ConfigError(error.faults) from error
    return found


def _here(request: "Request", task: Task | ArrayTask, *, is_shown: bool) -> None:
    """Train in this process, whose random generators are set back at the end."""
    from atoll.cli.training.folder import folder_lock
    from atoll.cli.training.request import device_of, job_of
    from atoll.parallel.task.randomness import generators_kept
    from atoll.parallel.trainer.logs import json_log, to_all
    from atoll.parallel.trainer.run import LOG, Surroundings
    from atoll.parallel.trainer.run import train as train_job
    from atoll.parallel.world import read_world

    job = job_of(request, task)
    with folder_lock(request.folder), generators_kept(), bar_of("steps", is_shown=is_shown) as bar:

        def show(event: dict[str, Any]) -> None:
            bar(event.get("step", 0), event.get("steps"))

        report = to_all(json_log(request.folder / LOG), show)
        here = Surroundings(
            world=read_world(),
            device=device_of(request),
            folder=request.folder,
            clock=time.monotonic,
            is_told_to_stop=lambda: False,
            report=report,
        )
        train_job(job, here)


class TrainingFailed(RuntimeError):
    """The failure of a training on a mesh."""


def _on_ranks(request: "Request", of_call: Named, num_ranks: int) -> None:
    """Train on ranks, in processes of the command."""
    if of_call.is_of_a_cell:
        wanted = f"mesh: got {request.mesh!r}"
        raise ConfigError([f"{wanted}: other processes cannot import a task of a cell: put it into a file, or use one"])
    command = [sys.executable, "-m", "atoll", "train", *request.for_a_rank, "--nproc", str(num_ranks), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line.removeprefix("atoll: ") for line in done.stderr.splitlines() if line.startswith("atoll: ")]
    if done.returncode == 2:
        raise ConfigError(lines or done.stderr.splitlines()[-1:])
    if done.returncode:
        raise TrainingFailed("\n".join(lines or done.stderr.splitlines()[-5:]))


class Training:
    """A centralized training in its folder.

    Args:
        folder: the folder, also one that `atoll train --out` has written.
        is_temporary: the folder is deleted with this object.
    """

    def __init__(self, folder: Path | str, *, is_temporary: bool = False) -> None:
        self.folder = Path(folder)
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

        log = read_log(self.folder / "log.jsonl", kind)
        return Table([{name: value for name, value in log[step].items() if name != "event"} for step in sorted(log)])

    def model(self, version: str = "newest") -> "Arrays":
        """Return the tensors of the last model by name, or of the `best` one, which early stopping keeps.

        Raises:
            LookupError: there is none.
        """
        from atoll.aggregation.tensors import safetensors_file

        names = {"newest": "model.safetensors", "best": "best.safetensors"}
        if version not in names or not (path := self.folder / names[version]).exists():
            there = [name for name, file in names.items() if (self.folder / file).exists()]
            raise LookupError(f"version: got {version!r}; there: {', '.join(there) or 'none'}")
        return safetensors_file.read(path)

    def __repr__(self) -> str:
        return f"Training({self.result.get('why', 'unfinished')}, {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return f"<p>{self.result.get('why', 'unfinished')}</p>{self.evaluations[-10:]._repr_html_()}"
