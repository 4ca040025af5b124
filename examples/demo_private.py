"""`make demo-private`: five sites train LoRA on their text, and no update is seen, nor a row told.

The sites have pinned each other's keys; one of them is a mesh of two ranks. Their updates travel in secure sums, and
each site hides its rows by noise in its training steps. The coordinator's operator certifies a site of its own to be in
the sums, and the sites refuse it. One agent, one rank of the mesh and the coordinator are killed (SIGKILL). The run
ends when its privacy budget is spent, and a plain run that the operator asks for then is refused. A simulation of the
same run without sums and noise is beside it in the table.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from atoll.ground.printable import count_of, printable_size
from atoll.operations import admin
from atoll.protocol.identity.names import Role
from atoll.protocol.vocabulary import Fate, Phase, RunState
from atoll.server.rounds.record import RoundRecord
from examples.demo import ATOLL, Processes, free_address
from examples.demo_course import Course, conduct
from examples.demo_large import family

HERE = Path(__file__).parent / "adapters"
SITES, MESH, NUM_RANKS, STRANGER = ("north", "south", "east", "west", "mesh"), "mesh", 2, "inspector"
RUN = "private-1"
VICTIM, SLOW_LINE, UPLOAD_LIMIT = "east", "west", 5_000
KILL_AGENT_IN, KILL_RANK_IN, KILL_COORDINATOR_IN = 2, 3, 4
BASE_STEPS, ROUNDS, LIMIT_S = 60, 6, 1800.0


class Federation(Processes):
    """The processes of the demo."""

    @property
    def base(self) -> Path:
        """The folder of the base, which all sites have on this machine."""
        return self.folder / "base"

    def start_coordinator(self) -> None:
        """Start the coordinator, or restart it: its state directory has the run."""
        lease = ("--set", "coordinator.lease=120")  # a site computes the exact account of its budget meanwhile
        command = ("coordinator", "--stay", "--state", str(self.state), *self.ports, *lease)
        self.start("coordinator", *command, TINY_LLAMA=str(self.base))

    def start_agent(self, site: str, *join: str) -> None:
        """Start the agent of a site; `join` has its join code. The stranger's demands nothing."""
        mesh = ("--mesh", f"dp_shard={NUM_RANKS}") if site == MESH else ()
        policy = () if site == STRANGER else ("--policy", str(HERE / "policy.toml"))
        limit = ("--set", f"upload_limit={UPLOAD_LIMIT}") if site == SLOW_LINE else ()
        settings = ("--set", "threads=1", "--set", "reconnect_max=1.0", *limit)
        self.start(
            site,
            *("agent", f"{HERE / 'task.py'}:task", "--site", site, *join, *mesh, *policy),
            *("--state", str(self.folder / site), *settings),
            TINY_LLAMA=str(self.base),
        )

    def said(self, site: str, text: str) -> str:
        """Return the first line of a process's log that has a text, without its time; empty: there is none."""
        with suppress(OSError):
            for line in (self.folder / f"{site}.log").read_text(errors="replace").splitlines():
                if text in line:
                    return line.partition(f"{site}: ")[2] or line
        return ""

    def command(self, *arguments: str) -> str:
        """Run a command as an operator does, and return what it prints.

        Raises:
            SystemExit: it fails.
        """
        done = subprocess.run([ATOLL, *arguments], capture_output=True, text=True, cwd=self.folder)
        if done.returncode:
            raise SystemExit(f"atoll {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def json_of(self, *arguments: str) -> Any:
        """Run a command with --json, and return the value that it prints."""
        return json.loads(self.command(*arguments, "--json"))


@dataclass
class Demo(Course):
    """The course of the demo."""

    limit_s = LIMIT_S
    happened: dict[int, str] = field(default_factory=dict)
    """What was done in a round, for the table."""
    masked: dict[str, float] = field(default_factory=dict)
    """Share of bits that are 1, by the site, in each masked update on the disk of the killed coordinator."""
    refusals: dict[str, str] = field(default_factory=dict)
    """The sentence with which each site has refused the plain run."""

    # ------------------------------------------------------------ the course

    def run(self) -> None:
        """Run the federation to the end of its budget, with all that happens on the way."""
        self._begin()
        self._introduce()
        self.processes.command("run", "start", str(HERE / "demo.toml"), "--state", str(self.processes.state))
        self.say("$ atoll run start examples/adapters/demo.toml")
        self._refuse_the_stranger()
        self._kill_the_agent()
        self._kill_a_rank()
        self._kill_the_coordinator()
        while self.state in (RunState.QUEUED, RunState.RUNNING):
            self.look()
        self.say(f"the run is {self.state}: {self.cause}")
        self._ask_for_a_plain_run()
        while self.processes.running["plain"].poll() is None:
            self.wait()

    def _begin(self) -> None:
        """Start the coordinator and all agents, and the simulation of the plain run."""
        make = [sys.executable, str(HERE / "make_base.py"), str(self.processes.base), str(BASE_STEPS)]
        subprocess.run(make, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.say(
            "a tiny Llama is trained on Python's help pages; each site has it, and trains LoRA on sources of its own"
        )
        self.start_the_plain_run()
        self.processes.start_coordinator()
        while not (self.processes.said("coordinator", "no run yet")):
            self.wait()
        for site in (*SITES, STRANGER):
            code = admin.invite(self.processes.state, Role.CLIENT, site, lifetime_s=LIMIT_S).join_code
            self.processes.start_agent(site, "--join", code)
        agent = "$ atoll agent examples/adapters/task.py:task --policy examples/adapters/policy.toml --join CODE --site"
        self.say(f"{agent} {SITES[0]}   # the same at {', '.join(SITES[1:-1])}")
        self.say(f"{agent} {MESH} --mesh dp_shard={NUM_RANKS}")
        self.say(f"the operator of the coordinator gives itself a certificate, too, as the site {STRANGER}")
        while not all(self.processes.said(site, "connected to") for site in (*SITES, STRANGER)):
            self.wait()

    def _introduce(self) -> None:
        """Pin the keys of the five sites: one calls the others, and they get its list."""
        first, *others = (("--state", str(self.processes.folder / site)) for site in SITES)
        for site, state in zip(SITES[1:], others, strict=True):
            key = self.processes.json_of("site", "fingerprint", *state)["fingerprint"]
            self.processes.command("site", "trust", site, key, *first)
        path = str(self.processes.folder / "sites.txt")
        self.processes.command("site", "fingerprints", "export", path, *first)
        for state in others:
            self.processes.command("site", "fingerprints", "import", path, *state)
        self.say(f"{SITES[0]} hears the fingerprints of {', '.join(SITES[1:])} on the telephone; all pin its list")

    def _refuse_the_stranger(self) -> None:
        """Wait until the sites have refused the operator's own site, and print why."""
        while not (line := self.processes.said("north", f"{STRANGER} is not pinned here")):
            self.look()
        where = line.find(f"{STRANGER} is not pinned here")
        self.say(f"THE COORDINATOR LIES: {STRANGER} is to be in each sum. north answers: {line[where:].split(';')[0]}")
        self.happened[1] = f"{STRANGER} is refused"

    def _kill_the_agent(self) -> None:
        """Kill an agent when its update is encoded, and start it again."""
        while not self.processes.said(VICTIM, f"encoded the update of round {KILL_AGENT_IN}"):
            self.look()
        self.processes.kill(VICTIM)
        self.processes.start_agent(VICTIM)
        self.say(f"kill -9 of the agent {VICTIM} in the secure sum of round {KILL_AGENT_IN}, and its restart")
        self.happened[KILL_AGENT_IN] = f"the agent of {VICTIM} is killed"

    def _kill_a_rank(self) -> None:
        """Kill a rank of the mesh in its training."""
        while not self.processes.said(MESH, f"round {KILL_RANK_IN} of run {RUN} is charged"):
            self.look()
        while len(ranks := self._ranks()) < NUM_RANKS:
            self.look()
        os.kill(ranks[NUM_RANKS - 1], signal.SIGKILL)
        self.say(f"kill -9 of rank {NUM_RANKS - 1} of {MESH} in round {KILL_RANK_IN}: its ranks start again")
        self.happened[KILL_RANK_IN] = f"a rank of {MESH} is killed"

    def _ranks(self) -> dict[int, int]:
        found = {}
        for process in family(self.processes.running[MESH].pid):
            with suppress(OSError):
                name = Path(f"/proc/{process}/comm").read_text().strip()
                if name.startswith("atoll rank "):
                    found[int(name.rpartition(" ")[2])] = process
        return found

    def _kill_the_coordinator(self) -> None:
        """Kill the coordinator while it has masked updates on its disk, look at them, and start it again."""
        while not (masked := self._masked()):
            if self.state not in (RunState.QUEUED, RunState.RUNNING):
                return
            self.look(0.02)
        self.processes.kill("coordinator")
        number = self.records[-1].round_id
        for site, paths in masked.items():
            content = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
            self.masked[site] = float(np.unpackbits(content).mean())
        self.say(f"kill -9 of the coordinator in round {number}: it had masked updates of {', '.join(self.masked)}")
        told = ", ".join(f"{share:.1%}" for share in self.masked.values())
        self.say(f"what its disk tells of them: {told} of their bits are 1, as of random numbers")
        self.processes.start_coordinator()
        while not (record := self._record(number)).outages and not record.ended_at:
            self.look()
        self.say(f"it is restarted, and continues the sum of round {number}")
        self.happened[number] = "the coordinator is killed"

    def _masked(self) -> dict[str, list[Path]]:
        """Return the files of each masked update of the open round, by the site, if others are on their way."""
        last = self.records[-1] if self.records else None
        if last is None or last.round_id < KILL_COORDINATOR_IN or last.ended_at:
            return {}
        rows = {str(site): row for site, row in last.clients.items() if row.sum is not None and not row.sum.left}
        if all(row.sum is not None and row.sum.masked_at is not None for row in rows.values()):
            return {}
        files = {site: self._files_of(row.digest) for site, row in rows.items()}
        return {site: paths for site, paths in files.items() if paths}

    def _files_of(self, digest: str | None) -> list[Path]:
        """Return the files of an update's tensors, one for each part, without their manifests, which are text."""
        return sorted(self.processes.state.glob(f"runs/{RUN}/updates/{digest}*.bin")) if digest else []

    def _record(self, number: int) -> RoundRecord:
        return next(record for record in self.records if record.round_id == number)

    def _ask_for_a_plain_run(self) -> None:
        """Ask for updates without sums and noise, and gather the sites' answers."""
        self.processes.command("run", "start", str(self.plain_toml), "--state", str(self.processes.state))
        self.say("THE COORDINATOR ASKS FOR PLAIN UPDATES: $ atoll run start plain.toml")
        while len(self.refusals) < len(SITES):
            for site in SITES:
                for path in (self.processes.folder / site).glob("decisions/audit-*.jsonl"):
                    for line in map(json.loads, path.read_text().splitlines()):
                        if (line.get("action"), line.get("actor")) == ("train.refused", "plain-1"):
                            self.refusals[site] = line["outcome"]
            self.wait()
        self.say(f"all five refuse: {self.refusals['north']}")

    # ------------------------------------------------------------ reading

    def look(self, wait: float = 0.1) -> None:
        """Read the run's records, and tell of the rounds that have ended since."""
        before = {record.round_id for record in self._ended()}
        self.read(RUN)
        for record in self._ended():
            if record.round_id not in before:
                names = ", ".join(_in_the_sum(record))
                self.say(f"round {record.round_id} is {record.phase}: the sum of {names or 'nobody'}")
        self.wait(wait)

    def _ended(self) -> list[RoundRecord]:
        return [record for record in self.records if record.ended_at]

    # ------------------------------------------------------------ the plain run

    @property
    def plain_toml(self) -> Path:
        """The run's settings without sums and noise."""
        return self.processes.folder / "plain.toml"

    def start_the_plain_run(self) -> None:
        """Start the simulation of the same run without sums and noise."""
        settings, _, _ = (HERE / "demo.toml").read_text().partition("\n[secure]")  # [privacy] comes after it
        task = f"{HERE / 'task.py'}:task"
        self.plain_toml.write_text(settings.replace("task.py:task", task).replace('"private"', '"plain"'))
        same = (f"rounds={ROUNDS}", f"round.cohort_size={len(SITES)}", "local.batch_size=48")
        overrides = (part for each in same for part in ("--set", each))
        out = ("--engine", "sequential", "--out", str(self.processes.folder / "plain"))
        self.processes.start(
            "plain", "simulate", str(self.plain_toml), *out, *overrides, TINY_LLAMA=str(self.processes.base)
        )

    def loss_of_the_plain_run(self) -> dict[int, float]:
        """Return the loss of each version of the simulated run."""
        path = self.processes.folder / "plain" / "rounds.jsonl"
        rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return {row["version"]: row["server"]["loss"] for row in rows}

    # ------------------------------------------------------------ the end

    def show(self) -> None:
        """Print the rounds, and what was spent and seen of each site."""
        plain, spent = self.loss_of_the_plain_run(), self.spent_by_round()
        table = Table(title="Rounds", title_justify="left")
        for column in ("round", "in the sum", "on the way", "epsilon", "loss", "of the plain run"):
            table.add_column(column, justify="left" if column in ("in the sum", "on the way") else "right")
        for record in self.records:
            names = ", ".join(_in_the_sum(record)) or f"- ({record.phase})"
            epsilon = spent.get(record.round_id, "")
            number = -1 if record.version is None else record.version
            losses = (f"{each[number]:.3f}" if number in each else "" for each in (self.loss, plain))
            table.add_row(str(record.round_id), names, self.happened.get(record.round_id, ""), epsilon, *losses)
        self.console.print(table)
        table = Table(title="Sites", title_justify="left")
        for column in ("site", "trainings", "epsilon spent", "of its budget", "what the server saw of it"):
            table.add_column(column, justify="left" if column in ("site", "what the server saw of it") else "right")
        for site, budget in self.spent().items():
            numbers = (str(budget["charges"]), f"{budget['spent']:.3f}", f"{budget['epsilon_max']:g}")
            table.add_row(site, *numbers, self._seen_of(site))
        self.console.print(table)
        self.say(self.claim()["sentence"])

    def spent(self) -> dict[str, dict[str, Any]]:
        """Return the budget of each site's text, as `atoll site budgets` shows it."""
        policy = ("--policy", str(HERE / "policy.toml"))
        found = {}
        for site in SITES:
            folder = str(self.processes.folder / site)
            [found[site]] = self.processes.json_of("site", "budgets", "--state", folder, *policy)["budgets"]
        return found

    def spent_by_round(self) -> dict[int, str]:
        """Return epsilon after each round, as a site that was in all of them has told it before its first step."""
        log = (self.processes.folder / f"{SITES[0]}.log").read_text(errors="replace")
        found = re.findall(rf"round (\d+) of run {RUN} is charged .* spent now epsilon ([\d.]+)", log)
        return {int(number): f"{float(epsilon):.2f}" for number, epsilon in found}

    def claim(self) -> dict[str, Any]:
        """Return the guarantee of the run, as `atoll privacy show` prints it."""
        found: dict[str, Any] = self.processes.json_of("privacy", "show", RUN, "--state", str(self.processes.state))
        return found

    def _seen_of(self, site: str) -> str:
        sizes = [
            row.num_bytes for record in self.records for name, row in record.with_fate(Fate.REPORTED) if name == site
        ]
        size = f" of {printable_size(sizes[0])}" if sizes else ""
        share = f"; {self.masked[site]:.1%} of the bits of one were 1" if site in self.masked else ""
        return f"{count_of(len(sizes), 'masked update')}{size}{share}"

    def broken(self) -> list[str]:
        """Return the promises that are broken."""
        faults = [*self._broken_by_the_run()]
        if len(self.happened) < 4:
            faults.append(f"on the way: {'; '.join(self.happened.values())}; not a refusal and three deaths")
        for site, share in self.masked.items():
            if abs(share - 0.5) > 0.01:  # nine standard deviations of 188,000 bits
                faults.append(f"{share:.1%} of the bits of a masked update of {site} are 1: it is not masked")
        if not self.masked:
            faults.append("the killed coordinator had no masked update on its disk")
        if missing := [site for site in SITES if site not in self.refusals]:
            faults.append(f"the plain run was not refused by {', '.join(missing)}")
        return faults

    def _broken_by_the_run(self) -> Iterator[str]:
        if self.state is not RunState.FINISHED:
            yield f"the run is {self.state}, not finished"
        if not self.cause.startswith("the privacy budget is spent"):
            yield f"the run ended because {self.cause}, not by its budget"
        for record in self.records:
            members = _in_the_sum(record)
            if record.phase is not Phase.COMMITTED or len(members) < len(SITES) - 1 or STRANGER in members:
                yield f"round {record.round_id} is {record.phase}, with the sum of {', '.join(members)}"
        losses = [self.loss[version] for version in sorted(self.loss)]
        if not losses or losses[-1] >= losses[0]:
            yield f"the loss did not fall: {', '.join(f'{loss:.3f}' for loss in losses)}"
        claim = self.claim()
        if claim["epsilon"] > claim["epsilon_max"]:
            yield f"epsilon {claim['epsilon']} of {claim['epsilon_max']}"


def _in_the_sum(record: RoundRecord) -> list[str]:
    """Return the sites whose updates are in a round's version."""
    return [str(name) for name, row in record.with_fate(Fate.REPORTED) if not row.unused_because]


def main() -> int:
    """Run the demo, and return the exit code."""
    return conduct(
        "make demo-private",
        (__doc__ or "").splitlines()[0],
        lambda folder, console: Demo(Federation(folder, free_address()), console),
        width=132,
        kept="no site's update was seen, no row is told, and no budget is exceeded",
    )


if __name__ == "__main__":
    sys.exit(main())
