"""`atoll site ...`: a site's decisions about the runs that ask to train on its data, and about rollbacks."""

import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, clock, note, say, table
from atoll.cli.waiting import waiting_for
from atoll.ground.printable import instead_of
from atoll.operations.faults import CommandError
from atoll.operations.sites import (
    agent_folder,
    codec_of,
    decide,
    decision_in_words,
    opened_requests,
    requests_at,
    run_asked,
)
from atoll.protocol.run_names import RunNotNamed, only_named

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Decide for a site: on the runs that ask it, and on the sites in its sums."
)

State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        help="The agent's state directory; by default the only atoll-agent-* in the current directory.",
    ),
]

Terms = Annotated[
    str,
    typer.Option(
        "--terms", metavar="TERMS", help="Approve only these terms, as in the last column of `atoll site list`."
    ),
]

TAKEN_S = 10.0
"""Seconds that a command waits for a running agent to take what it asks for."""


@app.command("list")
def list_runs(state: State = None, json: options.Json = False) -> None:
    """List the runs that have asked this site, with the decision on each and the terms on which it asks.

    With `approval = "each_run"` in the site's policy, the site takes part in a run after its approval. A run without an
    algorithm (-) has only asked for evaluations; one with `sums` under `secure` asks for values in secure sums alone.
    """
    runs = requests_at(agent_folder(state))
    if json:
        as_json(runs)
        return
    table(
        ["run", "task", "standing", "asked", "decided", "algorithm", "codec", "secure", "local", "terms"],
        [
            (
                *(run[name] for name in ("run", "task", "standing")),
                *(clock(run[name]) for name in ("asked_at", "decided_at")),
                run["algorithm"] or "-",
                codec_of(run),
                "sums" if run["secure"] else "-",
                run["local"],
                run["terms"],
            )
            for run in runs
        ],
        empty="no run has asked this site yet",
    )


@app.command()
def approve(run: options.RunArgument, terms: Terms = "", state: State = None, json: options.Json = False) -> None:
    """Approve a run with the task, algorithm, codec and training settings that `atoll site list` shows.

    The run may have changed its terms since that list: --terms approves exactly the listed ones. The running agent
    notices an approval within a second. If the run later asks with another task, algorithm, codec or settings, it needs
    a new approval.
    """
    _decide(run, "approved", state, json, fingerprint=terms)


@app.command()
def reject(run: options.RunArgument, state: State = None, json: options.Json = False) -> None:
    """Reject a run, also one that the policy allows: its work here ends, and nothing more is sent to it."""
    _decide(run, "rejected", state, json)


@app.command()
def forget(run: options.RunArgument, state: State = None, json: options.Json = False) -> None:
    """Forget the decision on a run: its next request counts as its first."""
    from atoll.operations.local_audit import record_at_site

    with opened_requests(agent_folder(state)) as history:
        run = run_asked(history, run)
        history.forget(run)
    record_at_site(history.path.parent, "site.forgotten", run, "")
    if json:
        as_json({"run": run, "standing": None})
        return
    say(f"run {run} is forgotten")


@app.command("accept-rollback")
def accept_rollback(
    run: Annotated[
        str,
        typer.Argument(metavar="[RUN]", help="Id of the run, such as digits-1, or its name.", show_default=False),
    ] = "",
    new_key: Annotated[
        bool, typer.Option("--new-key", help="Accept a rollback of this site instead: give it a new key.")
    ] = False,
    budgets: Annotated[
        bool,
        typer.Option("--budgets", help="Accept the loss of this site's ledger: its data sets need new names."),
    ] = False,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="With --budgets: the policy, whose ledger and names are meant."),
    ] = None,
    state: State = None,
    json: options.Json = False,
) -> None:
    """Accept a rollback: of a run by its coordinator, or of this site's own state by its operator.

    RUN, once: to an older round or version than this site has seen, or to another model. An agent refuses a rollback,
    as it may be a replay of old messages. It also follows when the coordinator's state was restored from a backup, or
    when a new coordinator uses the id of an old run: ask its operator first. A running agent takes it within a second,
    and asks for its next round.

    --new-key: this site's state directory was put back from a copy, or its promises or its site key are damaged or
    lost. Other sites refuse its old key, as it could open one update twice; they pin the new one, for which they ask by
    telephone. Promises that can be read still bind. The agent must not run.

    --budgets: the ledger of this site's privacy budgets is damaged, was put back from a copy, or is lost. All names of
    data sets that it, the agent or the policy know are closed, as what was spent is not known; a new budget is a new
    name. The agent must not run.
    """
    if bool(run) + new_key + budgets != 1:
        raise CommandError(
            "accept-rollback: name either a RUN, whose coordinator has gone back, or --new-key or --budgets, as this "
            "site itself has"
        )
    if policy is not None and not budgets:
        raise CommandError("accept-rollback: --policy belongs to --budgets: leave it out, or name --budgets")
    if budgets:
        _close_budgets(policy, agent_folder(state), json=json)
    elif new_key:
        _replace_key(agent_folder(state), json=json)
    else:
        _accept_of_run(run, agent_folder(state), json=json)


def _close_budgets(policy: Path | None, folder: Path, *, json: bool) -> None:
    from atoll.operations.lost_ledger import close_budgets

    closed = close_budgets(policy, folder)
    if json:
        as_json({"closed": closed})
        return
    for name in closed:
        say(name)
    note("these data sets allow nothing any more: give each a new name in the policy, which begins a new budget")


def _replace_key(folder: Path, *, json: bool) -> None:
    from atoll.client.site.own_key import name_in, replace_site_key
    from atoll.operations.local_audit import record_at_site
    from atoll.protocol.secure.site_key import shown

    name = name_in(folder)
    old, new = replace_site_key(folder)
    record_at_site(folder, "site.new_key", name, f"fingerprint {shown(new)}; before: {shown(old) or 'not readable'}")
    if json:
        as_json({"site": name, "fingerprint": new, "before": old or None})
        return
    say(f"{name}  {shown(new)}")
    note(f"every site that has pinned the old key pins this one: `atoll site trust {name} FINGERPRINT`")


def _accept_of_run(run: str, folder: Path, *, json: bool) -> None:
    from atoll.client.disk.seen_store import runs_in
    from atoll.operations.local_audit import record_at_site

    try:
        known = runs_in(folder / "seen")
        run = only_named(run, ((run_id, run_id.rpartition("-")[0]) for run_id in known))
    except RunNotNamed as error:
        several = any(run_id.rpartition("-")[0] == run for run_id in known)
        fault = str(error) if several else f"this site has seen nothing of run {run!r}{instead_of(run, known)}"
        raise CommandError(fault) from None
    record_at_site(folder, "site.rollback", run, "")
    is_taken = _forgotten_by_the_agent(folder, run)
    if json:
        as_json({"run": run, "seen": None, "taken": is_taken})
        return
    say(f"the next round and version of run {run} are accepted as its newest")
    if not is_taken:
        note(f"the agent has not applied this within {TAKEN_S:g} s, and applies it when it runs: see its log")


def _forgotten_by_the_agent(folder: Path, run: str) -> bool:
    """Delete a site's record of a run, in place of the agent or through it; return whether it is done."""
    from atoll.client.disk.seen_store import Memory
    from atoll.client.disk.state_directory import StateDirectory
    from atoll.client.policy.history import PolicyHistory
    from atoll.protocol.settings import ConfigError
    from atoll.protocol.vocabulary import RunId

    with suppress(ConfigError), closing(StateDirectory(folder)) as directory:  # no agent runs
        Memory(directory.seen).forget(RunId(run))
        return True
    with closing(PolicyHistory(folder)) as history:
        history.accept_rollback(run, time.time())
        with waiting_for("the running agent", f"up to {TAKEN_S:g} s"):
            until = time.monotonic() + TAKEN_S
            while run in history.accepted_rollbacks() and time.monotonic() < until:
                time.sleep(TAKEN_S / 100)
        return run not in history.accepted_rollbacks()


@app.command()
def archive(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The archive: a new folder, or the one of the last archive.")
    ],
    state: State = None,
    json: options.Json = False,
) -> None:
    """Move the log of a site's decisions into an archive, also while the agent runs; the log continues behind it.

    The archive keeps its proof: `atoll audit verify --archive DIR STATE/decisions/audit-*.jsonl` verifies across.
    """
    from atoll.cli.members.audit import as_archived
    from atoll.client.policy.decisions import NAME

    as_archived(agent_folder(state) / NAME, out, "agent", json=json)


def _decide(run: str, standing: str, state: Path | None, json: bool, *, fingerprint: str = "") -> None:
    with opened_requests(agent_folder(state)) as history:
        terms = decide(history, run_asked(history, run), standing, terms=fingerprint)
    if standing == "approved" and not fingerprint:
        shown = terms["terms"]
        note(f"its newest terms, {shown}, are approved; --terms {shown} approves only terms that you have read")
    if json:
        as_json(terms)
        return
    say(decision_in_words(terms))
