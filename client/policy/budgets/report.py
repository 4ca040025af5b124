"""What a person reads of a site's budgets: spent, by which runs, what is left, and what is refused. Read only."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from atoll.client.policy.budgets.account import Accounts, DataAccount
from atoll.client.policy.budgets.charge import spent_by
from atoll.client.policy.budgets.entries import Opened
from atoll.client.policy.budgets.ledger import Ledger
from atoll.client.policy.config import DataBudget
from atoll.client.policy.database import NAME, HistoryUnusable, PolicyDatabase
from atoll.protocol.privacy.composition import epsilon_of, kinds_of
from atoll.protocol.privacy.guarantee import Unit


@dataclass(frozen=True, slots=True)
class RunSpent:
    """The charges of one run.

    Attributes:
        charges: their number.
        epsilon: of these charges alone; those of several runs compose to less than their sum.
        last_at: instant of the last one [s since the epoch].
    """

    run: str
    coordinator: str
    task: str
    charges: int
    epsilon: float
    last_at: float


@dataclass(frozen=True, slots=True)
class BudgetSpent:
    """The budget of one data set.

    Attributes:
        tasks: patterns of the policy; empty: the policy does not have the name.
        spent: epsilon of all charges at delta.
        accountant: the formula of `spent`, in words.
        uses_left: how often the newest terms still fit; None: nothing was charged.
        refused: why nothing, or not what was charged last, is allowed any more; empty: it is.
    """

    data: str
    tasks: tuple[str, ...]
    unit: Unit
    epsilon_max: float
    delta: float
    spent: float
    accountant: str
    charges: int
    uses_left: int | None
    last_at: float | None
    refused: str
    runs: tuple[RunSpent, ...]


def read_budgets(path: Path, folder: Path, data: Iterable[DataBudget], *, read_only: bool = False) -> list[BudgetSpent]:
    """Return the budgets of a ledger: those of the policy first, then names that the policy does not have.

    Args:
        path: the folder of the ledger.
        folder: the agent's state directory.
        data: of the policy; none: the budgets are those that the ledger has recorded.
        read_only: whether the schema of the file stays, too.

    Raises:
        HistoryUnusable: the ledger is damaged, or cannot be read.
    """
    if not (path / NAME).is_file():
        return [_summary(DataAccount(), budget, is_known=True) for budget in data]
    with closing(PolicyDatabase(path, read_only=read_only)) as database:
        ledger = Ledger(database, folder)
        accounts = ledger.read()
    if ledger.fault:
        raise HistoryUnusable(ledger.fault)
    return budgets_spent(accounts, data)


def budgets_spent(accounts: Accounts, data: Iterable[DataBudget]) -> list[BudgetSpent]:
    """Return the budgets of accounts; arguments and order as in `read_budgets`."""
    by_name = {budget.name: budget for budget in data}
    found = [_summary(accounts.account(name), budget, is_known=True) for name, budget in by_name.items()]
    for name in accounts.names():
        if name in by_name:
            continue
        opened = accounts.account(name).opened or Opened(1.0, 0.5, "client")  # closed before it was charged
        budget = DataBudget(
            name=name, tasks=["-"], epsilon_max=opened.epsilon_max, delta=opened.delta, unit=opened.unit
        )
        found.append(_summary(accounts.account(name), budget, is_known=not by_name))
    return found


def _summary(account: DataAccount, budget: DataBudget, *, is_known: bool) -> BudgetSpent:
    uses_left = account.uses_left(budget) if account.charges else None
    newest = max(account.charges, default=0)
    refused = account.fault_of(budget)
    if not refused and not is_known:
        refused = "the policy has no budget of this name, so that nothing guards its data"
    if not refused and uses_left == 0:
        refused = account.objection(budget, account.charges[newest].charge)
    return BudgetSpent(
        data=budget.name,
        tasks=tuple(budget.tasks) if is_known else (),
        unit=budget.unit,
        epsilon_max=budget.epsilon_max,
        delta=budget.delta,
        spent=account.spent(budget),
        accountant=account.accountant(budget),
        charges=len(account.charges),
        uses_left=uses_left,
        last_at=account.charges[newest].at if newest else None,
        refused=refused,
        runs=tuple(_runs(account, budget)),
    )


def _runs(account: DataAccount, budget: DataBudget) -> Iterable[RunSpent]:
    by_run: dict[tuple[str, str, str], list[int]] = {}
    for number, charged in account.charges.items():
        work = charged.work
        by_run.setdefault((work.run, work.coordinator, work.task), []).append(number)
    unit = budget.unit if account.opened is None else account.opened.unit
    for (run, coordinator, task), numbers in by_run.items():
        charges = [account.charges[number] for number in numbers]
        kinds = kinds_of(part for each in charges for part in spent_by(each.charge, unit))
        epsilon = epsilon_of(kinds, budget.delta)[0]
        yield RunSpent(run, coordinator, task, len(charges), epsilon, max(each.at for each in charges))
