"""A run of a Flower app by processes on this machine: a coordinator, and an agent for each client."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from atoll.aggregation.printable import count_of
from atoll.cli.faults import CommandError
from atoll.cli.files import load_app
from atoll.cli.printing import note, say
from atoll.protocol.settings import effective
from atoll.server.config.run import RunFile

START_S, END_S = 600.0, 10.0
"""Seconds until the coordinator listens, its task loaded, and until the agents have ended after it."""


def run_app(reference: str, overrides: Sequence[str], *, nodes: int | None, out: Path | None) -> int:
    """Run an app to the end of its main(), and return the exit code of the coordinator.

    Args:
        reference: of the app.
        overrides: `key=value`.
        nodes: the number of clients; None: that of the project, or as many as a round needs.
        out: the folder of the run.

    Raises:
        CommandError: the app cannot run natively, or its coordinator does not start.
    """
    here = ["coordinator.listen=127.0.0.1:0", *overrides]
    file, app = load_app(reference, here, RunFile, nodes=nodes)
    folder = (out or Path(f"atoll-flower-{file.name}")).absolute()
    number = nodes or app.num_supernodes or max(file.round.cohort_size, file.round.min_available)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(effective(file), encoding="utf-8")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        state = folder / "coordinator"
        coordinator = _started("coordinator", folder / "run.toml", "--state", state, "--insecure")
        processes.append(coordinator)
        address = _address(coordinator, state)
        processes += (_agent(reference, folder, address, place, number) for place in range(number))
        note(f"{count_of(number, 'client')}, each an agent; their logs are in {folder}")
        code = coordinator.wait()
    finally:
        _end(processes)
    for run in sorted((folder / "coordinator" / "runs").glob("*/app")):
        say(f"the files of main() are in {run}, its output in {run.parent / 'worker.log'}")
    return code


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
    """Return the address of the coordinator as soon as it listens.

    Raises:
        CommandError: it has ended, or does not listen in time.
    """
    from atoll.server.journal.holder import running_coordinator

    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if (running := running_coordinator(state)) is not None and running.pid == coordinator.pid:
            return running.address
        if coordinator.poll() is not None:
            raise CommandError("the coordinator has ended before it listened")
        time.sleep(0.05)
    raise CommandError(f"the coordinator did not listen within {START_S:g} s")


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End all processes, in order if they obey in time."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
