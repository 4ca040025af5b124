"""The commands of a page, executed by real processes in a folder: those that end in order, the services beside them.

A command that does not end by itself (`atoll coordinator`, `agent`, `aggregator`, `authority serve`) is a *service*:
it runs beside what follows, from the first line that its table names, until the page ends or another coordinator
begins. `&`, `;`, loops and `$(...)` are bash's.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

READY = {
    "coordinator": r" atoll coordinator on ",
    "agent": r": (connected|enrolled|joined)|connected to ",
    "aggregator": r" atoll aggregator, rank ",
    "authority serve": r"connected|serving",
}
"""The services, each with a line that it has written when the next command may follow."""

SHIMS = {
    # The pages name the port of the defaults; tests beside each other cannot all have it.
    "atoll": """case "$1" in
  coordinator) set -- "$@" --set "coordinator.listen=$ADDRESS" --set coordinator.enrol=127.0.0.1:0 ;;
esac
exec "$BIN/atoll" "$@"
""",
    "make": 'exec /usr/bin/make -n -C "$ROOT" "$@"\n',  # `make test` would run this test: its target must be there
    "python": 'exec "$BIN/python" "$@"\n',
    "torchrun": 'exec "$BIN/torchrun" --master-port "${ADDRESS##*:}" "$@"\n',
}


class CommandFailed(AssertionError):
    """A command of a page that ended otherwise than the page says, with its place and its output."""


@dataclass
class Shell:
    """A folder in which the commands of one page run, one after another.

    Attributes:
        folder: the working directory of each command.
        address: HOST:PORT of the coordinators that it starts.
        variables: environment variables, which `export NAME=VALUE` of a page changes.
        bound_s: seconds in which a command must end, or serve.
    """

    folder: Path
    address: str
    variables: dict[str, str] = field(default_factory=dict)
    bound_s: float = BOUND_S
    services: "list[tuple[str, subprocess.Popen[bytes], Path]]" = field(default_factory=list)
    output: str = ""

    def run(self, line: str, place: str, code: int = 0) -> None:
        """Run a line to its end, or start it if it is a service, and wait until it serves.

        Raises:
            CommandFailed: it ends with another exit code, or does not end, or a service ends early or never serves.
        """
        if found := re.fullmatch(r"export (\w+)=(\S*)", line):
            self.variables[found[1]] = os.environ.get(found[1], "") if found[2] == "..." else found[2]
        elif (kind := service_of(line)) is None or code:
            self._run_to_its_end(line, place, code)
        else:
            if kind == "coordinator":
                self.stop()
            self._serve(kind, line, place)

    def _run_to_its_end(self, line: str, place: str, code: int) -> None:
        log = self._new_log()
        process = self._start(line, log)
        try:
            ended_with = process.wait(self.bound_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise CommandFailed(f"{place}: {line}\ndoes not end:\n{_read(log)}") from None
        self.output += _read(log)
        if ended_with != code:
            raise CommandFailed(f"{place}: {line}\nended with {ended_with}, not {code}:\n{_read(log)}")

    def _serve(self, kind: str, line: str, place: str) -> None:
        log = self._new_log()
        process = self._start(line, log)
        self.services.append((line, process, log))
        until = time.monotonic() + self.bound_s
        while process.poll() is None and not re.search(READY[kind], _read(log), re.MULTILINE):
            if time.monotonic() > until:
                raise CommandFailed(f"{place}: {line}\nnever serves:\n{_read(log)}")
            time.sleep(0.05)
        if process.poll() not in (None, 0):
            raise CommandFailed(f"{place}: {line}\nended with {process.returncode}:\n{_read(log)}")

    def _new_log(self) -> Path:
        logs = self.folder / ".logs"
        logs.mkdir(exist_ok=True)
        return logs / str(len(list(logs.iterdir())))

    def _start(self, line: str, log: Path) -> "subprocess.Popen[bytes]":
        shims = self.folder / ".bin"
        if not shims.exists():
            shims.mkdir()
            for name, text in SHIMS.items():
                (shims / name).write_text(f"#!/usr/bin/env bash\n{text}")
                (shims / name).chmod(0o755)
        environment = {
            **os.environ,
            "PATH": f"{shims}:{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),  # for `python -m examples.NAME`, which a reader starts in the checkout
            "ADDRESS": self.address,
            "BIN": str(BIN),
            "ROOT": str(ROOT),
            "ATOLL_IDENTITY": str(self.folder / "me"),
            **self.variables,
        }
        with log.open("wb") as output:
            return subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", line],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End the services in the opposite order of their start, as Ctrl-C does.

        Raises:
            CommandFailed: a service writes a traceback.
        """
        while self.services:
            line, process, log = self.services.pop()
            _signal(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.bound_s)
            _kill(process)
            self.output += _read(log)
            if "Traceback" in _read(log):
                raise CommandFailed(f"{line}\nends with a traceback:\n{_read(log)}")

    def kill(self) -> None:
        """End every service at once."""
        for _, process, _ in self.services:
            _kill(process)
        self.services.clear()


def lines_of(script: str) -> list[str]:
    """Return the commands of a block: lines that continue and loops are one, comments and prompts are left out."""
    found: list[str] = []
    rest = ""
    for line in script.replace("\\\n", " ").splitlines():
        if script.lstrip().startswith("$ ") and not line.startswith("$ "):
            continue  # the output under a prompt
        text = re.sub(r"(^|\s)#\s.*", "", line.removeprefix("$ ")).strip()
        if not text:
            continue
        rest = f"{rest}\n{text}" if rest else text
        if rest.count("for ") == len(re.findall(r"(?:^|\s)done\b", rest)):
            found.append(rest)
            rest = ""
    return found + ([rest] if rest else [])


def service_of(line: str) -> str | None:
    """Return which service a line starts and leaves running; None: the line ends by itself."""
    if re.search(r"--(check|help|version)\b", line) or line.startswith("for "):
        return None
    found = re.match(r"(?:\w+=\S+ )*atoll (coordinator|agent|aggregator|authority serve)\b", line)
    return found[1] if found else None


def _read(log: Path) -> str:
    return log.read_text("utf-8", "replace")


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)  # the session of the process, and nothing else


def _kill(process: "subprocess.Popen[bytes]") -> None:
    _signal(process, signal.SIGKILL)
    process.wait()
