"""`atoll site budgets`: what was spent of the privacy budgets of a site's data, by which runs, and what is left."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.members.site import State, folder_of
from atoll.cli.printing import as_json, clock, note, table
from atoll.cli.waiting import waiting_for
from atoll.operations.faults import CommandError

if TYPE_CHECKING:
    from atoll.client.policy.budgets.report import BudgetSpent

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
    from atoll.operations.lost_ledger import privacy_of

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
