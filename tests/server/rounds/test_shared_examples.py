"""Sums of steps whose noise the clients share: one charge of a step for each, and no second noise on one sample."""

import random

from atoll.protocol.privacy.poisson_account import PoissonAccount
from atoll.protocol.vocabulary import RoundId
from atoll.server.rounds.events import PublishedNamed
from atoll.server.rounds.privacy_rules import SharedExampleRules
from tests.server.rounds.test_private_sums import Private, uses

RATE, Z, DELTA = 0.1, 2.0, 1e-5


def privacy(steps=9):
    epsilon = PoissonAccount(RATE, DELTA).bound_of(Z, steps)
    return SharedExampleRules(
        *(epsilon, DELTA, Z, 1.0, 1000, float(steps)),
        **{"sample_rate": RATE, "steps": 1, "epsilon_last": epsilon, "honest_min": 2, "colluders": 1},
    )


def test_each_round_costs_its_members_one_step():
    run = Private(4, random.Random(1), privacy())
    assert run.run()
    assert uses(run) == dict.fromkeys(run.sites, 2)
    membership = run.machine.ledger.membership
    assert {member.spent for member in membership.members.values()} == {2.0}
    charge = run.machine.ledger.past[RoundId(2)].charge
    assert charge is not None
    assert (charge.charges, charge.epsilon) == (4, PoissonAccount(RATE, DELTA).bound_of(Z, 2))


def test_a_sum_that_fails_after_its_boxes_is_not_tried_again_with_the_same_samples():
    run = Private(4, random.Random(1), privacy(), rounds=1)
    upload, silent = run.upload, [*run.sites][2:]

    def upload_late(name, number):
        if number > 1 or name not in silent:
            upload(name, number)

    run.upload = upload_late
    assert run.run()
    first, second = (run.machine.ledger.past[RoundId(number)] for number in (1, 2))
    assert (first.phase, second.phase) == ("abandoned", "committed")
    assert first.sums[0].attempt == 1
    assert {(number, attempt) for _, number, _, attempt in run.boxed} == {(1, 1), (2, 1)}
    assert uses(run) == dict.fromkeys(run.sites, 2), "both rounds are charged"


def test_a_restored_run_is_charged_once_for_each_round_that_may_have_been_open():
    """No round of shared example noise has two attempts whose masked updates leave."""
    run = Private(4, random.Random(1), privacy(steps=40), rounds=1)
    assert run.run()
    run.machine.receive(PublishedNamed(RoundId(6), "r1"), run.machine.ledger.now)
    assert uses(run) == dict.fromkeys(run.sites, 1 + 5)


def test_the_budget_ends_the_run():
    run = Private(4, random.Random(1), privacy(steps=3), rounds=9)
    assert run.run()
    assert len(run.opened) == 3
    assert run.machine.ledger.cause.startswith("the privacy budget is spent: epsilon")
