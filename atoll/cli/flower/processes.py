"""A run of a Flower app by processes on this machine: a coordinator, and an agent for each client."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from atoll.cli.command import if_stopped
from atoll.cli.log import message_of
from atoll.cli.printing import note, say
from atoll.flower.task import NODES
from atoll.ground.durable import write_private
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError, RunFailed, TaskFailed, raised
from atoll.operations.load import load_app
from atoll.protocol.settings import effective
from atoll.server.config.run import RunFile

START_S, END_S, POLL_S = 600.0, 10.0, 0.05
"""Seconds until the coordinator listens, its task loaded, until the agents have ended after it, and between looks."""

SIGNALLED = 128
"""Exit codes of processes that a signal has ended begin here, or are negative."""


def run_app(
    reference: str, overrides: Sequence[str], *, nodes: int | None, out: Path | None, again: bool = False
) -> int:
    """Run an app to the end of its main(), and return the exit code of the coordinator.

    Args:
        reference: the reference of the app.
        overrides: `key=value`.
        nodes: the number of clients; None: the project's, or as many as a round needs.
        out: the folder of the run.
        again: start a new run in the folder, where one with the same settings has ended.

    Raises:
        CommandError: the app's description or settings are wrong, or its coordinator does not start.
        TaskFailed: an agent cannot use the app, or its main() fails after the last round.
        RunFailed: a signal has ended the coordinator.
    """
    here = ["coordinator.listen=127.0.0.1:0", *overrides]
    file, app = load_app(reference, here, RunFile, nodes=nodes)
    if file.program.main and not (nodes or app.num_supernodes):
        nodes = NODES  # as in a simulation: main() alone knows how many it waits for
        file, app = load_app(reference, here, RunFile, nodes=nodes)
    folder = (out or Path(f"atoll-flower-{file.name}")).absolute()
    needed = max(file.round.cohort_size, file.round.min_available)
    number = nodes or app.num_supernodes or needed
    if number < needed and not file.program.main:
        raise CommandError(
            f"--nodes: got {number}; allowed: at least {needed}, the clients without which no round begins"
        )
    if not file.program.main and "first_available" not in file.round.model_fields_set:  # all of them start now
        file = file.model_copy(update={"round": file.round.model_copy(update={"first_available": number})})
    folder.mkdir(parents=True, exist_ok=True)
    write_private(folder / "run.toml", effective(file, whole=True).encode())  # its coordinator tells a person
    if_stopped("before the run had ended; the same command resumes it")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        state = folder / "coordinator"
        anew = ["--again"] if again else []
        coordinator = _started("coordinator", folder / "run.toml", "--state", state, "--insecure", *anew)
        processes.append(coordinator)
        if address := _address(coordinator, state):
            processes += (_agent(reference, folder, address, place, number) for place in range(number))
            their = f"their logs are in {folder}, what their apps print in node-N/worker.*.log there"
            note(f"{count_of(number, 'client')}, each an agent; {their}")
        code = _waited(coordinator, processes[1:], folder)
    finally:
        _end(processes)
    of_main = {"app": "worker.log", "program": "program.log"}  # natively, over messages
    for run in sorted(path for name in of_main for path in (folder / "coordinator" / "runs").glob(f"*/{name}")):
        say(f"the files of main() are in {run}, its output in {run.parent / of_main[run.name]}")
    if failure := _failure_of_main(state):
        raise TaskFailed(f"the run has finished, and then main() failed: {raised(failure)}")
    if code < 0:
        raise RunFailed(f"{signal.Signals(-code).name} ended the coordinator: the same command resumes the run")
    return code


def _waited(coordinator: "subprocess.Popen[bytes]", agents: "Sequence[subprocess.Popen[bytes]]", folder: Path) -> int:
    """Wait for the coordinator, and return its exit code.

    Raises:
        TaskFailed: an agent has failed before it; the run continues without a killed one.
    """
    while (code := coordinator.poll()) is None:
        for place, agent in enumerate(agents):
            if 0 < (agent.poll() or 0) < SIGNALLED:
                log = folder / f"node-{place}.log"
                *_, told = "", *log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                why = message_of(told, f"node-{place}")
                raise TaskFailed(f"node-{place} cannot take part: {why} (its log is {log})")
        time.sleep(POLL_S)
    return code


def _failure_of_main(state: Path) -> str:
    """Return why the `main()` of the newest native run failed after its last round; empty: it did not."""
    ends = sorted(state.glob("runs/*/app.concluded"), key=lambda file: file.stat().st_mtime)
    return ends[-1].read_text(encoding="utf-8") if ends else ""


def _started(*command: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "atoll", *map(str, command)], stdin=subprocess.DEVNULL)


def _agent(reference: str, folder: Path, address: str, place: int, number: int) -> "subprocess.Popen[bytes]":
    name = f"node-{place}"
    given = {"task.partition-id": place, "task.num-partitions": number, "exit_when_done": "true"}
    overrides = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    command = ["agent", reference, "--site", name, "--insecure", "--coordinator", address, *overrides]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "atoll", *command, "--state", str(folder / name)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _address(coordinator: "subprocess.Popen[bytes]", state: Path) -> str:
    """Wait until the coordinator listens, and return its address; empty: its run has ended before.

    Raises:
        CommandError: it has ended, or does not listen in time.
    """
    from atoll.server.journal.holder import running_coordinator

    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if (running := running_coordinator(state)) is not None and running.pid == coordinator.pid:
            return running.address
        if (code := coordinator.poll()) is not None:
            if code:
                raise CommandError("the coordinator has ended before it listened")
            return ""
        time.sleep(POLL_S)
    raise CommandError(f"the coordinator did not listen within {START_S:g} s")


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End all processes, and kill those that do not exit in time."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
