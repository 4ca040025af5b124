"""One simulated run in its folder, from its settings to its result."""

import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.parallel.task.array_task import ArrayTask
from atoll.parallel.task.task import Task
from atoll.protocol.durable import write_atomically
from atoll.protocol.settings import ConfigError, effective
from atoll.server.journal.state_directory import lock_directory
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.federation import Federation
from atoll.simulations.federation.keeping import STATE, Keeper
from atoll.simulations.federation.longer import faults_of_rounds
from atoll.simulations.federation.report import Json
from atoll.simulations.federation.setting import setting_of

SETTINGS, POPULATION = "run.toml", "population.json"

SAME = ("simulation",)
"""Tables that may differ when a run is gone on with: nothing of them is decided."""


@contextmanager
def opened(
    file: SimulationFile,
    task: Task | ArrayTask,
    folder: Path,
    *,
    on_round: Callable[[Json], None],
    is_fresh: bool,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[Federation]:
    """A federation, ready to run; an interrupted one in the same folder is gone on with.

    Args:
        file: the settings.
        task: that they name.
        folder: of the run.
        on_round: is shown each round's line.
        is_fresh: insist on a folder without a run.
        tell: is told what else an operator should know.

    Raises:
        ConfigError: with everything that is wrong with the settings, the task or the folder.
        StoreCorrupted: what an earlier process has left is damaged.
    """
    check_folder(file, folder, is_fresh=is_fresh)
    setting = setting_of(file, task)
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(folder)
    try:
        is_told = (folder / STATE).exists() and (folder / POPULATION).exists()
        write_atomically(folder / SETTINGS, effective(file).encode())
        if setting.who_holds_what is not None and not is_told:
            write_atomically(folder / POPULATION, json.dumps(setting.who_holds_what()).encode())
        with Federation(setting, folder, on_round=on_round, tell=tell) as federation:
            yield federation
    finally:
        os.close(lock)


def check_folder(file: SimulationFile, folder: Path, *, is_fresh: bool) -> None:
    """Whether the folder may take this run: the one that is there, perhaps with another number of rounds.

    Raises:
        ConfigError: it has another one, or nobody can read which.
        StoreCorrupted: the state of the run is damaged.
    """
    if not (folder / STATE).exists():
        return
    if is_fresh:
        raise ConfigError([f"{folder}: there is a run already; choose another --out, delete it, or --resume"])
    before, now = _settings_of(folder), _decisive(effective(file))
    wrong = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if wrong == ["rounds"]:
        _check_rounds(file, folder, int(before["rounds"]))
    elif wrong:
        what = "; ".join(f"{key}: {before.get(key)!r} there, {now.get(key)!r} here" for key in wrong[:5])
        raise ConfigError([f"{folder}: there is a run with other settings ({what}); choose another --out"])


def _check_rounds(file: SimulationFile, folder: Path, before: int) -> None:
    found = Keeper(folder, time.monotonic).load()
    if found and (faults := [*faults_of_rounds(found.ledger, before, file.run)]):
        there = f"{folder}: the run there cannot have {file.rounds} rounds"
        raise ConfigError([f"{there}: {fault}; choose another --out" for fault in faults])


def _settings_of(folder: Path) -> Json:
    """Of the run that is there."""
    try:
        return _decisive((folder / SETTINGS).read_text(encoding="utf-8"))
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(
            [f"{folder / SETTINGS}: is damaged: {error}; put it back, or choose another --out"]
        ) from error


def _decisive(text: str) -> Json:
    return _flat({name: value for name, value in tomllib.loads(text).items() if name not in SAME})


def _flat(table: Json, prefix: str = "") -> Json:
    flat: Json = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        flat |= _flat(value, f"{key}.") if isinstance(value, dict) else {key: json.dumps(value, default=str)}
    return flat
