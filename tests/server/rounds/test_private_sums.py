"""Private sums to which the clients add noise: charged at each attempt before its boxes, exact with the shares."""

import random
from dataclasses import replace

import pytest

from atoll.protocol.privacy.gaussian import mu_within, noise_multiplier_of
from atoll.protocol.secure.messages import Boxes
from atoll.protocol.vocabulary import AbandonReason, Fate, Phase, RoundId, RunState, Version
from atoll.server.rounds import events as ev
from atoll.server.rounds.privacy_rules import PrivacyRules, SharedRules
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import WaitRules
from atoll.server.rounds.session_events import TellMember
from atoll.server.views.sentences import sentences
from tests.server.rounds.secure_federation import SecureRun, is_reported
from tests.server.rounds.secure_schedules import verified_once

DELTA = 1e-5


def privacy(uses=9, *, honest=2, colluders=1, participations_max=1000):
    z = noise_multiplier_of(4.0, DELTA, uses)
    spent = mu_within(4.0, DELTA) ** 2
    return SharedRules(4.0, DELTA, z, 1.0, participations_max, spent, honest, colluders)


class Private(SecureRun):
    """A run whose sites add noise, in which no boxes are told before each member's charge."""

    def __init__(self, count, draw, rules=None, **options):
        self.boxed = set()  # client, round, session, attempt
        rules = rules or privacy()
        super().__init__(count, draw, privacy=rules, sum_min=rules.sum_min, is_private=True, **options)

    def carry_out(self, effect):
        if isinstance(effect, TellMember) and isinstance(effect.question, Boxes):
            self.boxed.add((effect.client_id, effect.round_id, effect.session, effect.attempt))
            self.check_charges()
        super().carry_out(effect)

    def check_charges(self):
        members = self.machine.ledger.membership.members
        for name in self.sites:
            told = sum(each[0] == name for each in self.boxed)
            assert members[name].uses >= told, f"{name} was told boxes before its charge"
            assert members[name].spent <= self.rules.privacy.spent_max

    def run(self, steps=4000):
        finished = super().run(steps)
        self.check_charges()
        for _, _, members in self.opened:
            assert len(members) >= self.rules.privacy.sum_min
        return finished


def uses(run):
    return {name: member.uses for name, member in sorted(run.machine.ledger.membership.members.items())}


def test_each_round_charges_its_members_once_and_opens_the_sum_with_their_noise():
    run = Private(4, random.Random(1))
    assert run.run()
    assert run.opened == [(1, 0, tuple(run.sites)), (2, 0, tuple(run.sites))]
    assert {*uses(run).values()} == {2}
    assert run.boxed == {(name, number, 0, 1) for name in run.sites for number in (1, 2)}
    charge = run.machine.ledger.past[RoundId(2)].charge
    assert charge is not None
    assert (charge.clients, charge.charges, charge.uses) == (4, 4, 2)
    run.crash()
    assert {*uses(run).values()} == {2}, "a replay charges as the first time"


def late(run, silent):
    """Let the masked updates of the first attempt be lost for some sites."""
    upload = run.upload

    def upload_late(name, number):
        if name not in silent or run.work[name, number].pending[1] > 1:
            upload(name, number)

    run.upload = upload_late


def test_an_attempt_that_is_given_up_stays_charged_and_the_next_has_other_noise():
    run = Private(4, random.Random(1), rounds=1)
    late(run, [*run.sites][2:])
    assert run.run()
    record = run.machine.ledger.past[RoundId(1)]
    assert record.sums[0].attempt == 2
    assert is_reported(record)
    assert uses(run) == dict.fromkeys(run.sites, 2)
    assert (record.charge.clients, record.charge.charges) == (4, 8)
    assert any(
        "4 clients for a private sum, 8 times in all, as each attempt counts" in line for line in sentences(record)
    )
    noises = [run.noise[digest].tobytes() for digest in run.noise]
    assert len({*noises}) == len(noises) == 8


def test_a_member_without_budget_is_in_no_further_attempt():
    run = Private(4, random.Random(1), privacy(uses=1), rounds=3)
    late(run, [*run.sites][2:])
    assert run.run(), "the run has ended by its budget"
    assert uses(run) == dict.fromkeys(run.sites, 1)
    record = run.machine.ledger.past[RoundId(1)]
    assert {row.fate for row in record.clients.values()} == {Fate.STRAGGLER, Fate.REPORTED}
    assert record.sums[0].attempt == 1
    assert record.sums[0].detail.endswith("; 4 members have no privacy budget for another attempt")
    assert run.opened == []
    assert run.machine.ledger.cause.startswith("the privacy budget is spent: epsilon 4 of 4")


def test_no_attempt_follows_with_fewer_members_than_the_noise_needs():
    run = Private(5, random.Random(1), privacy(honest=4), rounds=1, quorum=3)
    late(run, ["site-04"])
    gone = []

    def left(name, number):
        if name == "site-04" and not gone:
            gone.append(name)
            run.fail(name)

    upload = run.upload
    run.upload = lambda name, number: left(name, number) if name == "site-04" else upload(name, number)
    run.run(steps=20_000)
    assert run.opened == [], "the sum of four holds too little noise, though four are the threshold"
    for name in run.sites:
        signed = [promise for promise in run.sites[name].written if promise.kind == "signed"]
        assert not signed


def test_the_noise_of_the_coordinator_is_charged_when_the_sums_are_open():
    rules = privacy()
    central = PrivacyRules(rules.epsilon, DELTA, rules.noise_multiplier, 1.0, 1000, rules.spent_max)
    run = SecureRun(4, random.Random(1), privacy=central, is_private=True, rounds=1)
    late(run, [*run.sites][2:])
    assert run.run()
    assert run.machine.ledger.past[RoundId(1)].sums[0].attempt == 2
    assert uses(run) == dict.fromkeys(run.sites, 1), "masked updates alone tell nothing"
    assert run.machine.ledger.past[RoundId(1)].charge.charges == 0


# ---------------------------------------------------------------- the ways in which a round ends


class HalfOpen(SecureRun):
    """A round of two sums: the first is open and charged, the second waits for one masked update."""

    def __init__(self, privacy, *, quorum=3):
        self.audited, self.withheld = [], ""
        options = {"sessions": 2, "attempts": 1, "is_private": True, "rounds": 9, "quorum": quorum}
        super().__init__(6, random.Random(1), privacy=privacy, **options)
        self.rules = replace(self.rules, wait=WaitRules(most=500.0))
        self.machine = RunMachine(self.rules)
        self.post(ev.RunStarted("model-0"))
        for name in self.sites:
            self.join(name)
        while self.queue and not self.is_half_open:
            self.queue.pop(self.draw.randrange(len(self.queue)))()
        while self.queue:
            self.queue.pop(0)()
        assert self.is_half_open
        self.first = [name for name in self.sites if self.record.clients[name].sum.session == 0]

    @property
    def record(self):
        return self.machine.record_of(RoundId(1))

    @property
    def is_half_open(self):
        round_ = self.machine.round
        return round_ is not None and [each.stage for each in round_.record.sums] == ["opened", "masking"]

    def upload(self, name, number):
        if self.record.clients[name].sum.session == 1 and self.withheld in ("", name):
            self.withheld = name
            return
        super().upload(name, number)

    def carry_out(self, effect):
        if isinstance(effect, ev.AuditCharge):
            self.audited.append((effect.rounds, effect.charge.clients))
        super().carry_out(effect)

    def aggregate(self, effect):
        """Leave the fold to the test."""

    def pass_deadline(self):
        self.now = self.machine.deadline
        self.post(ev.TimePassed())

    def lose(self, session):
        name = next(n for n in self.sites if n != self.withheld and self.record.clients[n].sum.session == session)
        self.post(ev.FilesLost((self.record.clients[name].digest,), (), detail="disk"))

    def wait_in_vain(self):
        self.post(ev.DiskShort("no room"))
        self.now += 1000.0
        self.post(ev.TimePassed())

    def lose_of_the_open_sum(self):
        self.lose(0)
        self.pass_deadline()

    def fold_to(self, event):
        self.pass_deadline()
        self.post(event)

    def end_by(self, way):
        first = RoundId(1)
        ends = {
            "model lost": lambda: self.post(ev.FilesLost((), (Version(0),), detail="disk")),
            "disk full": self.wait_in_vain,
            "stopped": lambda: self.post(ev.StopRequested("enough")),
            "restored": lambda: self.post(ev.PublishedNamed(first, "backup")),
            "other sum failed": self.pass_deadline,
            "update of the other sum lost": lambda: self.lose(1),
            "update of the open sum lost": self.lose_of_the_open_sum,
            "fold failed": lambda: self.fold_to(ev.AggregationFailed(first, "overflow")),
            "sums dropped by the fold": lambda: self.fold_to(ev.AggregationFailed(first, "long", {0: "long"})),
            "committed": lambda: self.fold_to(ev.Aggregated(first, "model-1", {}, (0,))),
        }
        ends[way]()


WAYS = {
    "model lost": (3, AbandonReason.FILES_LOST),
    "disk full": (3, AbandonReason.AWAITS_ROOM),
    "stopped": (3, AbandonReason.STOP_REQUESTED),
    "restored": (3, AbandonReason.RESTORED),
    "other sum failed": (6, AbandonReason.SECURE_FAILED),
    "update of the other sum lost": (6, AbandonReason.SECURE_FAILED),
    "update of the open sum lost": (3, AbandonReason.SECURE_FAILED),
    "fold failed": (3, AbandonReason.AGGREGATION_FAILED),
    "sums dropped by the fold": (3, AbandonReason.SECURE_FAILED),
    "committed": (3, None),
}
"""The quorum, and why the round is abandoned, for each way in which it ends."""


@pytest.mark.parametrize("is_killed", [False, True], ids=["", "killed"])
@pytest.mark.parametrize("way", WAYS)
def test_however_a_round_ends_its_open_sum_stays_charged_and_is_in_the_audit_log_once(way, is_killed):
    quorum, reason = WAYS[way]
    rules = privacy()
    central = PrivacyRules(rules.epsilon, DELTA, rules.noise_multiplier, 1.0, 1000, rules.spent_max)
    run = HalfOpen(central, quorum=quorum)
    of_first = {name: int(name in run.first) for name in run.sites}
    assert (uses(run), run.audited) == (of_first, [])
    if is_killed:
        run.crash()
        run.queue.clear()
    run.end_by(way)
    assert run.record.phase is (Phase.COMMITTED if reason is None else Phase.ABANDONED)
    assert run.record.abandon_reason is reason
    more = [("rounds 1 to 1", 6)] if way == "restored" else []
    assert run.audited == [*more, ("round 1", 3)]
    assert uses(run) == {name: number + len(more) for name, number in of_first.items()}
    run.machine.validate()
    run.crash()
    assert uses(run) == {name: number + len(more) for name, number in of_first.items()}


@pytest.mark.parametrize("way", WAYS)
def test_however_a_round_ends_each_attempt_with_noise_of_its_members_stays_charged_and_audited(way):
    quorum, reason = WAYS[way]
    run = HalfOpen(privacy(honest=2), quorum=quorum)
    assert (run.audited[-1], {*uses(run).values()}) == (("round 1", 6), {1}), "both sums' boxes are told"
    run.end_by(way)
    assert run.record.abandon_reason is reason
    more = [("rounds 1 to 1", 6)] if way == "restored" else []
    assert run.audited == [("round 1", 3), ("round 1", 6), *more], "an attempt's line has all charges of its round"
    assert {*uses(run).values()} == {1 + (run.rules.charges_max if more else 0)}
    run.machine.validate()


def test_a_lost_update_of_an_open_sum_costs_its_sum_alone():
    """The other sum, which opens later, makes the version."""
    rules = privacy()
    run = HalfOpen(PrivacyRules(rules.epsilon, DELTA, rules.noise_multiplier, 1.0, 1000, rules.spent_max))
    run.lose(0)
    folds = []
    run.aggregate = folds.append
    SecureRun.upload(run, run.withheld, 1)
    while run.queue:
        run.queue.pop(0)()
    [fold] = folds
    others = tuple(name for name in run.sites if name not in run.first)
    assert [(each.session, each.members) for each in fold.sums] == [(1, others)]
    assert [each.client_id for each in fold.contributions] == [*others]
    assert run.audited == [("round 1", 6)]
    assert run.record.sums[0].detail == "a masked update was lost on the coordinator's disk"
    run.post(ev.Aggregated(RoundId(1), "model-1", {}, (0,)))
    assert (run.record.phase, run.record.only_dropped) == (Phase.COMMITTED, {})
    unused = {row.unused_because for name, row in run.record.clients.items() if name in run.first and not row.is_lost}
    assert unused == {"its session has no sum: a masked update was lost on the coordinator's disk"}
    run.machine.validate()


@pytest.mark.parametrize("seeds", [range(25), range(25, 50)], ids=["0-24", "25-49"])
def test_a_schedule_of_faults_never_tells_boxes_before_a_charge(seeds):
    """Crashes of both sides, lost streams, messages in any order and twice; replays give the same charges."""
    with verified_once():
        for seed in seeds:
            draw = random.Random(f"private schedule {seed}")
            run = Private(
                draw.randint(4, 9),
                draw,
                privacy(draw.choice([2, 20]), honest=draw.randint(1, 3), colluders=draw.randint(0, 1)),
                faults=draw.choice([0.0, 0.02, 0.05, 0.1]),
                rounds=draw.choice([1, 2]),
                sessions=draw.choice([1, 1, 2]),
                attempts=draw.randint(1, 3),
            )
            run.run()
            assert run.machine.ledger.state in (RunState.FINISHED, RunState.FAILED, RunState.PAUSED), seed
            run.machine.validate()
