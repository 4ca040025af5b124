"""The course of a demo whose processes are killed: its lines, the records that it reads, its limit of time, its end."""

import argparse
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rich.console import Console

from atoll.protocol.vocabulary import RunState
from atoll.server.rounds.record import RoundRecord
from atoll.server.views.history import History
from examples.demo import Processes


@dataclass
class Course(ABC):
    """The course of a demo; each demo says what happens (`run`), what it prints (`show`) and promises (`broken`)."""

    limit_s: ClassVar[float]
    processes: Processes
    console: Console
    begun: float = field(default_factory=time.monotonic)
    records: list[RoundRecord] = field(default_factory=list)
    state: RunState = RunState.QUEUED
    cause: str = ""
    loss: dict[int, float] = field(default_factory=dict)
    """The loss of each version, over all sites."""

    @abstractmethod
    def run(self) -> None:
        """Run the federation to its end, with all that happens on the way."""

    @abstractmethod
    def show(self) -> None:
        """Print the tables of the end."""

    @abstractmethod
    def broken(self) -> list[str]:
        """Return the promises that are broken."""

    def say(self, text: str) -> None:
        """Print a line, with the seconds since the start."""
        self.console.print(
            f"{time.monotonic() - self.begun:5.1f} s  {text}", soft_wrap=True, highlight=False, markup=False
        )

    def read(self, name: str) -> None:
        """Read the records of a run, with or without a running coordinator."""
        with suppress(OSError, LookupError):
            history = History(self.processes.state)
            run = history.run(name)
            self.records, self.state, self.cause = history.rounds(run.run_id), run.state, run.cause
            for row in history.evaluations(run.run_id):
                if row.statistics:
                    total, count = row.statistics["loss"]
                    self.loss[row.version] = total / count

    def wait(self, seconds: float = 0.1) -> None:
        """Wait, and end the demo if a process has failed or the time is over."""
        self.processes.check()
        if time.monotonic() - self.begun > self.limit_s:
            raise SystemExit(
                f"the demo has taken more than {self.limit_s:g} s: see the logs in {self.processes.folder}"
            )
        time.sleep(seconds)


def conduct(prog: str, what: str, make: Callable[[Path, Console], Course], *, width: int, kept: str) -> int:
    """Run a demo by its command line, and return the exit code.

    Args:
        prog: the command.
        what: the demo in one line.
        make: returns the demo in a folder that is empty.
        width: of the output, where it is no terminal [columns].
        kept: the last line, if every promise was kept.
    """
    parser = argparse.ArgumentParser(prog=prog, description=what)
    help_ = "the folder to write; an older one is deleted"
    parser.add_argument("--out", type=Path, default=Path("demo-run"), help=help_)
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    demo = make(out.resolve(), Console(width=None if sys.stdout.isatty() else width))
    try:
        demo.run()
        demo.show()
        faults = demo.broken()
    finally:
        demo.processes.stop()
    for fault in faults:
        demo.console.print(f"[red]promise broken:[/red] {fault}")
    if not faults:
        demo.say(kept)
    return 1 if faults else 0
