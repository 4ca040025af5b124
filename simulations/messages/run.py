"""One simulated run of messages in its folder, from its settings to its result."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from atoll.ground.durable import write_atomically
from atoll.protocol.settings import ConfigError, effective, or_faults
from atoll.server.journal.holder import lock_directory
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.report import RESULT, ROUNDS, SETTINGS, Json
from atoll.simulations.federation.run import check_place, differing
from atoll.simulations.federation.seal import unseal
from atoll.simulations.federation.setting import as_given, populated
from atoll.simulations.messages.federation import EXCHANGES, REPLIES, TEMPORARY, MessageFederation, MessageSetting
from atoll.task.apps import AppTask
from atoll.task.array_task import ArrayTask
from atoll.task.task import Task

OF_THE_PROGRAM = "program"
"""Folder of the program's files, beside its log."""


@contextmanager
def opened(
    file: SimulationFile,
    task: Task | ArrayTask,
    folder: Path,
    *,
    on_exchange: Callable[[Json], None] = lambda line: None,
    is_fresh: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[MessageFederation]:
    """Open a federation that is ready to run.

    An interrupted run in the same folder resumes if its settings are the same: its program runs again from its first
    line, and is answered from the record. With other settings it starts again.

    Args:
        file: the settings.
        task: the task that they name.
        folder: the folder of the run.
        on_exchange: a callback for each exchange's line.
        is_fresh: whether to refuse a folder with an interrupted run, too.
        tell: a callback for notes to the operator.

    Raises:
        ConfigError: all faults of the settings, the task or the folder.
        WorkerDied: a process of the engine could not start.
    """
    _check_folder(folder, is_fresh=is_fresh)  # its faults name the folder as given
    folder = folder.absolute()  # the task's code may change the current folder
    setting = setting_of(file, task)
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(folder)
    try:
        for name in (*TEMPORARY, OF_THE_PROGRAM, *_answers_of_another(file, folder, tell)):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / f"{OF_THE_PROGRAM}.log").unlink(missing_ok=True)
        unseal(folder)
        write_atomically(folder / SETTINGS, effective(file).encode())
        with chdir(os.curdir), MessageFederation(setting, folder, on_exchange=on_exchange, tell=tell) as federation:
            yield federation
    finally:
        os.close(lock)


def _answers_of_another(file: SimulationFile, folder: Path, tell: Callable[[str], None]) -> list[str]:
    """Return the folder of the answers if they belong to a run with other settings, and report which run resumes."""
    if not (folder / EXCHANGES).exists():
        return [REPLIES]
    if changed := differing(file, folder):
        tell(f"the run in {folder} was interrupted and had other settings ({', '.join(changed)}): it starts again")
        return [REPLIES]
    tell(f"the run in {folder} was interrupted: its program runs again, and gets the answers that it had")
    return []


def setting_of(file: SimulationFile, task: Task | ArrayTask) -> MessageSetting:
    """Build and check all parts that the settings name, before the program starts.

    Raises:
        ConfigError: all faults, such as a task that answers no messages, or more clients to wait for than there are.
    """
    faults = [*_faults_of(file, task)]
    given = or_faults(lambda: as_given(file, task), faults)
    found = or_faults(lambda: populated(file, given), faults) if given is not None and not faults else None
    num_examples = {} if found is None else found[1]
    fleet = or_faults(lambda: file.devices.of([str(name) for name in num_examples], seed=file.seed), faults)
    wanted, have = file.round.min_available, len(num_examples)
    if found is not None and wanted > have:
        faults.append(f"round.min_available: got {wanted}; allowed: at most {have}, the number of clients")
    if faults or found is None or fleet is None:
        raise ConfigError(list(dict.fromkeys(faults)))
    simulated = found[0]
    assert not isinstance(simulated, Task)  # `_faults_of` refuses it
    return MessageSetting(
        config=file.run,
        task=simulated,
        num_examples=num_examples,
        fleet=fleet,
        simulation=file.simulation,
        lease=file.coordinator.lease,
    )


def _faults_of(file: SimulationFile, task: Task | ArrayTask) -> Iterator[str]:
    if isinstance(task, Task) or not (isinstance(task, AppTask) or hasattr(task, "message")):
        yield f"{file.task}: answers no messages: program.main needs a Flower app, or an ArrayTask with `message`"
    if file.simulation.engine not in ("auto", "sequential", "processes"):
        what = f'simulation.engine: got "{file.simulation.engine}", which trains models'
        yield f'{what}; allowed in a run of messages: "sequential" (which "auto" is), "processes"'
    if file.simulation.device != "cpu":
        yield f'simulation.device: got "{file.simulation.device}"; allowed in a run of messages: "cpu"'
    if file.attack.kind != "none":
        what = f"attack.kind: got {file.attack.kind!r}, which changes updates of a model"
        yield f"{what}; allowed in a run of messages: none"


def _check_folder(folder: Path, *, is_fresh: bool) -> None:
    """Check that a folder has no run, or only an interrupted run of messages.

    Raises:
        ConfigError: it has another run.
    """
    another = "choose another --out, or delete it"
    check_place(folder)
    if (folder / ROUNDS).exists():
        raise ConfigError([f"{folder}: there is a run of rounds already; {another}"])
    if not (folder / EXCHANGES).exists():
        return
    try:
        state = json.loads((folder / RESULT).read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError, TypeError):
        state = "interrupted"  # it was killed before it had a result
    if is_fresh or state != "interrupted":
        raise ConfigError([f"{folder}: there is a run already, which is {state}; {another}"])
