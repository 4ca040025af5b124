"""A run of a million clients without sockets: `python -m benchmarks.million FOLDER CLIENTS COHORT ROUNDS`.

It is the deployed code without sockets and training: every event goes through the run's state machine, its effects
through `server.hosting.event_rows` into the journal, and a group commit is on disk before an effect is carried out;
after each round the journal is pruned. In an empty folder all clients join first; in the folder of a killed process the
run is recovered, and a share of the clients reconnects. Each line of the output is one JSON object.
"""

import json
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atoll.protocol.vocabulary import ClientId, Digest, RunId
from atoll.server.clock import MonotoneClock
from atoll.server.config.run import RunConfig
from atoll.server.hosting.event_rows import Decided, add_rows
from atoll.server.journal.journal import Journal
from atoll.server.journal.pruning import Stay
from atoll.server.journal.rows import Batch, RunRow
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.members.member import Profile
from atoll.server.process_tuning import collect_seldom
from atoll.server.rounds.events import (
    Aggregate,
    Aggregated,
    ClientJoined,
    CohortDrawn,
    Commit,
    CoordinatorStarted,
    DrawCohort,
    Effect,
    EndRun,
    Event,
    Invite,
    OpenNextRound,
    RoundDue,
    RunStarted,
    Update,
    UpdateReceived,
)
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from atoll.server.selection.sampling import SAMPLERS, draw

RUN = RunId("million")
EVENTS_A_COMMIT = 2_000
SHARE_BACK = 0.1
"""The share of the clients that reconnects after the coordinator was killed, before the rounds continue."""


class Million:
    """One process of the coordinator."""

    def __init__(
        self, state: StateDirectory, machine: RunMachine, seq: int, clock: MonotoneClock, *, rss_before: int
    ) -> None:
        self.journal, self.machine, self.clock = Journal(state), machine, clock
        self._seq = seq
        self._rss_before = rss_before
        self._batch = Batch()
        self._effects: list[Effect] = []

    # ------------------------------------------------------------ the journal

    def post(self, event: Event) -> None:
        """Apply an event to the run; its effects are carried out when all of it is on disk."""
        now = self.clock.now()
        effects = self.machine.receive(event, now)
        self._seq += 1
        decided = Decided(RUN, self._seq, now, event, effects)
        add_rows(self._batch, decided, self.machine, None, num_bytes=lambda version: 0)
        self._effects += effects
        if len(self._batch.entries) >= EVENTS_A_COMMIT:
            self._commit()

    def _commit(self) -> None:
        batch, self._batch = self._batch, Batch()
        self.journal.commit(batch)

    def _written(self) -> list[Effect]:
        if self._batch.entries:
            self._commit()
        effects, self._effects = self._effects, []
        return effects

    # ------------------------------------------------------------ the run

    def join(self, names: Iterable[int], session: str) -> None:
        """Connect these clients."""
        for number in names:
            profile = Profile(10 + number % 90, "ab"[number % 2])
            self.post(ClientJoined(ClientId(f"client-{number:07d}"), f"{session}-{number:07d}", profile))

    def run(self) -> None:
        """Carry out the effects until none is left, at the end of the run."""
        while effects := self._written():
            for effect in effects:
                self._act(effect)

    def _act(self, effect: Effect) -> None:
        match effect:
            case OpenNextRound():
                self.post(RoundDue())
            case DrawCohort(round_id, count, candidates):
                drawn = draw(SAMPLERS["uniform"], seed=0, round_id=round_id, count=count, candidates=candidates)
                self.post(CohortDrawn(round_id, drawn))
            case Invite(client_id, round_id, base):  # it trains nothing, and reports at once
                digest = Digest(f"{round_id:032x}{int(client_id[7:]):032x}")
                self.post(UpdateReceived(Update(client_id, round_id, base, digest, 10, 1.0, num_bytes=1000)))
            case Aggregate(round_id):
                self.post(Aggregated(round_id, Digest(f"{round_id:064x}")))
            case Commit(version=version):
                self.journal.prune(RUN, Stay(rounds=1000))
                self.say(committed=version)
            case EndRun(state):
                self.say(ended=str(state))

    def say(self, **what: Any) -> None:
        """Print one line."""
        cpu_s = round(time.process_time(), 3)
        memory = {"rss": _rss(), "peak": _peak(), "before": self._rss_before}
        print(json.dumps({**what, "cpu_s": cpu_s, **memory}), flush=True)


def first(state: StateDirectory, clients: int, rules: RunRules) -> Million:
    """Begin the run, and connect all clients."""
    clock, rss_before = MonotoneClock(), _rss()
    million = Million(state, RunMachine(rules), 0, clock, rss_before=rss_before)
    config = RunConfig(name="million", task="benchmarks.tasks:empty", rounds=rules.rounds, round=rules.policy)
    million.journal.add_run(RunRow.new(RUN, config, rules, clock.now()))
    begun = time.perf_counter()
    million.post(RunStarted(Digest("0" * 64)))
    million.join(range(clients), "first")
    million.say(joined=len(million.machine.ledger.membership.members), seconds=time.perf_counter() - begun)
    return million


def again(path: Path, clients: int) -> Million:
    """Recover the run in the next process, from the last snapshot and the entries since."""
    begun, rss_before = time.perf_counter(), _rss()
    state = StateDirectory.open(path, create=False)
    journal = Journal(state)
    clock = MonotoneClock(journal.last_instant())
    [row] = journal.runs()
    recovered = journal.load(RUN)
    machine = recovered.replay(row.rules)
    clock.advance_to(machine.ledger.now)
    seconds = time.perf_counter() - begun
    million = Million(state, machine, recovered.seq, clock, rss_before=rss_before)
    found = {"members": len(machine.ledger.membership.members), "version": machine.ledger.version}
    million.say(recovered=found, entries=len(recovered.entries), seconds=seconds)
    million.post(CoordinatorStarted(clock.now()))
    begun = time.perf_counter()
    million.join(range(int(clients * SHARE_BACK)), "again")
    million.say(back=million.machine.ledger.membership.num_connected, seconds=time.perf_counter() - begun)
    return million


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Run the command line."""
    collect_seldom()
    path, (clients, cohort, rounds) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    policy = StragglerPolicy(cohort_size=cohort, min_available=int(clients * SHARE_BACK), deadline=3600.0)
    if (path / "state.db").exists():
        million = again(path, clients)
    else:
        million = first(StateDirectory.open(path), clients, RunRules(policy=policy, rounds=rounds))
    million.run()


if __name__ == "__main__":
    main()
