"""`atoll simulate`: simulate a whole federation on this machine, under virtual time."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from atoll.cli import options
from atoll.cli.command import if_stopped
from atoll.cli.printing import as_json, best_text, note, say, say_settings, seconds
from atoll.cli.requested import requested
from atoll.cli.runs.sites import say_sites
from atoll.ground.printable import count_of, printable_size
from atoll.ground.process.loading import loading
from atoll.operations.faults import CommandError
from atoll.operations.requests import SimulateRequest
from atoll.protocol.signals import ExitCode

if TYPE_CHECKING:
    from atoll.simulations.federation.config import SimulationFile
    from atoll.simulations.federation.report import Json
    from atoll.task.array_task import ArrayTask
    from atoll.task.task import Task

Sites = Annotated[
    bool, typer.Option("--sites", help="Also print the metrics of each site, by its newest evaluation and training.")
]


@requested(SimulateRequest)
def simulate(
    request: SimulateRequest, sites: Sites = False, check: options.Check = False, json: options.Json = False
) -> None:
    """Simulate a federation: the state machines of coordinator and clients, real training, virtual time.

    An interrupted run resumes from the end of its last round. Exit code 1: the run failed; 2: a mistake in the
    arguments, settings or task; 130: Ctrl-C or SIGTERM.
    """
    from atoll.simulations.populations.opened_files import OPENED

    OPENED.watch()  # before the task's file is imported, which may read data
    simulate_as_asked(request, sites=sites, check=check, json=json)


def simulate_as_asked(
    request: SimulateRequest, *, sites: bool = False, check: bool = False, json: bool = False
) -> NoReturn:
    """Simulate a run, print its result, and exit with its code.

    Args:
        request: the request.
        sites: print the metrics of each site, too.
        check: check everything, print the effective settings, and run nothing.
        json: print JSON.

    Raises:
        typer.Exit: with the exit code.
        ConfigError: all mistakes in the settings.
        CommandError: the task cannot be loaded, or fails.
    """
    if_stopped("before a round began; nothing was written")
    with loading():
        from atoll.operations.simulate import check_simulation, run_messages, with_task
        from atoll.protocol.settings import effective
        from atoll.simulations.experiments.lifeline import end_with_the_sweep

    end_with_the_sweep()
    file, task = with_task(request)
    if file.run.is_of_messages:
        given = {"--rounds": request.rounds is not None, "--export": bool(request.exports), "--sites": sites}
        if of_rounds := [name for name, is_given in given.items() if is_given]:
            raise CommandError(f"a run of messages (program.main) has no rounds: leave out {', '.join(of_rounds)}")
    if check:
        for line in check_simulation(file, task):
            note(line)
        say_settings(effective(file), json=json)
        raise typer.Exit
    folder = request.folder(file)
    if file.run.is_of_messages:
        result = run_messages(file, task, folder, is_fresh=request.fresh)
        if json:
            as_json(result)
        else:
            _say_messages(result, folder)
    else:
        result = _simulate_rounds(file, task, request, sites=sites, json=json)
    raise typer.Exit({"finished": ExitCode.OK, "interrupted": ExitCode.STOPPED}.get(result["state"], ExitCode.FAILED))


def _simulate_rounds(
    file: "SimulationFile", task: "Task | ArrayTask", request: SimulateRequest, *, sites: bool, json: bool
) -> "Json":
    """Simulate a run of rounds, print its result, and return it."""
    from atoll.cli.experiments.simulation_progress import RoundProgress
    from atoll.exports.folders import SimulatedFolder
    from atoll.ground.process.heap import keep_freed_blocks
    from atoll.operations.exports import live_export
    from atoll.operations.simulate import run_simulation
    from atoll.parallel.trainer.logs import to_all

    folder = request.folder(file)
    if_stopped("before a round began; the same command resumes it")
    exports = live_export(request.exports, SimulatedFolder(folder.absolute()), folder.absolute())  # the task may change
    keep_freed_blocks()
    with RoundProgress(sys.stderr, note, rounds=file.rounds) as progress, exports:
        report = to_all(progress.round, exports.take)
        result = run_simulation(file, task, folder, report, is_fresh=request.fresh)
    if_stopped("")
    measured = _sites_of(folder) if sites else {}
    if json:
        as_json(result | ({"sites": measured} if measured else {}))
    else:
        _say_result(result, folder, progress.faults)
        for kind, part in measured.items():
            say_sites(f"{kind}, version {part['version']}", part)
    return result


def _say_messages(result: Mapping[str, Any], folder: Path) -> None:
    """Print the result of a simulated run of messages."""
    cause = result["cause"] or "the same command resumes it"
    say(f"{result['state']}: {cause}; {seconds(result['virtual_s'])} of virtual time in {seconds(result['real_s'])}")
    say(
        f"{count_of(result['answers'], 'answer')} by the {result['engine']} engine; "
        f"{printable_size(result['bytes_down'])} down, {printable_size(result['bytes_up'])} up"
    )
    if repeated := result["repeated"]:
        say(f"{count_of(repeated, 'answer')} of them from the record of the interrupted run")
    say(f"the files of main() are in {folder / 'program'}, its output in {folder / 'program.log'}")


def _sites_of(folder: Path) -> dict[str, Any]:
    """Return the metrics of the sites by evaluation and training, where there are any."""
    from atoll.simulations.experiments.report import read_run
    from atoll.simulations.experiments.sites import sites

    return {kind: part for kind, part in sites(read_run(folder).rounds).items() if part["sites"]}


def _of_invitations(account: Mapping[str, int]) -> str:
    """Return the account of an asynchronous run's invitations in words, with the dropped ones."""
    invited, dropped = account.get("invited", 0), account.get("too_old", 0)
    share = f" ({100 * dropped / invited:.3g} %)" if invited else ""
    return (
        f"{count_of(invited, 'invitation')}, {account.get('reported', 0)} reported, {dropped} dropped as too old{share}"
    )


def _say_result(result: dict[str, Any], folder: Path, faults: Sequence[str]) -> None:
    from atoll.simulations.federation.app import APP

    say(
        f"{result['state']}: {result['cause'] or 'rounds are left'}; version {result['version']} after "
        f"{count_of(result['rounds'], 'round')}, {seconds(result['virtual_s'])} of virtual time in "
        f"{seconds(result['real_s'])}"
    )
    say(
        f"{count_of(result['trainings'], 'training')} by the {result['engine']} engine; "
        f"{printable_size(result['bytes_down'])} down, {printable_size(result['bytes_up'])} up"
    )
    if best := result.get("best"):
        say(best_text(best))
    if account := result.get("privacy"):
        say(account["sentence"])
    for sentence in result.get("undecided", ()):
        say(sentence)
    if account := result.get("invitations"):
        say(_of_invitations(account))
    if (folder / APP).is_dir():
        say(f"the files of main() are in {folder / APP}")
    for fault in faults:
        say(f"{fault} (all of them: {folder / 'rounds.jsonl'})")
    if result["state"] == "interrupted":
        say(f"the same command resumes the run: {folder}")
    else:
        say(f"everything is in {folder}")
