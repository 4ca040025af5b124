"""The start of a run's model: a file, or a version of another run of the same coordinator."""

import os
from collections.abc import Mapping
from pathlib import Path

from atoll.ground.folders import no_file
from atoll.protocol.run_names import RunNotNamed, newest_named
from atoll.protocol.vocabulary import RunId, Version
from atoll.server.config.model import BEST, ModelConfig, run_and_version
from atoll.server.errors import OperatorError
from atoll.server.hosting.run_driver import RunDriver
from atoll.training.worker.warm_start import Start


async def start_of(model: ModelConfig, runs: Mapping[RunId, RunDriver]) -> Start | None:
    """Return the file from which a new run starts; None: from the task's model.

    Args:
        model: the settings of the run's versions.
        runs: the runs of this coordinator.

    Raises:
        OperatorError: there is no such file, run or version.
    """
    if not model.start:
        return None
    named = run_and_version(model.start)
    return Start(_file(model.start) if named is None else await _file_of(*named, runs), model.is_strict)


def _file(path: str) -> Path:
    if not os.path.isfile(path):
        raise OperatorError(f"model.start: {no_file(path)}")
    return Path(path)


async def _file_of(name: str, wanted: str, runs: Mapping[RunId, RunDriver]) -> Path:
    """Return the file of a run's version; the run is named by its id, or is the newest one of a name."""
    try:
        run = runs[RunId(newest_named(name, ((run_id, run.config.name) for run_id, run in runs.items())))]
    except RunNotNamed as error:
        raise OperatorError(f"model.start: {error}") from None
    ledger = run.machine.ledger
    if wanted == BEST and ledger.best is None:
        metric = run.config.model.best
        why = f"its model.best, {metric}, is not measured yet" if metric else "its model.best names no metric"
        raise OperatorError(f"model.start: run {run.run_id} has no best version, as {why}: name one, run:{name}@NUMBER")
    best = ledger.version if ledger.best is None else ledger.best.version
    version = best if wanted == BEST else Version(int(wanted)) if wanted else ledger.version
    try:
        return await run.reducer.whole(version)
    except (OSError, LookupError) as error:
        kept = ", ".join(map(str, run.reducer.store.versions()))
        what = f"version {version} of {run.run_id} is not kept, or not made yet (kept: {kept})"
        raise OperatorError(f"model.start: {what}") from error
