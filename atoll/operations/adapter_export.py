"""The export of a version as a PEFT adapter, and with the tensors that did not travel, which the run's task has."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.operations.faults import CommandError
from atoll.operations.model_export import Exported, check_place, export
from atoll.operations.place import is_elsewhere
from atoll.operations.views import open_history
from atoll.server.views.views import run_of
from atoll.training.base.peft_files import CONFIG, WEIGHTS, Adapter, NoAdapter, write_adapter
from atoll.training.worker.process import Environment, RunTerms, Worker, WorkerCrashed, WorkerError, WorkerHung

TASK_TIMEOUT_S = 3600.0
"""Seconds that the task may take to build its model, with the files of its base."""


@dataclass(frozen=True, slots=True)
class Source:
    """A version of a run: the arguments of `model_export.export`."""

    state: Path
    run: str
    version: int | None
    database: str = ""

    def export(self, out: Path) -> Exported:
        """Export the tensors that travelled."""
        return export(self.state, self.run, self.version, out, database=self.database)


def export_adapter(source: Source, folder: Path) -> Exported:
    """Write the files of a version's adapter, which `PeftModel.from_pretrained` loads.

    An adapter's frozen tensors are built again by the run's task, from its seed; it needs no base for that.

    Raises:
        CommandError: the version has no adapter, or more than one; the files cannot be written; or as `export`.
    """
    with _made(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as beside:
        version, frozen = Path(beside) / "version.safetensors", Path(beside) / "frozen.safetensors"
        done = source.export(version)
        try:
            adapter = Adapter.read(version)
        except NoAdapter as error:
            raise CommandError(f"--peft: version {done.version} of {done.run}: {error}") from error
        if adapter.frozen:
            _build(source, "--peft", frozen, only=adapter.frozen)
        write_adapter(version, adapter, folder, frozen if adapter.frozen else None)
    return replace(done, out=folder, num_bytes=sum((folder / name).stat().st_size for name in (CONFIG, WEIGHTS)))


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder for a block that writes into it; one that is new goes when the block fails.

    Raises:
        CommandError: it cannot be made.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CommandError(f"--peft: {folder} cannot be a folder: {error.strerror or error}") from error
    try:
        yield
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def export_whole(source: Source, out: Path) -> Exported:
    """Write all tensors of the task's model, each in its dtype; tensors that did not travel are the task's.

    Raises:
        CommandError: the task cannot build its model here; or as `export`.
    """
    check_place(out)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as beside:
        version, whole = Path(beside) / "version.safetensors", Path(beside) / "whole.safetensors"
        done = source.export(version)
        _build(source, "--whole", whole, model=version)
        whole.replace(out)
    return replace(done, out=out, num_bytes=out.stat().st_size)


def _build(source: Source, option: str, out: Path, *, model: Path | None = None, only: Sequence[str] = ()) -> None:
    """Let the run's task build its model in a worker, and write tensors of it."""
    if not source.database and is_elsewhere(source.state):
        raise CommandError(f"{option}: needs the run's task, so run it where the coordinator's state directory is")
    with open_history(source.state, source.database) as history:
        config = run_of(history, source.run).config
    terms = RunTerms(config.given, config.aggregation.training, config.rounds)
    worker = Worker(
        config.task,
        log_path=out.with_name("worker.log"),
        run=terms,
        environment=Environment(load_timeout_s=TASK_TIMEOUT_S),
    )
    try:
        given = {"model": str(model.absolute())} if model is not None else {}
        worker.call("write_whole", TASK_TIMEOUT_S, out=str(out.absolute()), seed=config.seed, only=list(only), **given)
    except WorkerError as error:
        raise CommandError(f"{option}: {config.task}: {error.detail}") from error
    except (WorkerCrashed, WorkerHung) as error:
        raise CommandError(f"{option}: {config.task}: {error}") from error
    finally:
        worker.close()
