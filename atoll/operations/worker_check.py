"""The loading of a task by a worker process that does nothing else, as an agent's worker loads it."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.operations.faults import CommandError, without_frames
from atoll.operations.reporter import waiting_for
from atoll.task.given import OPTION

if TYPE_CHECKING:
    from atoll.training.worker.process import Worker


@contextmanager
def worker_of(
    reference: str,
    *,
    site: str | None = None,
    options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    python: Path | None = None,
) -> "Iterator[Worker]":
    """Provide a worker process of a task, not started yet; it ends with the block, without leaving files.

    Args:
        reference: the reference of the task.
        site: the owner of the data; None: the coordinator.
        options: a run's values for the task.
        settings: the site's settings.
        python: the interpreter; None: this process's.
    """
    from atoll.training.worker.process import Environment, RunTerms, Worker

    with tempfile.TemporaryDirectory(prefix="atoll-worker-") as scratch:
        terms = RunTerms({f"{OPTION}{key}": value for key, value in (options or {}).items()})
        surroundings = Environment(python=python, folder=Path(scratch) / "app")
        log = Path(scratch) / "worker.log"
        worker = Worker(reference, log_path=log, site=site, run=terms, settings=settings, environment=surroundings)
        try:
            yield worker
        finally:
            worker.close()


def check_in_worker(reference: str, *, site: str, what: str = "", is_tried: bool = False, **given: Any) -> None:
    """Check that a worker process can load a task of a site.

    Args:
        reference: the reference of the task.
        site: the owner of the data.
        what: the beginning of each fault.
        is_tried: read its data, too, and try a batch, as an agent does when it starts.
        given: further arguments of `worker_of`.

    Raises:
        CommandError: it cannot be loaded; the error lists the reasons.
    """
    from atoll.client.work.worker import DESCRIBE_TIMEOUT_S
    from atoll.training.worker.process import WorkerCrashed, WorkerError, WorkerHung

    with worker_of(reference, site=site, **given) as worker:
        try:
            with waiting_for(f"the task {reference}", "its file and its libraries are imported"):
                worker.start()
                if is_tried:
                    worker.call("describe", DESCRIBE_TIMEOUT_S)
        except WorkerError as error:
            raise CommandError(*(f"{reference}: {what}{line}" for line in without_frames(error.detail))) from error
        except (WorkerCrashed, WorkerHung) as error:
            raise CommandError(f"{reference}: {what}{error}") from error
