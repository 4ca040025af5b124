"""`atoll round ...`: what happened in each round, and why it ended as it did."""

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError, Commands
from atoll.cli.looking import history_of, run_of
from atoll.cli.printing import as_json, say, seconds, size, table

if TYPE_CHECKING:
    from atoll.protocol.vocabulary import RunId
    from atoll.server.history import History
    from atoll.server.record import RoundRecord

app = typer.Typer(cls=Commands, no_args_is_help=True, help="What happened in each round, and why.")

Number = Annotated[
    int | None,
    typer.Argument(metavar="[N]", min=1, help="Number of the round, which may be open; by default the newest."),
]


@app.command("list")
def list_rounds(
    run: options.Run = "",
    state: options.State = options.STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """List the rounds of a run, the open one last."""
    from atoll.server.sentences import summary

    with history_of(state, database) as history:
        row = run_of(history, run)
        rounds = [summary(record) for record in history.rounds(row.run_id)]
    if json:
        as_json(rounds)
        return
    shown = ("round", "phase", "reason", "version", "invited", "reported", "carried_in", "staleness", "num_examples")
    table(
        [*(name.replace("_", " ") for name in shown), "received", "took"],
        [(*(found[name] for name in shown), size(found["num_bytes"]), seconds(found["seconds"])) for found in rounds],
        empty=f"run {row.run_id} has had no round yet",
    )


@app.command()
def show(
    number: Number = None,
    run: options.Run = "",
    state: options.State = options.STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """Tell what happened in a round: who was invited, what became of each, and why it ended as it did."""
    from atoll.protocol.vocabulary import RoundId
    from atoll.server import sentences

    with history_of(state, database) as history:
        run_id = run_of(history, run).run_id
        record = _newest(history, run_id) if number is None else history.round(run_id, RoundId(number))
    if json:
        as_json(sentences.as_json(record))
        return
    for sentence in sentences.sentences(record):
        say(sentence)


def _newest(history: "History", run_id: "RunId") -> "RoundRecord":
    records = history.rounds(run_id)
    if not records:
        raise CommandError(f"run {run_id} has had no round yet")
    return records[-1]
