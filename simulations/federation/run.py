"""One simulated run in its folder, from its settings to its result."""

import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path

from atoll.ground.durable import write_atomically
from atoll.ground.printable import count_of
from atoll.parallel.trainer.results_folder import SIMULATION, faults_of_place
from atoll.protocol.json_values import flat
from atoll.protocol.settings import ConfigError, effective, load_text
from atoll.server.errors import StoreCorrupted
from atoll.server.journal.holder import lock_directory
from atoll.simulations.federation.app import conclude, with_folder
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.federation import Federation
from atoll.simulations.federation.kept_facts import KeptFacts
from atoll.simulations.federation.report import NOISE_COHORT, POPULATION, SETTINGS, Json
from atoll.simulations.federation.round_count import Differences, faults_of_rounds
from atoll.simulations.federation.seal import faults_of_seal, unseal
from atoll.simulations.federation.setting import setting_of
from atoll.simulations.federation.snapshots import STATE, WAY_OUT, SnapshotFile
from atoll.task.array_task import ArrayTask
from atoll.task.round_schedule import BOUNDED
from atoll.task.task import Task

MAY_DIFFER = "simulation."
"""Beginning of the settings that may differ in a resumed run, because no decision depends on them; but for
`NOISE_COHORT`."""


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
    """Open a federation that is ready to run; an interrupted run in the same folder is resumed.

    The `main()` of a Flower app runs in the folder, and continues to its end when the block has finished the run.

    Args:
        file: the settings.
        task: the task that they name.
        folder: the folder of the run.
        on_round: a callback for each round's line.
        is_fresh: whether to refuse a folder that has a run.
        tell: a callback for other notes to the operator.

    Raises:
        ConfigError: the settings, the task or the folder have faults; the message lists all of them.
        StoreCorrupted: the files of an earlier process are damaged.
        Exception: any error that the rest of `main()` raises.
    """
    check_folder(file, folder, is_fresh=is_fresh)  # its faults name the folder as given
    folder = folder.absolute()  # the task's code may change the current folder
    facts = KeptFacts(folder)
    setting = setting_of(file, with_folder(task, folder), facts.read)
    for line in setting.notes:
        tell(line)
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(folder)
    try:
        is_reported = (folder / STATE).exists() and (folder / POPULATION).exists()
        with chdir(os.curdir), Federation(setting, folder, on_round=on_round, tell=tell) as federation:
            unseal(folder)  # a refused run must not change anything
            write_atomically(folder / SETTINGS, effective(file).encode())
            facts.save()
            if setting.population_report is not None and not is_reported:
                write_atomically(folder / POPULATION, json.dumps(setting.population_report()).encode())
            yield federation
            conclude(federation, folder)
    finally:
        os.close(lock)


def check_folder(file: SimulationFile, folder: Path, *, is_fresh: bool) -> None:
    """Check that the folder is free or has this run, possibly with another number of rounds.

    Raises:
        ConfigError: the folder has another run, or one with unreadable settings.
        StoreCorrupted: the state of the run, or a file of a finished run, is damaged.
    """
    check_place(folder)
    if not (folder / STATE).exists():
        return
    if faults := faults_of_seal(folder):
        raise StoreCorrupted("; ".join([*faults[:5], WAY_OUT]))
    if is_fresh:
        raise ConfigError([f"{folder}: there is a run already; choose another --out, delete it, or pass --resume"])
    wrong = differing(file, folder)
    ends = {key: found for key, found in wrong.items() if key.startswith("schedule.") and key.endswith(".rounds")}
    if "rounds" in wrong and wrong.keys() == {"rounds", *ends}:
        _check_rounds(file, folder, int(wrong["rounds"][0] or 0), ends)
    elif wrong:
        differences = "; ".join(f"{key}: {there!r} there, {here!r} here" for key, (there, here) in [*wrong.items()][:5])
        raise ConfigError([f"{folder}: there is a run with other settings ({differences}); choose another --out"])


def differing(file: SimulationFile, folder: Path) -> Differences:
    """Return the decisive settings that differ from the run in a folder: its value, and this one.

    Raises:
        ConfigError: the settings in the folder are damaged.
    """
    before, now = _settings_of(folder), _decisive(effective(file))
    names = sorted(before.keys() | now.keys())
    return {key: (before.get(key), now.get(key)) for key in names if before.get(key) != now.get(key)}


def check_place(folder: Path) -> None:
    """Check that the folder has no files of another kind, and no run's TOML written by a person.

    Raises:
        ConfigError: the folder has such files; the message lists all of them.
    """
    is_a_persons = (folder / SETTINGS).exists() and not (folder / STATE).exists() and not _is_effective(folder)
    if faults := faults_of_place(folder, SIMULATION, [SETTINGS] if is_a_persons else []):
        raise ConfigError(faults)


def _is_effective(folder: Path) -> bool:
    """Return whether the TOML in a folder is exactly the printed settings of a simulation."""
    try:
        text = (folder / SETTINGS).read_text(encoding="utf-8")
        return effective(load_text(SimulationFile, text, name=SETTINGS)) == text
    except (ConfigError, ValueError, OSError):
        return False


def _check_rounds(file: SimulationFile, folder: Path, before: int, ends: Differences) -> None:
    snapshot = SnapshotFile(folder, time.monotonic).load()
    if snapshot and (faults := [*faults_of_rounds(snapshot.ledger, before, file.run, ends)]):
        there = f"{folder}: the run there cannot have {count_of(file.rounds, 'round')}"
        raise ConfigError([f"{there}: {fault}; choose another --out" for fault in faults])


def _settings_of(folder: Path) -> Json:
    """Return the decisive settings of the run in a folder.

    A setting that is newer than the run has its default. A removed setting is compared as written.
    """
    try:
        text = (folder / SETTINGS).read_text(encoding="utf-8")
        with suppress(ConfigError):
            text = effective(load_text(SimulationFile, text, name=SETTINGS))
        return _decisive(text)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError([f"{folder / SETTINGS}: is damaged: {error}; restore it, or choose another --out"]) from error


def _decisive(text: str) -> Json:
    """Return the settings on which decisions depend, by their full names; schedules with the round of their end."""
    decisive = tomllib.loads(text)
    for schedule in [each for schedules in decisive.get("schedule", {}).values() for each in schedules.values()]:
        if schedule["kind"] in BOUNDED:
            schedule.setdefault("rounds", decisive["rounds"])
    return {
        key: json.dumps(value, default=str)
        for key, value in flat(decisive).items()
        if key == NOISE_COHORT or not key.startswith(MAY_DIFFER)
    }
