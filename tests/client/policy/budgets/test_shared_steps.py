"""A step whose noise the clients share, in the budgets of a site: it charges one, and no second update of it leaves."""

import json

from atoll.client.policy.budgets.account import Accounts
from atoll.client.policy.budgets.charge import Charge
from atoll.client.policy.budgets.terms import Spending, spending_inside, spending_of
from atoll.protocol.privacy.composition import Steps
from tests.client.policy.budgets.test_account import budget, charged, left, work
from tests.client.policy.test_shared_noise import LOCAL, inside


def test_a_training_spends_one_step_whatever_its_run_gives() -> None:
    for more in ({}, {"max_steps": 9}, {"epochs": 3}):
        given = json.dumps({**LOCAL, **more})
        assert spending_of(given) == Spending("example", "clients", (Steps(2.0, 0.1, 1),))
    assert spending_inside(inside()) is None, "the values for the task tell what it spends"


def test_no_second_update_of_one_sample_leaves() -> None:
    of_examples, accounts = budget(unit="example"), Accounts([])
    step = Charge("example", (Steps(2.0, 0.1, 1),), "clients", "a")
    assert not charged(accounts, work(), step, of_examples)
    assert not left(accounts, work(), "first", of_examples)
    assert not left(accounts, work(), "first", of_examples), "the same bytes again"
    fault = left(accounts, work(), "second", of_examples)
    assert fault.startswith("another update of round 1, of the sample of examples of the one that has left")
    own = Charge("example", (Steps(2.0, 0.1, 1),), "site", "b")
    assert not charged(accounts, work(2), own, of_examples)
    assert not left(accounts, work(2), "first of 2", of_examples)
    assert not left(accounts, work(2), "second of 2", of_examples), "noise of its own is charged again"
