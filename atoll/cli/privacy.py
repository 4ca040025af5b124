"""`atoll privacy ...`: plan differential privacy before a run, audit its claim, and show the guarantee of a run."""

from typing import TYPE_CHECKING

import typer

from atoll.cli import options
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, say, table
from atoll.cli.requested import requested
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.place import STATE
from atoll.operations.requests import PrivacyAuditRequest, PrivacyPlanRequest
from atoll.operations.views import read_view
from atoll.protocol.paging import Paging
from atoll.protocol.signals import ExitCode

if TYPE_CHECKING:
    from atoll.operations.privacy.plan import PrivacyPlan
    from atoll.operations.privacy.preview import Preview
    from atoll.operations.privacy.rounds import Rounds

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Plan differential privacy, audit a claim, or show a run's guarantee."
)


@app.command()
@requested(PrivacyPlanRequest)
def plan(request: PrivacyPlanRequest, json: options.Json = False) -> None:
    """Compute the noise for an epsilon, the epsilon of a noise, or the uses within a budget. Nothing is run.

    With `--cohort-size` and `--values` also what the noise does to the mean of a round. For clients the account is
    exact; for examples the package dp-accounting computes it (extra `privacy`), or a built-in upper bound.
    `docs/privacy.md` explains every number.
    """
    from atoll.operations.privacy import plan as operation

    planned = operation.plan(request)
    if json:
        as_json(planned.document)
        return
    _say(planned)


@app.command()
@requested(PrivacyAuditRequest)
def audit(request: PrivacyAuditRequest, json: options.Json = False) -> None:
    """Audit a claim: find a lower bound of epsilon by canaries, each of which takes part with probability 1/2.

    For clients, canary updates are clipped, summed and noised by the coordinator's fold. For examples, the task is
    trained as by `atoll train`, with rows of its data as canaries. Exit code 0: nothing speaks against the claim; 1: it
    does not hold. `docs/privacy.md` says what no audit sees.
    """
    from atoll.operations.privacy import audit as operation

    found = operation.audit(request)
    if json:
        as_json(found.document)
    else:
        rows = [
            ("claim", f"epsilon {found.claim:.4f} at delta {found.delta:g} for one {found.unit}: {found.audited}"),
            ("lower bound", f"epsilon {found.best.bound:.4f}"),
            ("canaries", f"{found.canaries}, of which {found.canaries_in} took part"),
            ("guesses", f"{found.best.right} of {found.best.guesses} are right, by the {found.best.score}"),
        ]
        table(["audit", ""], rows, empty="")
        for sentence in found.sentences:
            say(sentence)
    if not found.holds:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def show(
    run: options.RunArgument,
    state: options.State = STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """Show the guarantee of what a run has released so far, in one whole sentence, and what is left of its budget.

    A simulation has none: its noise follows from its seed.
    """
    found = read_view("run", state, database, run=run, paging=Paging(bare=True))["document"].get("privacy")
    if found is None:
        raise CommandError(f"{run} has no guarantee: its settings have no table [privacy], see docs/privacy.md")
    if json:
        as_json(found)
        return
    say(found["sentence"])
    say(
        f"budget: epsilon {found['epsilon_max']:g}; {found['clients_with_budget']} of "
        f"{count_of(found['clients'], 'client')} may be in a further sum, in at most {found['participations_max']} each"
    )
    if waiting := found.get("waiting"):  # an older coordinator elsewhere shows none
        say(waiting)


def _say_rounds(found: "Rounds") -> None:
    """Print what a round needs and allows, and the mean of fewer updates."""
    for sentence in found.sentences:
        say(sentence)
    if len(found.by_survivors) > 1:
        say("")
        rows = [
            (each.updates, f"{each.length:.3g}", f"{each.noise:.3g}", f"{each.noise / each.length:.3g}")
            for each in found.by_survivors
        ]
        table(["updates in a sum", "longest mean", "its noise", "noise over mean"], rows, empty="")


def _say_preview(found: "Preview") -> None:
    """Print the last values of both simulated runs, after the reader knows that they protect nothing."""
    say("")
    say(f"simulated: {found.sentence}")
    private, plain = found.last
    spent = "-" if found.epsilon is None else f"{found.epsilon:.4f}"
    rows = [("the plan", len(found.private), private, spent), ("without privacy", len(found.plain), plain, "-")]
    table(["preview", "rounds", found.metric, "epsilon spent"], rows, empty="")
    say(found.cause)


def _say(planned: "PrivacyPlan") -> None:
    found = planned.guarantee
    say(found.sentence)
    if planned.bands is not None:
        say(f"noise of {count_of(planned.bands, 'round')} in each round: {planned.bands} bands have the least error")
    what = "use" if found.sampling_rate is None else "step"
    if planned.fits is not None:
        of = f"epsilon {planned.epsilon_max:g} at delta {found.delta:g}"
        says = f"{of} allows {count_of(planned.fits, what)}"
        if planned.left is not None and planned.left != planned.fits:
            says += f", of which {planned.left} are left"
        say(says)
    if planned.noise is not None:
        for sentence in planned.noise.sentences:
            say(sentence)
    if planned.round is not None:
        _say_rounds(planned.round)
    if planned.preview is not None:
        _say_preview(planned.preview)
    if len(planned.by_uses) > 1:
        say("")
        rows = [(uses, f"{epsilon:.4f}") for uses, epsilon in planned.by_uses]
        table(["uses of one client", "epsilon"], rows, empty="")
