"""The one place that decides whether a request on a data set with a budget is accounted, and that charges it.

A data set with a budget takes part in nothing else: a training whose run has no guarantee, one of other code than the
guarantee is for, a message of a server program, an evaluation, statistics, or an update that was not charged.
"""

import hashlib
import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from atoll.client.disk.fresh_bytes import FreshBytes, name_of
from atoll.client.policy.budgets.account import in_words, leaving, needed
from atoll.client.policy.budgets.charge import Charge, Work
from atoll.client.policy.budgets.entries import Charged
from atoll.client.policy.budgets.ledger import Ledger
from atoll.client.policy.budgets.terms import spending_inside, spending_of
from atoll.client.policy.config import DataBudget, PrivacyPolicy
from atoll.client.policy.database import HistoryUnusable, PolicyDatabase
from atoll.client.policy.decide import Kind, PolicyRequest
from atoll.ground.folder_id import folder_id
from atoll.ground.folders import in_words as error_in_words
from atoll.protocol.privacy.composition import Kinds
from atoll.protocol.vocabulary import RoundId, RunId

ALGORITHMS = ("fedavg", "fedprox")
"""Algorithms whose updates a guarantee covers; others send more than a clipped update, or gradients without noise."""


class SiteBudgets:
    """Budgets of one site, for its agent of one coordinator.

    Args:
        database: of the agent, which has the ledger unless the policy names another folder.
        folder: the agent's state directory.
        coordinator: the place that receives updates, for the record.
        noise: name of the secret of this agent's noise (not the secret): with another one the noise is another.

    Raises:
        OSError: the id of the state directory cannot be read or written.
        HistoryUnusable: from every method, when the ledger cannot be used.
    """

    def __init__(self, database: PolicyDatabase, folder: Path, *, coordinator: str, noise: str) -> None:
        self._database, self._folder, self._fresh = database, folder, FreshBytes(folder)
        self._agent, self._coordinator, self._noise = folder_id(folder), coordinator, noise
        self._ledger: Ledger | None = None
        self._path = ""
        self._shared: PolicyDatabase | None = None

    def close(self) -> None:
        """Close the ledger of another folder than the agent's."""
        if self._shared is not None:
            self._shared.close()
        self._ledger = self._shared = None

    def fault(self, policy: PrivacyPolicy) -> str:
        """Return the sentence about a ledger that allows nothing; empty: it is whole, or there are no budgets."""
        if not policy.data:
            return ""
        ledger = self._opened(policy)
        ledger.read()
        return ledger.fault

    def names_without_policy(self, policy: PrivacyPolicy) -> list[str]:
        """Return the names with charges that the policy does not have any more, so that nothing guards their data."""
        known = {budget.name for budget in policy.data}
        return [name for name in self._opened(policy).read().names() if name not in known]

    def is_free(self, policy: PrivacyPolicy, request: PolicyRequest) -> bool:
        """Return whether a request is known to read no data with a budget."""
        return not self._budgets(policy, request)

    def objection(self, policy: PrivacyPolicy, request: PolicyRequest) -> str:
        """Return why a request is not allowed by the budgets of the data that it reads; empty: it is."""
        if not policy.data:
            return ""
        budgets = self._budgets(policy, request)
        if isinstance(budgets, str):
            return budgets
        if not budgets:
            return ""
        accounts = self._opened(policy).read()
        if request.kind is Kind.UPLOAD:
            return leaving(accounts, budgets, self._work(request), request.content, 0.0)[1]
        try:
            charge = self._charge_of(request, self._fresh.name_of(*_of_fresh(request)))
        except ValueError as error:
            names = ", ".join(repr(budget.name) for budget in budgets)
            return f"data set {names} has a budget, and takes part in nothing that is not accounted: {error}"
        return needed(accounts, budgets, self._work(request), charge, 0.0)[1]

    def accounts_ahead(self, policy: PrivacyPolicy, request: PolicyRequest) -> list[tuple[Kinds, float]]:
        """Return the steps and delta of each account that a training needs: with its charge, and with one more like it.

        `composition.epsilon_of` keeps its results, so a thread can find them before the event loop asks: epsilon after
        the charge is for the log, and epsilon after one more decides whether a further round is allowed.
        """
        budgets = self._budgets(policy, request) if policy.data else []
        if isinstance(budgets, str) or not budgets:
            return []
        accounts = self._opened(policy).read()
        try:
            charge = self._charge_of(request, "")
            return [
                (accounts.account(budget.name).kinds_after(budget, charge, times), budget.delta)
                for budget in budgets
                for times in (1, 2)
            ]
        except ValueError:  # it is refused
            return []

    def charge(self, policy: PrivacyPolicy, request: PolicyRequest, now: float) -> tuple[list[str], str]:
        """Charge a training before its first step, or an update before its first byte; durable on return.

        Args:
            policy: the site's budgets.
            request: to train or to upload, which all other rules allow.
            now: seconds since the epoch.

        Returns:
            A sentence for each charge; or, with the second part, why it is not allowed.
        """
        budgets = self._budgets(policy, request) if policy.data else []
        if isinstance(budgets, str):
            return [], budgets
        if not budgets:
            return [], ""
        ledger, work = self._opened(policy), self._work(request)
        if request.kind is Kind.UPLOAD:
            update = request.content
            entries, fault = ledger.change(lambda accounts: leaving(accounts, budgets, work, update, now))
        else:
            try:
                charge = self._charge_of(request, name_of(self._fresh.made(*_of_fresh(request))))
            except ValueError as error:
                return [], str(error)
            entries, fault = ledger.change(lambda accounts: needed(accounts, budgets, work, charge, now))
        by_name = {budget.name: budget for budget in budgets}
        accounts = ledger.read()
        told = [
            in_words(entry, accounts.account(entry.data), by_name[entry.data])
            for entry in entries
            if isinstance(entry.content, Charged)
        ]
        return told, fault

    def _budgets(self, policy: PrivacyPolicy, request: PolicyRequest) -> list[DataBudget] | str:
        """Return the data sets that a request reads, or why they are not known.

        An update is of those that its round was charged to, too, whatever task the run has asked for since.
        """
        found = budgets_of(policy.data, request.task) if request.task else []
        if request.kind is Kind.UPLOAD:
            accounts, work = self._opened(policy).read(), self._work(request)
            charged = [budget for budget in policy.data if any(accounts.account(budget.name).of_round(work))]
            found += [budget for budget in charged if budget not in found]
        if found or request.task:
            return found
        return f"an update of round {request.number} of a run that this site does not know any more"

    def _charge_of(self, request: PolicyRequest, fresh: str) -> Charge:
        """Return what a training spends.

        Args:
            request: to train.
            fresh: name of the fresh bytes of its noise; empty: they are not drawn yet.

        Raises:
            ValueError: it is not accounted; the message says why.
        """
        if request.kind is Kind.EVALUATE:
            raise ValueError("an evaluation by its clients, whose metrics have no noise")
        if request.kind is Kind.STATISTICS:
            raise ValueError("statistics, which have no noise")
        if request.action:
            raise ValueError("a message of a server program (a Flower app that is hosted), whose replies have no noise")
        try:
            inside = None if request.terms is None else spending_inside(request.terms)
            spending = inside or spending_of(request.local or "{}")
        except ValueError as error:
            raise ValueError(f"a training {error}") from None
        if inside is None and request.terms is not None and spending.unit == "client":
            raise ValueError("a training in a secure sum without noise, to which metrics are added as they are")
        if request.algorithm not in ALGORITHMS:
            raise ValueError(f"a training with algorithm {request.algorithm!r}: allowed are {', '.join(ALGORITHMS)}")
        named = json.dumps([request.content, self._noise, fresh])
        content = hashlib.sha256(named.encode()).hexdigest()
        return Charge(spending.unit, spending.steps, spending.noise_by, content)

    def _work(self, request: PolicyRequest) -> Work:
        return Work(self._agent, self._coordinator, request.run_id, request.number, request.task)

    def _opened(self, policy: PrivacyPolicy) -> Ledger:
        if self._ledger is not None and self._path == policy.ledger:
            return self._ledger
        self.close()
        self._path = policy.ledger
        database = self._database
        if policy.ledger:
            folder = Path(policy.ledger)
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise HistoryUnusable(f"privacy.ledger: {folder} cannot be made: {error_in_words(error)}") from error
            database = self._shared = PolicyDatabase(folder)
        self._ledger = Ledger(database, self._folder)
        return self._ledger


def _of_fresh(request: PolicyRequest) -> tuple[RunId, RoundId, str]:
    """Return the work whose noise has fresh bytes."""
    return RunId(request.run_id), RoundId(request.number), request.content


def budgets_of(data: Iterable[DataBudget], task: str) -> list[DataBudget]:
    """Return the data sets that a task reads."""
    return [budget for budget in data if any(fnmatchcase(task, pattern) for pattern in budget.tasks)]
