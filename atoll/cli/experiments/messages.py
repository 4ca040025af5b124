"""The simulation of a run of messages: its exchanges as they close, and its result."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.aggregation.printable import count_of, printable_size
from atoll.cli.printing import note, say, seconds

if TYPE_CHECKING:
    from atoll.parallel.task.array_task import ArrayTask
    from atoll.parallel.task.task import Task
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.report import Json
    from atoll.simulations.messages.federation import MessageFederation


def run_messages(
    file: "SimulationFile",
    task: "Task | ArrayTask",
    folder: Path,
    *,
    is_fresh: bool = False,
    handling: "Callable[[MessageFederation], AbstractContextManager[None]]",
) -> "Json":
    """Simulate a run of messages in its folder, note each exchange, and return the result.

    Args:
        file: the settings.
        task: the task that they name.
        folder: the folder of the run.
        is_fresh: refuse a folder that has an interrupted run.
        handling: what surrounds the run, such as the handling of signals.

    Raises:
        ConfigError: all faults of the settings, the task or the folder, before anything runs.
        CommandError: a worker process has failed.
    """
    from atoll.cli.task_failures import task_failures_in_one_line
    from atoll.simulations.messages.run import opened

    with (
        task_failures_in_one_line(),
        opened(
            file, task, folder, on_exchange=lambda line: note(line["sentence"]), is_fresh=is_fresh, tell=note
        ) as federation,
        handling(federation),
    ):
        return federation.run()


def say_messages(result: Mapping[str, Any], folder: Path) -> None:
    """Print the result of a simulated run of messages."""
    cause = result["cause"] or "the same command goes on"
    say(f"{result['state']}: {cause}; {seconds(result['virtual_s'])} of virtual time in {seconds(result['real_s'])}")
    say(
        f"{count_of(result['answers'], 'answer')} by the {result['engine']} engine; "
        f"{printable_size(result['bytes_down'])} down, {printable_size(result['bytes_up'])} up"
    )
    if repeated := result["repeated"]:
        say(f"{count_of(repeated, 'answer')} of them from the record of the interrupted run")
    say(f"the files of main() are in {folder / 'program'}, its output in {folder / 'program.log'}")
