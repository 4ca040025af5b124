"""`atoll site budgets`: what was spent of the privacy budgets of a site's data, by which runs, and what is left."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.members.site import State
from atoll.cli.printing import as_json, clock, note, table
from atoll.operations.sites import agent_folder, budgets_at

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
    found = budgets_at(agent_folder(state), policy)
    if json:
        as_json(found)
        return
    table(
        ["data", "unit", "run", "charges", "epsilon", "of", "delta", "uses left", "last charge"],
        _rows(found["budgets"]),
        empty="no data of this site has a budget: [[privacy.data]] of its policy gives one",
    )
    for each in found["budgets"]:
        if each["refused"]:
            note(f"{each['data']}: {each['refused']}")


def _rows(found: Iterable[Mapping[str, Any]]) -> Iterator[tuple[object, ...]]:
    for each in found:
        left = "-" if each["uses_left"] is None else each["uses_left"]
        numbers = (each["charges"], f"{each['spent']:.6g}", f"{each['epsilon_max']:g}", f"{each['delta']:g}")
        yield (each["data"], each["unit"], "all", *numbers, left, clock(each["last_at"]))
        for run in each["runs"]:
            of_run = (run["charges"], f"{run['epsilon']:.6g}", "-", "-", "-", clock(run["last_at"]))
            name = f"{run['run']} ({run['coordinator']})" if run["coordinator"] else run["run"]
            yield (each["data"], each["unit"], name, *of_run)
