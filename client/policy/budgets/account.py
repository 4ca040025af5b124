"""The account of a site's data sets: the sum of the entries of its ledger. Pure.

allowed    if all steps that were charged to the name, and those of the charge, have (epsilon_max, delta)
repeated   the same work of the same round, of which no update has left: it has been charged
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from atoll.client.policy.budgets.charge import Charge, Work, spent_by
from atoll.client.policy.budgets.entries import Charged, Closed, Entry, Left, Opened
from atoll.client.policy.config import DataBudget
from atoll.ground.printable import count_of
from atoll.protocol.privacy.composition import epsilon_of, is_within, kinds_of, uses_within, with_uses
from atoll.protocol.privacy.guarantee import EXACT


@dataclass(slots=True)
class DataAccount:
    """The account of one name.

    Attributes:
        opened: its budget when it was first charged; None: it has not been.
        charges: all of them, by the numbers of their entries.
        updates: of each charge the update that has left; without one its work may be repeated.
        kinds: number of steps of each kind, in the unit of the budget.
        is_closed: whether its ledger was lost.
    """

    opened: Opened | None = None
    charges: dict[int, Charged] = field(default_factory=dict)
    updates: dict[int, str] = field(default_factory=dict)
    kinds: dict[tuple[float, float], int] = field(default_factory=dict)
    is_closed: bool = False

    def add(self, number: int, entry: Entry) -> bool:
        """Take in an entry; return whether it has a place in the account."""
        match entry.content:
            case Opened() as opened:
                if self.opened is not None:
                    return False
                self.opened = opened
            case Charged() as charged:
                if self.opened is None:
                    return False
                try:
                    parts = spent_by(charged.charge, self.opened.unit)
                except ValueError:
                    return False
                self.kinds = with_uses(self.kinds, kinds_of(parts))
                self.charges[number] = charged
            case Left(_, charged_by, update):
                if charged_by not in self.charges or charged_by in self.updates:
                    return False
                self.updates[charged_by] = update
            case Closed():
                self.is_closed = True
        return True

    def is_charged(self, work: Work, charge: Charge) -> bool:
        """Return whether work repeats what has been charged, so that it spends nothing more."""
        return any(
            (charged.work, charged.charge) == (work, charge) and number not in self.updates
            for number, charged in self.charges.items()
        )

    def of_round(self, work: Work) -> Iterator[tuple[int, Charged]]:
        """Yield the charges of a round, with their numbers; the task of an update may be unknown."""
        wanted = work.agent, work.run, work.round
        for number, charged in self.charges.items():
            if (charged.work.agent, charged.work.run, charged.work.round) == wanted:
                yield number, charged

    def objection(self, budget: DataBudget, charge: Charge) -> str:
        """Return why the budget does not allow a charge; empty: it does."""
        if fault := self.fault_of(budget):
            return fault
        of = f"data set {budget.name!r}"
        try:
            kinds = self.kinds_after(budget, charge)
        except ValueError as error:
            return f'{of} has a budget for the whole of it (unit = "client"): {error}'
        if is_within(kinds, budget.epsilon_max, budget.delta):
            return ""
        spent, wanted = self.spent(budget), epsilon_of(kinds, budget.delta)[0]
        return (
            f"the budget of {of} is spent: epsilon {spent:.6g} of {budget.epsilon_max:g} at delta {budget.delta:g}, "
            f"and with this training {wanted:.6g}"
        )

    def kinds_after(self, budget: DataBudget, charge: Charge, times: int = 1) -> dict[tuple[float, float], int]:
        """Return the number of steps of each kind after a charge, or several; raises ValueError as `spent_by`."""
        return with_uses(self.kinds, kinds_of(spent_by(charge, budget.unit)), times)

    def fault_of(self, budget: DataBudget) -> str:
        """Return why a name allows nothing, whatever is charged: it is closed, or was raised; empty: it may."""
        if self.is_closed:
            of = f"data set {budget.name!r}"
            return f"the ledger of {of} was lost, so that all of its budget counts as spent: a new budget is a new name"
        if (opened := self.opened) is None:
            return ""
        is_less = budget.epsilon_max <= opened.epsilon_max and budget.delta <= opened.delta
        if is_less and budget.unit == opened.unit:
            return ""
        return (
            f"data set {budget.name!r} was charged under epsilon_max = {opened.epsilon_max:g}, delta = "
            f'{opened.delta:g}, unit = "{opened.unit}", and the policy has {budget.epsilon_max:g}, {budget.delta:g}, '
            f'"{budget.unit}": a budget may be lowered, and a new budget is a new name'
        )

    def spent(self, budget: DataBudget | Opened) -> float:
        """Return epsilon of what was charged, at the budget's delta."""
        return epsilon_of(self.kinds, budget.delta)[0] if self.kinds else 0.0

    def accountant(self, budget: DataBudget | Opened) -> str:
        """Return the formula of `spent`, in words."""
        return epsilon_of(self.kinds, budget.delta)[1] if self.kinds else EXACT

    def uses_left(self, budget: DataBudget) -> int:
        """Return how often the newest charge could be repeated within the budget."""
        if not self.charges or self.fault_of(budget):
            return 0
        newest = self.charges[max(self.charges)].charge
        return uses_within(self.kinds, spent_by(newest, budget.unit), budget.epsilon_max, budget.delta)


class Accounts:
    """The accounts of all names in a ledger.

    Args:
        entries: of the ledger, in order.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.of: dict[str, DataAccount] = {}
        self.fault = ""
        """Sentence about an entry without a place; empty: all have one."""
        self.num_entries = 0
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Take in the next entry."""
        self.num_entries += 1
        if not self.account(entry.data).add(self.num_entries, entry) and not self.fault:
            self.fault = f"entry {self.num_entries} of its budgets ({entry.kind}) has no place"

    def account(self, name: str) -> DataAccount:
        """Return the account of a name, which may be new."""
        return self.of.setdefault(name, DataAccount())

    def names(self) -> list[str]:
        """Return the names that were charged or closed."""
        return sorted(name for name, account in self.of.items() if account.opened is not None or account.is_closed)


def needed(
    accounts: Accounts, budgets: Iterable[DataBudget], work: Work, charge: Charge, at: float
) -> tuple[list[Entry], str]:
    """Return the entries with which a training is charged to all data sets that it reads, or why it is not allowed.

    No entries: it repeats what is charged, and spends nothing more.
    """
    entries: list[Entry] = []
    for budget in budgets:
        account = accounts.account(budget.name)
        if account.fault_of(budget) or not account.is_charged(work, charge):
            if fault := account.objection(budget, charge):
                return [], fault
            if account.opened is None:
                entries.append(Entry(budget.name, Opened(budget.epsilon_max, budget.delta, budget.unit)))
            entries.append(Entry(budget.name, Charged(at, work, charge)))
    return entries, ""


def leaving(
    accounts: Accounts, budgets: Iterable[DataBudget], work: Work, update: str, at: float
) -> tuple[list[Entry], str]:
    """Return the entries of an update that leaves, or why it may not.

    An update that has left may leave again. Another one of a round of which one has left spends as the round's newest
    training did: two noises on the same data tell more than one. Of a sample whose noise the clients share no other one
    may leave.
    """
    entries: list[Entry] = []
    number = accounts.num_entries
    for budget in budgets:
        account = accounts.account(budget.name)
        if fault := account.fault_of(budget):
            return [], fault
        charges = [*account.of_round(work)]
        if not charges:
            return [], (
                f"an update of round {work.round} that was not charged to data set {budget.name!r}: it was trained "
                "before there was a budget, or without one"
            )
        if any(account.updates.get(charged_by) == update for charged_by, _ in charges):
            continue
        open_ones = [charged_by for charged_by, _ in charges if charged_by not in account.updates]
        if not open_ones:
            again = charges[-1][1]
            if (again.charge.unit, again.charge.noise_by) == ("example", "clients"):
                return [], (
                    f"another update of round {work.round}, of the sample of examples of the one that has left: two "
                    "noises on one sample cost more than two steps"
                )
            if fault := account.objection(budget, again.charge):
                return [], f"another update of round {work.round}: {fault}"
            entries.append(Entry(budget.name, Charged(at, again.work, again.charge)))
            open_ones = [number + len(entries)]
        entries.append(Entry(budget.name, Left(at, open_ones[-1], update)))
    return entries, ""


def in_words(entry: Entry, account: DataAccount, budget: DataBudget) -> str:
    """Return a charge as a sentence for the site's log."""
    assert isinstance(entry.content, Charged)
    charge = entry.content.charge
    steps = sum(part.steps for part in charge.steps)
    by = {"coordinator": "the coordinator, which is trusted to add it", "clients": "the clients", "site": "this site"}
    return (
        f"charged to {budget.name}: {count_of(steps, 'step')} with a guarantee for one {charge.unit}, noise by "
        f"{by[charge.noise_by]}; spent now epsilon {account.spent(budget):.6g} of {budget.epsilon_max:g} at delta "
        f"{budget.delta:g} for one {budget.unit}"
    )
