"""`make demo`: a federation of real processes on this machine, and what it takes for it to lose something.

A coordinator and five agents are started as separate processes; each agent enrols with a join code, and mutual TLS is
between them. One agent is a straggler, one is killed and comes back,
and the coordinator itself is killed (SIGKILL) while it holds accepted updates of an open round and another is half
uploaded; it is started again and the run carries on in the same round. With --no-chaos nobody is killed.
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

from atoll.cli.looking import admin
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


@dataclass
class Processes:
    """The coordinator and the agents, each with its log."""

    folder: Path
    address: str
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        """Of the coordinator."""
        return self.folder / "coordinator"

    def start(self, name: str, *command: str, **environment: str) -> None:
        """Start one process; its output goes to <name>.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [ATOLL, *command], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
            )

    def start_coordinator(self) -> None:
        """Start, or start again: the state directory says which."""
        ports = ("--set", f"coordinator.listen={self.address}", "--set", "coordinator.enrol=127.0.0.1:0")
        self.start("coordinator", "coordinator", str(HERE / "demo.toml"), "--state", str(self.state), *ports)

    def invite(self, site: str) -> str:
        """A join code, as `atoll client invite` prints it."""
        return admin.invite(self.state, Role.CLIENT, site, lifetime_s=LIMIT_S).join_code

    def start_agent(self, site: str, *join: str) -> None:
        """Start the agent of one owner; again, when it is a member already."""
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
        """A process that ends by itself with an error ends the demo, with its last words."""
        for name, process in self.running.items():
            if process.poll() not in (None, 0, -signal.SIGKILL):
                tail = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:]
                raise SystemExit(f"{name} ended with exit code {process.returncode}:\n" + "\n".join(tail))

    def kill(self, name: str) -> None:
        """kill -9, by pid: no time to say goodbye or to flush anything."""
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def stop(self) -> None:
        """Ask everybody to end, then insist."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()


@dataclass
class Scene:
    """What the audience sees: the rounds, and what was done to the actors."""

    state: Path
    remarks: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    records: list[RoundRecord] = field(default_factory=list)
    accuracy: dict[int, float] = field(default_factory=dict)
    run_state: RunState = RunState.QUEUED
    run_id: str = ""

    def remark(self, text: str) -> None:
        """Tell the audience."""
        self.remarks.append(f"{time.monotonic() - self.begun:5.1f} s  {text}")

    def look(self) -> None:
        """Read the state directory, which works whether the coordinator lives or not."""
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
        """The round that is being collected."""
        last = self.records[-1] if self.records else None
        return last if last is not None and last.phase is Phase.COLLECTING else None

    def picture(self) -> Group:
        """The table of rounds, and the remarks under it."""
        table = Table(title=f"Federation of {len(SITES)} owners ({self.run_state})", title_justify="left")
        for column in ("round", "state", "reported", "late, lost, failed", "accuracy", "seconds"):
            table.add_column(column, justify="right" if column in ("round", "accuracy", "seconds") else "left")
        for record in self.records:
            table.add_row(*_row(record, self.accuracy))
        legend = (
            "harbor(35%): it knew the deadline, stopped in time after that share of its steps, and sent what it had"
        )
        return Group(table, Text(legend, style="dim"), *(Text(remark) for remark in self.remarks[-12:]))


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
    why = record.reason or ("was away" if was_away else "")
    return f"{client}: {record.fate}" + (f" ({why})" if why else "")


# ---------------------------------------------------------------- the plot


def kill_agent(scene: Scene, processes: Processes) -> Iterator[None]:
    """Kill an agent in the middle of a round; it comes back after a second and its round is not lost."""
    while (record := scene.open_round) is None or record.round_id < KILL_AGENT_IN:
        yield
    processes.kill(VICTIM)
    scene.remark(f"kill -9 of the agent {VICTIM} in round {record.round_id}")
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        yield
    processes.start_agent(VICTIM)
    scene.remark(f"the agent {VICTIM} is started again: it finds its round, and what it had finished, in its spool")


@dataclass
class Outage:
    """What was true when the coordinator was killed; it must still be true afterwards."""

    round_id: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    half: str = ""


def kill_coordinator(scene: Scene, processes: Processes, outage: Outage) -> Iterator[None]:
    """Kill the coordinator when it holds an accepted update and another is between a fifth and four fifths sent."""
    while True:
        record = scene.open_round
        if record is not None and record.round_id >= KILL_COORDINATOR_IN and record.num_reported:
            half = _half_uploaded(scene.state / "runs" / scene.run_id / "incoming")
            if half:
                break
        yield
    processes.kill("coordinator")
    scene.look()  # what is on disk is what counts
    assert scene.open_round is not None, "the coordinator was killed too late"
    outage.round_id, outage.half = scene.open_round.round_id, half
    outage.kept = {c: r.digest or "" for c, r in scene.open_round.with_fate(Fate.REPORTED)}
    scene.remark(
        f"kill -9 of the coordinator in round {outage.round_id}: it held the updates of {', '.join(outage.kept)}, "
        f"and another was {half} uploaded"
    )
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        yield
    processes.start_coordinator()
    scene.remark("the coordinator is started again")
    while not (_record(scene, outage.round_id) or scene.records[-1]).outages:
        yield
    scene.remark(f"it goes on in round {outage.round_id} with the updates of {', '.join(outage.kept)}")


def _half_uploaded(incoming: Path) -> str:
    with suppress(OSError):
        whole = (incoming.parent / "versions" / "000000.safetensors").stat().st_size
        for path in incoming.glob("*.bin"):
            share = path.stat().st_size / whole
            if 0.2 < share < 0.8:
                return f"{share:.0%}"
    return ""


def _record(scene: Scene, round_id: int) -> RoundRecord | None:
    return next((r for r in scene.records if r.round_id == round_id), None)


def promises_kept(scene: Scene, outage: Outage) -> list[str]:
    """What the demo claims, checked against the records; empty when all of it is true."""
    broken = []
    if scene.run_state is not RunState.FINISHED:
        broken.append(f"the run is {scene.run_state}, not finished")
    if sum(r.phase is Phase.COMMITTED for r in scene.records) < 10:
        broken.append("fewer than ten rounds were committed")
    if outage.round_id:
        record = _record(scene, outage.round_id)
        if record is None or record.phase is not Phase.COMMITTED:
            broken.append(f"round {outage.round_id}, in which the coordinator was killed, was not committed")
        elif lost := [c for c, digest in outage.kept.items() if record.clients[c].digest != digest]:
            broken.append(f"the updates of {', '.join(lost)} were lost with the coordinator")
    return broken


# ---------------------------------------------------------------- the stage


def play(scene: Scene, processes: Processes, outage: Outage, *, chaos: bool, show: Callable[[Group], None]) -> None:
    """Run the federation to its end while the plot unfolds."""
    processes.start_coordinator()
    scene.remark(f"$ atoll coordinator examples/demo.toml --state {processes.state}")
    for site in SITES:
        processes.start_agent(site, "--join", processes.invite(site))
    scene.remark(f"$ atoll client invite {SITES[0]} --state {processes.state}")
    scene.remark(f"$ atoll agent examples/digits.py:task --site {SITES[0]} --join CODE   # and so at every site")
    scene.remark("each owner has a certificate now: all that is said travels over mutual TLS")
    scene.remark(
        f"a coordinator on {processes.address} and five agents: {STRAGGLER} has a slow disk, {SLOW_LINE} a slow line"
    )
    plots = [kill_agent(scene, processes), kill_coordinator(scene, processes, outage)] if chaos else []
    while scene.run_state in (RunState.QUEUED, RunState.RUNNING):
        if time.monotonic() - scene.begun > LIMIT_S:
            scene.remark(
                f"the demo takes more than {LIMIT_S:g} s: something is wrong; see the logs in {processes.folder}"
            )
            return
        scene.look()
        processes.check()
        plots = [plot for plot in plots if next(plot, "over") != "over"]
        show(scene.picture())
        time.sleep(0.05)


def epilogue(scene: Scene, console: Console, outage: Outage) -> int:
    """The accuracy beside the centralized one, where the model lies, and whether the promises were kept."""
    scene.look()
    versions = [r.version for r in scene.records if r.version is not None]
    console.print("training the same model centrally on the pooled data, for comparison ...")
    from examples.central import train_centrally
    from examples.digits import task

    central = train_centrally(task, epochs=len(versions) * task.local.epochs, seed=7)
    model = scene.state / "runs" / scene.run_id / "versions" / f"{max(versions, default=0):06d}.safetensors"
    console.print(
        f"accuracy on the server's test data: federated {scene.accuracy.get(max(versions, default=0), 0):.4f}, "
        f"centralized {central:.4f}"
    )
    console.print(f"the model: {model}", soft_wrap=True)
    console.print(
        f"why a round ended as it did: atoll round show {outage.round_id or 1} --state {scene.state}", soft_wrap=True
    )
    broken = promises_kept(scene, outage)
    for promise in broken:
        console.print(f"[red]promise broken:[/red] {promise}")
    if outage.round_id and not broken:
        console.print(
            f"nothing was lost: round {outage.round_id} kept the updates of {', '.join(outage.kept)} "
            "through the coordinator's death"
        )
    return 1 if broken else 0


def free_address() -> str:
    """A loopback address that nobody uses, the same one for the coordinator's second life."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def main() -> int:
    """Play it."""
    parser = argparse.ArgumentParser(prog="make demo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-chaos", action="store_true", help="nobody is killed")
    parser.add_argument("--out", type=Path, default=Path("demo-run"), help="where everything is written")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    console, outage = Console(width=None if sys.stdout.isatty() else 132), Outage()
    scene = Scene(arguments.out.resolve() / "coordinator")
    processes = Processes(arguments.out.resolve(), free_address())
    try:
        if console.is_terminal:
            with Live(console=console, refresh_per_second=8, vertical_overflow="visible") as live:
                play(scene, processes, outage, chaos=not arguments.no_chaos, show=live.update)
                live.update(scene.picture())
        else:
            play(scene, processes, outage, chaos=not arguments.no_chaos, show=_Printer(scene, console))
            console.print(scene.picture())
    finally:
        processes.stop()
    code = epilogue(scene, console, outage)
    console.print(f"{time.monotonic() - scene.begun:.0f} s in all")
    return code


@dataclass
class _Printer:
    """Where there is no terminal: one line for each round that ends, and each remark once."""

    scene: Scene
    console: Console
    num_rounds: int = 0
    num_remarks: int = 0

    def __call__(self, picture: Group) -> None:
        for remark in self.scene.remarks[self.num_remarks :]:
            self.console.print(remark)
        self.num_remarks = len(self.scene.remarks)
        ended = [r for r in self.scene.records if r.ended_at]
        for record in ended[self.num_rounds :]:
            number, state, reported, missing, _, seconds = _row(record, self.scene.accuracy)
            self.console.print(
                f"         round {number} {state} in {seconds} s: {reported}" + f"; {missing}" * bool(missing)
            )
        self.num_rounds = len(ended)


if __name__ == "__main__":
    sys.exit(main())
