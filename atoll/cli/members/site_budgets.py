"""`atoll site budgets`: what was spent of the privacy budgets of a site's data, by which runs, and what is left."""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.members.site import State, folder_of
from atoll.cli.printing import as_json, clock, note, say, table
from atoll.cli.waiting import waiting_for
from atoll.operations.faults import CommandError

if TYPE_CHECKING:
    from atoll.client.policy.budgets.report import BudgetSpent
    from atoll.client.policy.config import PrivacyPolicy

Policy = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        metavar="FILE",
        help="The site's policy, with the budgets; by default those of the ledger are shown.",
    ),
]


def budgets(policy: Policy = None, state: State = None, json: options.Json = False) -> None:
    """Show the privacy budgets of this site's data: spent, by run, and what is left; it changes nothing.

    The epsilon of a run is that of its charges alone: together they are less than the sum. `uses left` is how often
    what was charged last still fits. A budget is never raised: a new budget is a new name in the policy.
    """
    from atoll.client.policy.budgets.report import read_budgets
    from atoll.client.policy.database import BUSY_S, NAME, HistoryUnusable

    folder = folder_of(state)
    of_site = privacy_of(policy)
    path = Path(of_site.ledger) if of_site is not None and of_site.ledger else folder
    with waiting_for(f"the lock of {path / NAME}", f"up to {BUSY_S:g} s"):
        try:
            found = read_budgets(path, folder, [] if of_site is None else of_site.data)
        except HistoryUnusable as error:
            raise CommandError(str(error)) from None
    if json:
        as_json({"ledger": str(path / NAME), "budgets": [asdict(each) for each in found]})
        return
    table(
        ["data", "unit", "run", "charges", "epsilon", "of", "delta", "uses left", "last charge"],
        _rows(found),
        empty="no data of this site has a budget: [[privacy.data]] of its policy gives one",
    )
    for each in found:
        if each.refused:
            note(f"{each.data}: {each.refused}")


def _rows(found: "list[BudgetSpent]") -> Iterator[tuple[object, ...]]:
    for each in found:
        left = "-" if each.uses_left is None else each.uses_left
        numbers = (each.charges, f"{each.spent:.6g}", f"{each.epsilon_max:g}", f"{each.delta:g}")
        yield (each.data, each.unit, "all", *numbers, left, clock(each.last_at))
        for run in each.runs:
            of_run = (run.charges, f"{run.epsilon:.6g}", "-", "-", "-", clock(run.last_at))
            yield (each.data, each.unit, f"{run.run} ({run.coordinator})" if run.coordinator else run.run, *of_run)


def privacy_of(policy: Path | None) -> "PrivacyPolicy | None":
    """Return the budgets of a policy file; None: there is no file.

    Raises:
        ConfigError: the file is not valid; all faults.
    """
    from atoll.client.policy.file import PolicyFile

    if policy is None:
        return None
    site = PolicyFile(policy).policy
    return None if site is None else site.privacy


def close_budgets(policy: Path | None, state: Path | None, *, json: bool) -> None:
    """Begin a new ledger after a loss, in which all known names are closed, and print them.

    Raises:
        CommandError: the ledger cannot be used at all.
        ConfigError: the agent runs, or the policy is not valid.
    """
    from atoll.client.disk.state_directory import StateDirectory
    from atoll.client.policy.budgets.ledger import Ledger
    from atoll.client.policy.database import HistoryUnusable, PolicyDatabase
    from atoll.operations.local_audit import record_at_site

    folder, of_site = folder_of(state), privacy_of(policy)
    path = Path(of_site.ledger) if of_site is not None and of_site.ledger else folder
    names = [] if of_site is None else [budget.name for budget in of_site.data]
    with closing(StateDirectory(folder)):
        try:
            with closing(PolicyDatabase(path)) as database:
                closed = Ledger(database, folder).close_names(names, time.time())
        except HistoryUnusable as error:
            raise CommandError(str(error)) from None
    for name in closed:
        record_at_site(folder, "site.budget_closed", name, "its ledger was lost: all of its budget counts as spent")
    if json:
        as_json({"closed": closed})
        return
    for name in closed:
        say(name)
    note("these data sets allow nothing any more: give each a new name in the policy, which begins a new budget")
