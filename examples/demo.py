"""`make demo`: a federation of real processes on this machine, in which processes are killed and no update is lost.

A coordinator and five agents run as separate processes, connected by mutual TLS; each agent enrols with a join code.
One agent is a straggler, and one is killed and restarted. The coordinator is killed (SIGKILL) while it has accepted
updates of an open round and another update is partly uploaded; after its restart the run continues in the same round.
With --no-chaos no process is killed.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from atoll.operations import admin
from atoll.protocol.identity.names import Role
from atoll.protocol.vocabulary import Fate, Phase, RunState
from atoll.server.rounds.record import ClientRecord, RoundRecord
from atoll.server.views.history import History

HERE = Path(__file__).parent
ATOLL = str(Path(sys.executable).with_name("atoll"))
SITES = ["north", "south", "east", "west", "harbor"]
STRAGGLER, VICTIM, SLOW_LINE = "harbor", "south", "east"
KILL_AGENT_IN, KILL_COORDINATOR_IN = 3, 6
UPLOAD_LIMIT = 700_000  # bytes per second of the agent with the slow line
LIMIT_S = 150.0
LEGEND = "harbor(35%): the client stopped before the deadline after 35 % of its steps, and sent a partial update"


@dataclass
class Processes:
    """The coordinator and the agents, each with its log."""

    folder: Path
    address: str
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        """The state directory of the coordinator."""
        return self.folder / "coordinator"

    def start(self, name: str, *command: str, **environment: str) -> None:
        """Start one process; its output goes to <name>.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [ATOLL, *command], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
            )

    @property
    def ports(self) -> tuple[str, ...]:
        """The settings of the coordinator's ports."""
        return "--set", f"coordinator.listen={self.address}", "--set", "coordinator.enrol=127.0.0.1:0"

    def start_coordinator(self) -> None:
        """Start the coordinator, or restart it: its state directory has the run."""
        self.start("coordinator", "coordinator", str(HERE / "demo.toml"), "--state", str(self.state), *self.ports)

    def invite(self, site: str) -> str:
        """Return a join code, as `atoll client invite` prints it."""
        return admin.invite(self.state, Role.CLIENT, site, lifetime_s=LIMIT_S).join_code

    def start_agent(self, site: str, *join: str) -> None:
        """Start the agent of a site; `join` has the join code for its first start."""
        limit = ["--set", f"upload_limit={UPLOAD_LIMIT}"] if site == SLOW_LINE else []
        environment = {"ATOLL_DEMO_SLOW_S": "0.2"} if site == STRAGGLER else {}
        self.start(
            site,
            *("agent", str(HERE / "digits.py:task"), "--site", site, *join),
            *("--state", str(self.folder / site), "--set", "exit_when_done=true", "--set", "threads=1"),
            *("--set", "reconnect_max=1.0", *limit),
            **environment,
        )

    def check(self) -> None:
        """Check that no process has ended with an error.

        Raises:
            SystemExit: one has; with the end of its log.
        """
        for name, process in self.running.items():
            if process.poll() not in (None, 0, -signal.SIGKILL):
                tail = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
                raise SystemExit(f"{name} ended with exit code {process.returncode}:\n" + "\n".join(tail))

    def kill(self, name: str) -> None:
        """Send SIGKILL, which leaves the process no time to flush anything, and wait for its end."""
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def stop(self) -> None:
        """End all processes by SIGTERM, and after 5 s by SIGKILL."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()


@dataclass
class Display:
    """The rounds of the run, read from the state directory, and remarks on what the demo has done."""

    state: Path
    remarks: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    records: list[RoundRecord] = field(default_factory=list)
    accuracy: dict[int, float] = field(default_factory=dict)
    run_state: RunState = RunState.QUEUED
    run_id: str = ""

    def remark(self, text: str) -> None:
        """Add a remark, with the seconds since the start."""
        self.remarks.append(f"{time.monotonic() - self.begun:5.1f} s  {text}")

    def read(self) -> None:
        """Read the state directory, with or without a running coordinator."""
        with suppress(OSError, LookupError):
            history = History(self.state)
            run = history.run("digits")
            self.run_id, self.run_state = run.run_id, run.state
            self.records = history.rounds(run.run_id)
            for row in history.evaluations(run.run_id):
                if row.statistics:
                    correct, count = row.statistics["accuracy"]
                    self.accuracy[row.version] = correct / count

    @property
    def open_round(self) -> RoundRecord | None:
        """The round that is collecting updates, if any."""
        last = self.records[-1] if self.records else None
        return last if last is not None and last.phase is Phase.COLLECTING else None

    def render(self) -> Group:
        """Return the table of rounds with the newest remarks under it."""
        table = Table(title=f"Federation of {len(SITES)} sites ({self.run_state})", title_justify="left")
        for column in ("round", "state", "reported", "late, lost, failed", "accuracy", "seconds"):
            table.add_column(column, justify="right" if column in ("round", "accuracy", "seconds") else "left")
        for record in self.records:
            table.add_row(*_row(record, self.accuracy))
        return Group(table, Text(LEGEND, style="dim"), *(Text(remark) for remark in self.remarks[-12:]))


def _row(record: RoundRecord, accuracy: dict[int, float]) -> tuple[str, ...]:
    reported = " ".join(
        client if c.work >= 1 else f"{client}({c.work:.0%})" for client, c in record.with_fate(Fate.REPORTED)
    )
    carried = " ".join(f"+{c.client_id} of round {c.round_id}" for c in record.carried)
    missing = ", ".join(_missing(client, c) for client, c in _others(record))
    state = str(record.phase) + (" through an outage" if record.outages else "")
    share = f"{accuracy[record.version]:.3f}" if record.version in accuracy else ""
    seconds = f"{record.ended_at - record.drawn_at:.1f}" if record.ended_at and record.drawn_at else ""
    return str(record.round_id), state, f"{reported} {carried}".strip(), missing, share, seconds


def _others(record: RoundRecord) -> Iterator[tuple[str, ClientRecord]]:
    return record.with_fate(*(f for f in Fate if f is not Fate.REPORTED and (f is not Fate.WAITING or record.ended_at)))


def _missing(client: str, record: ClientRecord) -> str:
    was_away = record.disconnected_at is not None or record.num_reconnects > 0
    why = record.reason or ("was disconnected" if was_away else "")
    return f"{client}: {record.fate}" + (f" ({why})" if why else "")


# ---------------------------------------------------------------- the faults


def kill_agent(display: Display, processes: Processes) -> Iterator[None]:
    """Kill an agent in the middle of a round, and restart it after a second; it continues its work on the round."""
    while (record := display.open_round) is None or record.round_id < KILL_AGENT_IN:
        yield
    processes.kill(VICTIM)
    display.remark(f"kill -9 of the agent {VICTIM} in round {record.round_id}")
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        yield
    processes.start_agent(VICTIM)
    display.remark(f"the agent {VICTIM} is restarted: it finds its round, and any finished update, in its spool")


@dataclass
class Outage:
    """The state of the open round when the coordinator was killed, which must survive."""

    round_id: int = 0
    accepted: dict[str, str] = field(default_factory=dict)
    """The digest of each accepted update, by client."""
    uploaded: str = ""
    """The uploaded share of a further update."""


def kill_coordinator(display: Display, processes: Processes, outage: Outage) -> Iterator[None]:
    """Kill the coordinator when it has accepted an update and has received 20 % to 80 % of another one."""
    while True:
        record = display.open_round
        if record is not None and record.round_id >= KILL_COORDINATOR_IN and record.num_reported:
            uploaded = _partly_uploaded(display.state / "runs" / display.run_id / "incoming")
            if uploaded:
                break
        yield
    processes.kill("coordinator")
    display.read()  # only the state on disk survives
    assert display.open_round is not None, "the coordinator was killed too late"
    outage.round_id, outage.uploaded = display.open_round.round_id, uploaded
    outage.accepted = {c: r.digest or "" for c, r in display.open_round.with_fate(Fate.REPORTED)}
    display.remark(
        f"kill -9 of the coordinator in round {outage.round_id}: it had accepted the updates of "
        f"{', '.join(outage.accepted)}, and {uploaded} of another was uploaded"
    )
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        yield
    processes.start_coordinator()
    display.remark("the coordinator is restarted")
    while not (_record(display, outage.round_id) or display.records[-1]).outages:
        yield
    display.remark(f"it continues round {outage.round_id} with the updates of {', '.join(outage.accepted)}")


def _partly_uploaded(incoming: Path) -> str:
    """Return the received share of an update of which 20 % to 80 % are uploaded; empty: there is none."""
    with suppress(OSError):
        whole = (incoming.parent / "versions" / "000000.safetensors").stat().st_size
        for path in incoming.glob("*.bin"):
            share = path.stat().st_size / whole
            if 0.2 < share < 0.8:
                return f"{share:.0%}"
    return ""


def _record(display: Display, round_id: int) -> RoundRecord | None:
    return next((r for r in display.records if r.round_id == round_id), None)


def broken_promises(display: Display, outage: Outage) -> list[str]:
    """Check the demo's promises against the records, and return those that are broken."""
    broken = []
    if display.run_state is not RunState.FINISHED:
        broken.append(f"the run is {display.run_state}, not finished")
    if sum(r.phase is Phase.COMMITTED for r in display.records) < 10:
        broken.append("fewer than ten rounds were committed")
    if outage.round_id:
        record = _record(display, outage.round_id)
        if record is None or record.phase is not Phase.COMMITTED:
            broken.append(f"round {outage.round_id}, in which the coordinator was killed, was not committed")
        elif lost := [c for c, digest in outage.accepted.items() if record.clients[c].digest != digest]:
            broken.append(f"the updates of {', '.join(lost)} were lost with the coordinator")
    return broken


# ---------------------------------------------------------------- the run


def run_federation(
    display: Display, processes: Processes, outage: Outage, *, chaos: bool, show: Callable[[Group], None]
) -> None:
    """Run the federation to its end; with `chaos` the faults happen on the way."""
    processes.start_coordinator()
    display.remark(f"$ atoll coordinator examples/demo.toml --state {processes.state}")
    for site in SITES:
        processes.start_agent(site, "--join", processes.invite(site))
    display.remark(f"$ atoll client invite {SITES[0]} --state {processes.state}")
    display.remark(f"$ atoll agent examples/digits.py:task --site {SITES[0]} --join CODE   # the same at every site")
    display.remark("each site has a certificate now: all connections use mutual TLS")
    display.remark(
        f"a coordinator on {processes.address} and five agents: {STRAGGLER} has a slow disk, {SLOW_LINE} a slow line"
    )
    faults = [kill_agent(display, processes), kill_coordinator(display, processes, outage)] if chaos else []
    while display.run_state in (RunState.QUEUED, RunState.RUNNING):
        if time.monotonic() - display.begun > LIMIT_S:
            display.remark(
                f"the demo has taken more than {LIMIT_S:g} s and is stopped: see the logs in {processes.folder}"
            )
            return
        display.read()
        processes.check()
        faults = [fault for fault in faults if next(fault, "over") != "over"]
        show(display.render())
        time.sleep(0.05)


def conclude(display: Display, console: Console, outage: Outage) -> int:
    """Print the federated and the centralized accuracy, the model's path and broken promises; return the exit code."""
    display.read()
    versions = [r.version for r in display.records if r.version is not None]
    console.print("training the same model centrally on the pooled data, for comparison ...")
    from examples.central import train_centrally
    from examples.digits import task

    central = train_centrally(task, epochs=len(versions) * task.local.epochs, seed=7)
    model = display.state / "runs" / display.run_id / "versions" / f"{max(versions, default=0):06d}.safetensors"
    console.print(
        f"accuracy on the server's test data: federated {display.accuracy.get(max(versions, default=0), 0):.4f}, "
        f"centralized {central:.4f}"
    )
    console.print(f"the model: {model}", soft_wrap=True)
    console.print(
        f"the reason for a round's end: atoll round show {outage.round_id or 1} --state {display.state}", soft_wrap=True
    )
    broken = broken_promises(display, outage)
    for promise in broken:
        console.print(f"[red]promise broken:[/red] {promise}")
    if outage.round_id and not broken:
        console.print(
            f"nothing was lost: round {outage.round_id} was committed with the updates of "
            f"{', '.join(outage.accepted)}, which the coordinator had accepted before it was killed",
            soft_wrap=True,
        )
    return 1 if broken else 0


def free_address() -> str:
    """Return an unused loopback address, which the coordinator has again after its restart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def main() -> int:
    """Run the demo, and return the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-chaos", action="store_true", help="kill no process")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-run"), help="the folder to write; an older one is deleted"
    )
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    console, outage = Console(width=None if sys.stdout.isatty() else 132), Outage()
    display = Display(arguments.out.resolve() / "coordinator")
    processes = Processes(arguments.out.resolve(), free_address())
    try:
        if console.is_terminal:
            with Live(console=console, refresh_per_second=8, vertical_overflow="visible") as live:
                run_federation(display, processes, outage, chaos=not arguments.no_chaos, show=live.update)
                live.update(display.render())
        else:
            printer = _Printer(display, console)
            run_federation(display, processes, outage, chaos=not arguments.no_chaos, show=printer)
            printer.finish()
    finally:
        processes.stop()
    code = conclude(display, console, outage)
    console.print(f"{time.monotonic() - display.begun:.0f} s in all")
    return code


@dataclass
class _Printer:
    """The output without a terminal: a line for each remark and each round that has ended, and never a table of both.

    The line of a round waits for its accuracy, which the coordinator measures after the round has ended.
    """

    display: Display
    console: Console
    num_rounds: int = 0
    num_remarks: int = 0

    def __call__(self, _rendered: Group) -> None:
        """Print what is new."""
        for remark in self.display.remarks[self.num_remarks :]:
            self.console.print(remark, soft_wrap=True)
        self.num_remarks = len(self.display.remarks)
        for record in self.display.records[self.num_rounds :]:
            is_measured = record.version is None or record.version in self.display.accuracy
            if not record.ended_at or not is_measured:
                return
            self._print_round(record)

    def finish(self) -> None:
        """Print what is left at the end of the demo, measured or not, and the meaning of a share of the work."""
        self.display.read()
        self(self.display.render())
        for record in self.display.records[self.num_rounds :]:
            self._print_round(record)
        self.console.print(LEGEND, soft_wrap=True)

    def _print_round(self, record: RoundRecord) -> None:
        number, state, reported, missing, share, seconds = _row(record, self.display.accuracy)
        parts = [f"{state} in {seconds} s" if seconds else state, *([f"accuracy {share}"] if share else [])]
        line = f"         round {number} {', '.join(parts)}: {reported}" + f"; {missing}" * bool(missing)
        self.console.print(line, soft_wrap=True)
        self.num_rounds += 1


if __name__ == "__main__":
    sys.exit(main())
