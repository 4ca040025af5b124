"""Histories of runs of messages under faults: nothing is lost, nothing comes twice, replies keep the order of messages.

Each planted fault is a machine that breaks one rule; the checks must find it.
"""

from dataclasses import replace

import pytest

from atoll.protocol.vocabulary import RoundId
from atoll.server.exchanges.events import AnswerMessages, AnswerNodes, Deliver, Effects, Event, NodesAsked
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.rounds.events import FilesLost, UpdateReceived
from tests.server.exchanges.world import World, faults_of

SEEDS = range(40)


def test_a_history_without_faults_keeps_every_rule() -> None:
    for seed in SEEDS:
        world = World(seed, faults=0.0, make=ExchangeMachine, steps=6).run()
        assert not faults_of(world), f"seed {seed}: {faults_of(world)}"


@pytest.mark.slow
def test_a_history_with_faults_keeps_every_rule() -> None:
    worlds = [World(seed, faults=1.0, make=ExchangeMachine, steps=6).run() for seed in SEEDS]
    for world in worlds:
        assert not faults_of(world), f"seed {world.seed}: {faults_of(world)}"
    fates = {str(one.fate) for w in worlds for e in w.records.values() for one in e.sent}
    assert fates >= {"reported", "failed", "refused", "lost", "straggler", "released"}
    assert sum(len(world.lives) for world in worlds) > 5 * len(worlds), "the programs died too seldom to show anything"
    assert any(world.machine.ledger.pulls for world in worlds)
    assert any(world.lost for world in worlds), "a reply was lost on the disk, and its program told so"


class _ForgetsALoss(ExchangeMachine):
    """Keeps a reply whose file is lost as if it were there."""

    def receive(self, event: Event, now: float) -> Effects:
        return super().receive(replace(event, updates=()) if isinstance(event, FilesLost) else event, now)


class _LosesAReply(ExchangeMachine):
    def receive(self, event: Event, now: float) -> Effects:
        return tuple(
            replace(e, numbers=e.numbers[1:]) if isinstance(e, AnswerMessages) and len(e.numbers) > 1 else e
            for e in super().receive(event, now)
        )


class _RepeatsAReply(ExchangeMachine):
    def receive(self, event: Event, now: float) -> Effects:
        return tuple(
            replace(e, numbers=(*e.numbers, *e.numbers[:1])) if isinstance(e, AnswerMessages) and not e.is_pushed else e
            for e in super().receive(event, now)
        )


class _AnswersInOrderOfArrival(ExchangeMachine):
    def __init__(self, rules: ExchangeRules) -> None:
        super().__init__(rules)
        self.ended_at: dict[RoundId, float] = {}

    def receive(self, event: Event, now: float) -> Effects:
        effects = super().receive(event, now)
        for exchange in [*self.ledger.open.values(), *self._closed.values()]:
            self.ended_at |= {one.number: one.ended_at or now for one in exchange.sent}
        return tuple(
            replace(e, numbers=tuple(sorted(e.numbers, key=self.ended_at.__getitem__)))
            if isinstance(e, AnswerMessages) and not e.is_pushed
            else e
            for e in effects
        )


class _LooksAgain(ExchangeMachine):
    """A new process of the program sees the nodes of now, not those that the old one saw."""

    def receive(self, event: Event, now: float) -> Effects:
        effects = super().receive(event, now)
        nodes = self.ledger.membership.present
        return tuple(
            replace(e, nodes=nodes) if isinstance(event, NodesAsked) and isinstance(e, AnswerNodes) else e
            for e in effects
        )


class _DeliversAtOnce(ExchangeMachine):
    """A node gets a message while it has another."""

    def receive(self, event: Event, now: float) -> Effects:
        effects = super().receive(event, now)
        more = []
        for node in self.ledger.membership.members.values():
            for number in [*node.queue][1:]:
                sent = self.ledger.sent(number)
                if sent is not None and node.session is not None and self.ledger.is_open:
                    more.append(Deliver(number, sent.message, sent.deadline))
        return (*effects, *more)


class _TakesLateReplies(ExchangeMachine):
    """A reply that comes after its exchange has closed joins it."""

    def receive(self, event: Event, now: float) -> Effects:
        if isinstance(event, UpdateReceived):
            late = event.update.round_id
            number = self.ledger.exchange_of(late)
            if (exchange := self.ledger.settled.get(number)) is not None:
                missing = tuple(each for each in exchange.missing if each != late)
                self.ledger.settled[number] = replace(exchange, missing=missing)
        return super().receive(event, now)


class _ForgetsAnExchange(ExchangeMachine):
    """A program that repeats itself is asked for one exchange less than there are."""

    def _forget_process(self) -> None:
        super()._forget_process()
        del self.process.left[:1]


PLANTED = [
    *(_LosesAReply, _RepeatsAReply, _AnswersInOrderOfArrival, _LooksAgain, _DeliversAtOnce, _TakesLateReplies),
    *(_ForgetsAnExchange, _ForgetsALoss),
]


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found(planted: type[ExchangeMachine]) -> None:
    def is_found(seed: int) -> bool:
        try:
            return bool(faults_of(World(seed, faults=1.0, make=planted, steps=6).run()))
        except AssertionError:
            return True

    assert any(is_found(seed) for seed in SEEDS)
