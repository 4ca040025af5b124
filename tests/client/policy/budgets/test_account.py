"""The account of a data set: what a charge spends, repetitions, updates that leave, and policies that change."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.client.policy.budgets.account import Accounts, leaving, needed
from atoll.client.policy.budgets.charge import Charge, Work, spent_by
from atoll.client.policy.budgets.entries import Charged, Closed, Content, Entry, Left, Opened
from atoll.client.policy.config import DataBudget
from atoll.protocol.privacy import gaussian
from atoll.protocol.privacy.composition import Steps

NAME = "mri-2026"


def budget(epsilon_max: float = 8.0, unit: Any = "client", name: str = NAME, delta: float = 1e-6) -> DataBudget:
    return DataBudget(name=name, tasks=["mri:*"], epsilon_max=epsilon_max, delta=delta, unit=unit)


def charge(z: float = 4.0, content: str = "a", unit: Any = "client", rate: float = 1.0, steps: int = 1) -> Charge:
    return Charge(unit, (Steps(z, rate, steps),), "coordinator" if unit == "client" else "site", content)


def work(round_: int = 1, run: str = "digits-1", agent: str = "f" * 32) -> Work:
    return Work(agent, "localhost:7070", run, round_, "mri:task")


def add(accounts: Accounts, entries: list[Entry]) -> Accounts:
    for entry in entries:
        accounts.add(entry)
    assert not accounts.fault
    return accounts


def charged(accounts: Accounts, at: Work, what: Charge, limit: DataBudget | None = None) -> str:
    entries, fault = needed(accounts, [limit or budget()], at, what, 1.0)
    add(accounts, entries)
    return fault


def left(accounts: Accounts, at: Work, update: str, limit: DataBudget | None = None) -> str:
    entries, fault = leaving(accounts, [limit or budget()], at, update, 2.0)
    add(accounts, entries)
    return fault


def test_uses_fit_until_the_budget_is_spent_by_the_exact_account() -> None:
    accounts, fits = Accounts([]), gaussian.uses_within(8.0, 1e-6, 4.0)
    for round_ in range(1, fits + 1):
        assert not charged(accounts, work(round_), charge(content=str(round_)))
        assert accounts.account(NAME).uses_left(budget()) == fits - round_
    fault = charged(accounts, work(fits + 1), charge(content="more"))
    assert fault.startswith("the budget of data set 'mri-2026' is spent: epsilon ")
    assert accounts.account(NAME).spent(budget()) == gaussian.epsilon_of(math.sqrt(fits) / 4.0, 1e-6) <= 8.0


def test_the_same_work_is_charged_once_until_an_update_of_it_leaves() -> None:
    accounts = Accounts([])
    assert not charged(accounts, work(), charge())
    spent = accounts.account(NAME).spent(budget())
    assert needed(accounts, [budget()], work(), charge(), 3.0) == ([], "")
    assert not left(accounts, work(), "u")
    assert leaving(accounts, [budget()], work(), "u", 3.0) == ([], ""), "the same bits may leave again"
    assert accounts.account(NAME).spent(budget()) == spent
    assert not charged(accounts, work(), charge())
    assert accounts.account(NAME).spent(budget()) > spent, "another training of the same work"


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (work(2), charge()),
        (work(run="digits-2"), charge()),
        (work(agent="e" * 32), charge()),
        (work(), charge(content="b")),
        (work(), charge(z=5.0)),
    ],
)
def test_any_other_work_is_charged_again(at: Work, what: Charge) -> None:
    accounts = Accounts([])
    assert not charged(accounts, work(), charge())
    assert [entry.kind for entry in needed(accounts, [budget()], at, what, 3.0)[0]] == ["charged"]


def test_another_update_of_a_round_is_charged_again_and_refused_when_the_budget_is_spent() -> None:
    limit = budget(epsilon_max=2.1)  # two uses of z = 4 are 1.58, three are 1.98, four 2.33
    accounts = Accounts([])
    assert not charged(accounts, work(), charge(), limit)
    for number, update in enumerate("uvw", 1):
        assert not left(accounts, work(), update, limit)
        assert len(accounts.account(NAME).charges) == number
    assert "another update of round 1: the budget" in left(accounts, work(), "x", limit)
    assert not left(accounts, work(), "v", limit), "what has left may leave again"


def test_an_update_that_was_not_charged_does_not_leave() -> None:
    assert "was not charged to data set 'mri-2026'" in left(Accounts([]), work(), "u")
    accounts = Accounts([])
    charged(accounts, work(), charge())
    assert "was not charged" in left(accounts, work(2), "u")


def test_a_guarantee_for_clients_counts_half_its_noise_for_an_example_and_one_for_examples_nothing_for_clients() -> (
    None
):
    assert spent_by(charge(4.0), "example") == (Steps(2.0, 1.0, 1),)
    assert spent_by(charge(4.0), "client") == (Steps(4.0, 1.0, 1),)
    of_examples = charge(1.1, unit="example", rate=0.01, steps=100)
    assert spent_by(of_examples, "example") == of_examples.steps
    assert "bounds nothing for all of a site's data" in charged(Accounts([]), work(), of_examples)


def test_charges_of_both_units_compose_for_one_example() -> None:
    limit, accounts = budget(unit="example"), Accounts([])
    assert not charged(accounts, work(1), charge(4.0), limit)
    assert not charged(accounts, work(2), charge(1.5, unit="example", rate=0.04, steps=100), limit)
    assert accounts.account(NAME).kinds == {(2.0, 1.0): 1, (1.5, 0.04): 100}


@pytest.mark.parametrize(
    ("changed", "allows"),
    [
        (budget(), True),
        (budget(epsilon_max=4.0), True),
        (budget(delta=1e-7), True),
        (budget(epsilon_max=8.1), False),
        (budget(delta=2e-6), False),
        (budget(unit="example"), False),
    ],
)
def test_a_budget_may_be_lowered_and_never_raised(changed: DataBudget, allows: bool) -> None:
    accounts = Accounts([])
    charged(accounts, work(), charge())
    fault = charged(accounts, work(2), charge(), changed)
    assert (not fault) is allows
    assert (not left(accounts, work(), "u", changed)) is allows
    if not allows:
        assert "a budget may be lowered, and a new budget is a new name" in fault
        assert not charged(accounts, work(), charge(), budget(epsilon_max=9.0, name="mri-2027"))


def test_a_closed_name_allows_nothing_and_a_new_one_does() -> None:
    accounts = add(Accounts([]), [Entry(NAME, Closed(1.0))])
    assert "a new budget is a new name" in charged(accounts, work(), charge())
    assert "a new budget is a new name" in left(accounts, work(), "u")
    assert accounts.account(NAME).uses_left(budget()) == 0
    assert not charged(accounts, work(), charge(), budget(name="mri-2027"))


def test_a_task_of_two_data_sets_is_charged_to_both_or_to_none() -> None:
    accounts, both = Accounts([]), [budget(), budget(epsilon_max=0.5, name="small")]
    assert "'small' is spent" in needed(accounts, both, work(), charge(), 1.0)[1]
    entries, fault = needed(accounts, [budget(), budget(name="second")], work(), charge(), 1.0)
    assert not fault
    assert [(entry.data, entry.kind) for entry in entries] == [
        (name, kind) for name in (NAME, "second") for kind in ("opened", "charged")
    ]


def test_entries_without_a_place_are_a_fault() -> None:
    opened, spent = Opened(8.0, 1e-6, "client"), Charged(1.0, work(), charge())
    stories: list[list[Content]] = [
        [spent],
        [opened, opened],
        [opened, Left(1.0, 1, "u")],
        [opened, spent, Left(1.0, 2, "u"), Left(1.0, 2, "v")],
        [opened, Charged(1.0, work(), charge(unit="example"))],
    ]
    for entries in stories:
        assert "has no place" in Accounts(Entry(NAME, content) for content in entries).fault


steps = st.one_of(
    st.tuples(st.just("train"), st.integers(1, 3), st.sampled_from("ab"), st.floats(1.0, 9.0)),
    st.tuples(st.just("leave"), st.integers(1, 3), st.sampled_from("uvw"), st.just(0.0)),
)


@settings(max_examples=200, deadline=None)
@given(story=st.lists(steps, max_size=25), epsilon=st.floats(0.5, 6.0))
def test_what_is_spent_never_falls_and_is_never_above_the_budget(story: list[Any], epsilon: float) -> None:
    accounts, limit, before = Accounts([]), budget(epsilon_max=epsilon), 0.0
    released: dict[tuple[int, str], int] = {}
    for what, round_, name, z in story:
        if what == "train":
            charged(accounts, work(round_), charge(z=z, content=name), limit)
        elif not left(accounts, work(round_), name, limit):
            released[round_, name] = 1
        spent = accounts.account(NAME).spent(limit)
        assert before <= spent <= epsilon
        before = spent
    account = accounts.account(NAME)
    assert len(account.updates) == len(released), "each update that left has a charge of its own"
