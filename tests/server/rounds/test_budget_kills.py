"""Budgets of a coordinator that is killed at any instant: between an event and its journal, before each effect, after.

The journal is the list of encoded events; a kill forgets the machine, and the next one replays a snapshot and the
events after it. What has left the process is the list of effects that were executed.
"""

import random
import sys
from dataclasses import dataclass, field

import pytest

from atoll.protocol.vocabulary import ClientId, Digest, FailureReason, Phase, RunState
from atoll.server.journal.codec import decode_event, decode_ledger, encode_event, encode_ledger
from atoll.server.members.member import Profile
from atoll.server.members.membership import Membership
from atoll.server.rounds.events import (
    Aggregate,
    Aggregated,
    AggregationFailed,
    ClientFailed,
    ClientJoined,
    CohortDrawn,
    CoordinatorStarted,
    Effect,
    Event,
    RoundDue,
    RunStarted,
    Update,
    UpdateReceived,
)
from atoll.server.rounds.ledger import Ledger
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from tests.server.rounds.test_privacy import rules

CLIENTS = "abcdef"
KILLS, SEEDS = 125, 8
USES = 400


class Killed(Exception):
    """The death of the coordinator."""


@dataclass
class Coordinator:
    """A shell of a private run whose process is killed at random."""

    draw: random.Random
    rules: RunRules
    machine: RunMachine = field(init=False)
    journal: list[tuple[float, str, str]] = field(default_factory=list)
    snapshot: tuple[int, str] | None = None
    now: float = 0.0
    kills: int = 0
    written: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLIENTS, 0))
    """How often each client is charged by what is written."""
    released: dict[str, set[int]] = field(default_factory=lambda: {name: set() for name in CLIENTS})
    """The rounds whose sums with a client's update have left the process, by client."""

    def __post_init__(self) -> None:
        self.machine = RunMachine(self.rules)
        self.post(RunStarted(Digest("v0")))

    def post(self, event: Event) -> None:
        """Deliver an event: decide, write, then execute; the process may die between any two of these."""
        self.now += 1.0
        effects = list(self.machine.receive(event, self.now))
        self.may_die()
        self.journal.append((self.now, *encode_event(event)))
        self.written = self.uses()
        self.may_die()
        for effect in effects:
            self.execute(effect)
            self.may_die()
        if self.machine.round is None:  # a snapshot has no open round
            self.snapshot = (len(self.journal), encode_ledger(self.machine.ledger))

    def may_die(self) -> None:
        if len(self.journal) > 1 and self.draw.random() < 0.06:
            raise Killed

    def execute(self, effect: Effect) -> None:
        """Carry an effect out; of most nothing is to be seen here."""
        if isinstance(effect, Aggregate):
            self.fold(effect)

    def fold(self, effect: Aggregate) -> None:
        """Publish the sum: from here on readers know it, so all its clients have been charged for it by then."""
        for contribution in effect.contributions:
            rounds = self.released[contribution.client_id]
            rounds.add(int(effect.round_id))
            assert self.written[contribution.client_id] >= len(rounds), "a sum was published before its charge"

    def replayed(self) -> RunMachine:
        """Return the machine that the written journal makes."""
        begin, ledger = (0, None) if self.snapshot is None else self.snapshot
        machine = RunMachine(self.rules, None if ledger is None else decode_ledger(ledger, where="here"))
        for at, kind, body in self.journal[begin:]:
            machine.receive(decode_event(kind, body, where="here"), at)
        return machine

    def restart(self) -> None:
        """Replay what was written, and begin again."""
        self.kills += 1
        self.machine = self.replayed()
        assert self.uses() == self.written, "a restart refunds, or charges by itself"
        assert self.machine.ledger.membership.most_spent <= self.rules.privacy.spent_max  # type: ignore[union-attr]
        if self.machine.ledger.state is RunState.RUNNING:
            self.post(CoordinatorStarted(self.now))

    def uses(self) -> dict[str, int]:
        """Return how often each client is charged."""
        members = self.machine.ledger.membership.members
        return {name: members[ClientId(name)].uses if ClientId(name) in members else 0 for name in CLIENTS}

    def next_event(self) -> Event:
        """Return something that may happen now."""
        known, chance = self.machine.ledger.membership.members, self.draw.random()
        absent = [name for name in CLIENTS if ClientId(name) not in known]
        if absent or chance < 0.1:
            name = self.draw.choice(absent or CLIENTS)
            return ClientJoined(ClientId(name), f"{name}{self.now}", Profile(), ())
        if self.machine.round is None:
            return RoundDue()
        record = self.machine.round.record
        number = record.round_id
        if record.phase is Phase.SELECTING:
            free = sorted(self.machine.ledger.membership.available())
            return CohortDrawn(number, tuple(self.draw.sample(free, min(3, len(free)))))
        if record.phase is Phase.AGGREGATING:
            is_lost = chance < 0.3
            return AggregationFailed(number, "disk") if is_lost else Aggregated(number, Digest(f"v{number}"))
        name = self.draw.choice(sorted(record.clients))
        if chance < 0.2:
            return ClientFailed(name, number, FailureReason.TRAINING_FAILED)
        return UpdateReceived(Update(name, number, record.base_version, Digest(f"{name}{number}"), 10, 1.0))


def lived(seed: int, *, kills: int = KILLS) -> Coordinator:
    """Return a coordinator after its run's end, or after as many kills."""
    policy = StragglerPolicy(
        cohort_size=3, quorum=2, deadline=3e7, retry=10_000, retry_wait=0.0, failure_rest=0.0, failure_rest_max=0.0
    )
    it = Coordinator(random.Random(seed), RunRules(policy=policy, rounds=10_000, privacy=rules(uses=USES)))
    is_alive = True
    while it.machine.ledger.state is RunState.RUNNING and it.kills < kills:
        before = it.written
        try:
            it.post(it.next_event()) if is_alive else it.restart()
            is_alive = True
        except Killed:
            is_alive = False
        assert all(it.written[name] >= before[name] for name in CLIENTS), "a charge fell"
    return it


@pytest.mark.parametrize("seed", range(SEEDS))
def test_charges_never_fall_and_precede_what_is_published_in_a_thousand_kills(seed: int) -> None:
    it = lived(seed)
    assert it.kills * SEEDS >= 1000
    published = sum(map(len, it.released.values()))
    assert published > 5
    assert sum(it.written.values()) >= published


def test_a_replay_of_every_prefix_of_the_journal_charges_no_less_than_a_shorter_one() -> None:
    it = lived(7, kills=40)
    machine, charged = RunMachine(it.rules), dict.fromkeys(CLIENTS, 0)
    for at, kind, body in it.journal:
        machine.receive(decode_event(kind, body, where="here"), at)
        now = {str(name): member.uses for name, member in machine.ledger.membership.members.items()}
        assert all(now.get(name, 0) >= count for name, count in charged.items()), kind
        charged |= now
        again = decode_ledger(encode_ledger(machine.ledger), where="here")
        assert {name: member.uses for name, member in again.membership.members.items()} == now
    assert charged == it.written


def test_the_harness_finds_a_sum_without_its_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "charge", lambda *_: None)
    with pytest.raises(AssertionError, match="a sum was published before its charge"):
        lived(0)


def test_the_harness_finds_a_snapshot_that_refunds(monkeypatch: pytest.MonkeyPatch) -> None:
    intact = decode_ledger

    def refunding(body: str, *, where: str) -> Ledger:
        ledger = intact(body, where=where)
        for member in ledger.membership.members.values():
            member.uses = 0
        return ledger

    monkeypatch.setattr(sys.modules[__name__], "decode_ledger", refunding)
    with pytest.raises(AssertionError, match=r"a restart refunds|before its charge"):
        lived(0)
