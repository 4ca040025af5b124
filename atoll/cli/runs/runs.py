"""`atoll run ...`: start, stop, pause, resume and delete runs; list and show them; statistics before a run."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, best_text, clock, metrics_text, note, say, table
from atoll.cli.runs.sites import show_sites
from atoll.cli.runs.statistics import statistics
from atoll.ground.printable import count_of, shortened
from atoll.operations.faults import CommandError
from atoll.operations.place import STATE, is_elsewhere
from atoll.operations.runs import resume_run, sentence_of, start_run
from atoll.operations.views import read_view
from atoll.protocol.paging import Paging
from atoll.protocol.run_names import RunNotNamed, only_named

if TYPE_CHECKING:
    from atoll.protocol.atoll_pb2 import RunReply

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Start, stop, pause, resume and delete runs; list and show them."
)

What = Annotated[
    str,
    typer.Argument(
        metavar="TASK | RUN.toml",
        help="The run's TOML, or a task (`module:attribute` or `path/to/file.py:attribute`) to run with the defaults.",
    ),
]
Reason = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="The reason, which `atoll run show` and `atoll run list` print.")
]
Sites = Annotated[
    bool,
    typer.Option(
        "--sites", help="Show the metrics of each site instead: mean, spread, the worst one, with --json each curve."
    ),
]
AllPoints = Annotated[
    bool,
    typer.Option(
        "--all-points",
        help="With --json: curves of metrics have all points; by default each has at most 2,000, with its extremes.",
    ),
]
After = Annotated[
    int | None,
    typer.Option(
        "--after",
        metavar="ENTRY",
        callback=options.between(0, 2**53),
        help="With --follow: continue after this entry, the last `seq` of an earlier --json; 0: from the beginning.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", metavar="N", callback=options.between(1), help="The rounds of the whole run from now on."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Delete without asking for confirmation.")]


@app.command()
def start(
    what: What,
    state: options.StateOfRun = None,
    overrides: options.Set = [],  # noqa: B006
    json: options.Json = False,
) -> None:
    """Start a run on a running coordinator. It is queued while `max_runs` runs are active.

    The task's file must be on the coordinator's machine; if that is another machine, name the file by an absolute path.
    """
    _report(start_run(what, state, overrides), json)


app.command()(statistics)


@app.command()
def stop(
    run: options.RunArgument, state: options.State = STATE, reason: Reason = "", json: options.Json = False
) -> None:
    """Stop a run. Its open round is abandoned, or committed first if its aggregation has begun."""
    from atoll.operations import admin

    _report(admin.stop(state, run, reason), json)


@app.command()
def resume(
    run: options.RunArgument,
    state: options.State = STATE,
    rounds: Rounds = None,
    overrides: options.Set = [],  # noqa: B006
    json: options.Json = False,
) -> None:
    """Continue a paused run, or reopen an ended one from its last committed version.

    `--rounds 6` gives a finished run of 3 three more rounds; a paused, stopped or failed one may continue with other
    settings of `rounds`, `pause`, `round`, `cohort`, `local`, `schedule`, `evaluation`, `model` and `stop`. A cosine or
    linear schedule that ends with the run gets another course, which the answer states. Changed settings of `local`
    need a new approval at sites that approve by hand. A run that ended early continues, with fresh patience. It is
    queued while `max_runs` runs are active.
    """
    _report(resume_run(run, state, overrides, rounds=rounds), json)


@app.command()
def pause(
    run: options.RunArgument, state: options.State = STATE, reason: Reason = "", json: options.Json = False
) -> None:
    """Pause a run: no new round begins, and a round that has invited clients runs to its end.

    A paused run frees its place for a queued one, keeps its clients, and still accepts late updates.
    """
    from atoll.operations import admin

    _report(admin.pause(state, run, reason), json)


@app.command()
def delete(
    run: options.RunArgument, state: options.State = STATE, yes: Yes = False, json: options.Json = False
) -> None:
    """Delete an ended run with its records and all versions of its model. Its id is never used again."""
    from atoll.operations import admin

    try:
        run = only_named(run, ((row["run"], row["name"]) for row in read_view("runs", state)))
    except RunNotNamed as error:
        raise CommandError(str(error)) from None
    if not yes:
        where = "the joined coordinator" if is_elsewhere(state) else state
        typer.confirm(f"delete {run} with all versions of its model from {where}?", abort=True, err=True)
    _report(admin.delete(state, run), json)


@app.command("list")
def list_runs(state: options.State = STATE, database: options.Database = "", json: options.Json = False) -> None:
    """List the runs, the newest last: task, state, version (of a run of messages its exchanges), cause of the state."""
    rows = read_view("runs", state, database)
    if json:
        as_json(rows)
        return
    table(
        ["run", "task", "state", "version", "of", "created", "cause"],
        [
            (
                row["run"],
                row["task"],
                row["state"],
                *_progress(row),
                clock(row["created_at"]),
                shortened(row["cause"]),
            )
            for row in rows
        ],
        empty=f"{state} has no run yet; start one: atoll run start RUN.toml",
    )
    said = (sentence for row in rows for sentence in (*row.get("clocks", ()), *row.get("notices", ())))
    for sentence in dict.fromkeys(said):
        note(sentence)


def _progress(row: dict[str, Any]) -> tuple[str, str]:
    """Return the version and the number of rounds; of a run of messages the exchanges so far, and no number."""
    exchanges = row.get("exchanges")  # an older coordinator elsewhere has no such runs
    return (str(row["version"]), str(row["rounds"])) if exchanges is None else (count_of(exchanges, "exchange"), "-")


@app.command()
def show(
    run: options.RunArgument,
    state: options.State = STATE,
    database: options.Database = "",
    sites: Sites = False,
    follow: options.Follow = False,
    after: After = None,
    all_points: AllPoints = False,
    json: options.Json = False,
) -> None:
    """Show a run: its state with the cause, the metrics of its newest versions, and its settings.

    `--follow` prints the lines of the coordinator's log instead, from the beginning of the open round on, until the run
    has ended; with `--json` one object for each event. A coordinator that dies meanwhile is waited for.
    """
    if after is not None and not follow:
        raise CommandError("--after names the place at which --follow continues: add --follow, or leave --after out")
    if follow:
        from atoll.cli.runs.following import follow_run

        if sites:
            raise CommandError("--sites shows the metrics measured so far: leave out --follow, or --sites")
        follow_run(run, state, database, after=after, json=json)
        return
    if sites:
        show_sites(read_view("sites", state, database, run=run, paging=Paging(whole=all_points)), json=json)
        return
    seen = read_view("run", state, database, run=run, paging=Paging(whole=all_points))
    if json:
        as_json(seen["document"])
    else:
        _say_run(seen["document"], seen["toml"])


def _say_run(found: dict[str, Any], toml: str) -> None:
    why = found["cause"] or found["pausing"]
    say(f"{found['run']} is {found['state']}" + (f": {why}" if why else ""))
    say(f"task {found['task']}, created {clock(found['created_at'])}, ended {clock(found['ended_at'])}")
    if found.get("exchanges") is None:
        say(f"version {found['version']} of {found['rounds']}")
    else:
        say(f"{count_of(found['exchanges'], 'exchange')}; `atoll round list --run {found['run']}` has each")
        for sentence in found["sentences"]:
            say(sentence)
    if found["waiting"]:
        say(found["waiting"])
    else:
        for conflict in found["name_conflicts"]:
            say(conflict["sentence"])
    for version, measured in sorted(found["metrics"].items(), key=lambda item: int(item[0]))[-5:]:
        say(f"version {version}: {metrics_text(measured)}")
    if best := found.get("best"):  # an older coordinator elsewhere shows none
        say(best_text(best))
    charged = (found.get("privacy") or {}).get("waiting", "")
    for sentence in filter(None, (charged, *found.get("undecided", ()))):  # an older coordinator elsewhere shows none
        say(sentence)
    for change in found.get("changes", ()):
        say(_change_text(change))
    for missing in found["unmeasured"][-1:]:
        say(f"version {missing['version']} was not measured ({missing['source']}): {missing['reason']}")
    say("\n" + toml.rstrip("\n"))


def _change_text(change: dict[str, Any]) -> str:
    """Return a change of settings as a sentence: `from round 6 on: local.lr 0.1 -> 0.01 (changed 2026-11-27 ...)`."""
    values = (f"{key} {_plain(value['before'])} -> {_plain(value['after'])}" for key, value in change["values"].items())
    return f"from round {change['round']} on: {', '.join(values)} (changed {clock(change['at'])})"


def _plain(value: Any) -> str:
    return "absent" if value is None else str(value) if value != "" else '""'


def _report(reply: "RunReply", json: bool) -> None:
    if json:
        as_json({"run": reply.run_id, "state": reply.state, "message": reply.message})
    else:
        say(sentence_of(reply))
