"""`atoll site ...`: what the owner of some data says to the runs that want to train on them."""

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError, Commands
from atoll.cli.printing import as_json, clock, say, table

if TYPE_CHECKING:
    from atoll.client.policy.decide import Standing
    from atoll.client.policy.history import PolicyHistory, RunTerms

app = typer.Typer(cls=Commands, no_args_is_help=True, help="What a data owner allows: approve runs, or reject them.")

State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="The agent's own directory; by default the only atoll-agent-* here."),
]

Terms = Annotated[
    str,
    typer.Option("--terms", metavar="TERMS", help="Only on these terms, as `atoll site list` shows them."),
]

SHOWN_MAX = 80


@app.command("list")
def list_runs(state: State = None, json: options.Json = False) -> None:
    """List the runs that have asked this site, and what was said to each.

    With `approval = "each_run"` in the site's policy, a run is taken part in once it is approved. A run without an
    algorithm (-) has only asked for evaluations.
    """
    with _history(state) as history:
        runs = [_summary(terms) for terms in history.runs()]
    if json:
        as_json(runs)
        return
    table(
        ["run", "task", "standing", "asked", "decided", "algorithm", "codec", "local", "terms"],
        [
            (
                *(run[name] for name in ("run", "task", "standing")),
                *(clock(run[name]) for name in ("asked_at", "decided_at")),
                run["algorithm"] or "-",
                _codec(run["algorithm"], run["codec"]),
                run["local"],
                run["terms"],
            )
            for run in runs
        ],
        empty="no run has asked yet",
    )


@app.command()
def approve(run: options.RunArgument, terms: Terms = "", state: State = None, json: options.Json = False) -> None:
    """Approve a run, for the task, algorithm, codec and settings of the training that `atoll site list` shows.

    It may have asked on others since: name its `terms`, and only these are approved. The running agent notices within a
    second, and tells the coordinator that it may be invited. When the run asks for another task, or with another
    algorithm, codec or settings, it waits for approval again.
    """
    from atoll.client.policy.decide import Standing

    _decide(run, Standing.APPROVED, state, json, fingerprint=terms)


@app.command()
def reject(run: options.RunArgument, state: State = None, json: options.Json = False) -> None:
    """Reject a run, whatever else the policy allows: what it has under way here ends, and nothing more is sent."""
    from atoll.client.policy.decide import Standing

    _decide(run, Standing.REJECTED, state, json)


@app.command()
def forget(run: options.RunArgument, state: State = None, json: options.Json = False) -> None:
    """Forget what was said to a run: when it asks again, it asks for the first time."""
    with _history(state) as history:
        _known(history, run)
        history.forget(run)
    if json:
        as_json({"run": run, "standing": None})
        return
    say(f"run {run} is forgotten")


@app.command("accept-rollback")
def accept_rollback(run: options.RunArgument, state: State = None, json: options.Json = False) -> None:
    """Allow that a run goes back, once: to an older round or version than this site has seen, or to another model.

    An agent refuses that, because somebody may be showing it old messages. It is what happens, too, when the
    coordinator's state was restored from a backup, or a new one uses the name of an old run: ask its operator first.
    The agent must be stopped meanwhile.
    """
    from atoll.client.disk.seen_store import Memory
    from atoll.client.disk.state_directory import StateDirectory
    from atoll.protocol.settings import ConfigError
    from atoll.protocol.vocabulary import RunId

    try:
        held = StateDirectory(_folder(state))
    except ConfigError as error:
        raise CommandError(*error.faults, "stop the agent first, and start it again afterwards") from None
    try:
        memory = Memory(held.seen)
        if not memory.forget(RunId(run)):
            known = ", ".join(sorted(filter(None, memory.runs()))) or "none"
            raise CommandError(f"this site has seen nothing of run {run!r} (seen: {known})")
    finally:
        held.close()
    if json:
        as_json({"run": run, "seen": None})
        return
    say(f"whatever run {run} shows next is taken as its newest")


def _decide(run: str, standing: "Standing", state: Path | None, json: bool, *, fingerprint: str = "") -> None:
    from atoll.client.policy.history import OtherTerms

    with _history(state) as history:
        _known(history, run)
        try:
            terms = history.decided(run, standing, time.time(), fingerprint=fingerprint)
        except OtherTerms:
            what = f"run {run} does not ask on the terms {fingerprint[:SHOWN_MAX]!r}: nothing is approved"
            raise CommandError(what, "`atoll site list` shows on which it asks by now") from None
    if json:
        as_json(_summary(terms))
        return
    training = f"{terms.algorithm}, codec {_codec(terms.algorithm, terms.codec)}" if terms.algorithm else "evaluations"
    say(f"run {run} is {standing}, for task {terms.task} with {training}, local = {terms.local}")


def _codec(algorithm: str, codec: str) -> str:
    """For a person; a run that has only asked for evaluations sends no update."""
    return (codec or "plain") if algorithm else "-"


def _known(history: "PolicyHistory", run: str) -> None:
    known = [terms.run_id for terms in history.runs()]
    if run not in known:
        raise CommandError(f"run {run!r} has not asked here (known: {', '.join(known) or 'none'})")


def _history(state: Path | None) -> "closing[PolicyHistory]":
    from atoll.client.policy.history import PolicyHistory

    return closing(PolicyHistory(_folder(state)))


def _folder(state: Path | None) -> Path:
    """The directory of an agent; never made here.

    Raises:
        CommandError: it is none, or it is not clear which one is meant.
    """
    from atoll.client.policy.history import NAME

    if state is None:
        found = sorted(path.parent for path in Path().glob(f"atoll-agent*/{NAME}"))
        if len(found) == 1:
            return found[0]
        here = f"several agents' directories are here: {', '.join(map(str, found))}" if found else "none is here"
        raise CommandError(f"name the agent's directory with --state DIR; {here}")
    if not (state / NAME).is_file():
        raise CommandError(f"{state} is no directory of an agent: it has no {NAME}")
    return state


def _summary(terms: "RunTerms") -> dict[str, Any]:
    return {
        "run": terms.run_id,
        "task": terms.task,
        "standing": str(terms.standing),
        "algorithm": terms.algorithm,
        "codec": terms.codec,
        "local": terms.local,
        "terms": terms.fingerprint,
        "asked_at": terms.asked_at,
        "decided_at": terms.decided_at,
    }
