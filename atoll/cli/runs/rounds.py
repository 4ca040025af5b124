"""`atoll round ...`: list rounds, or narrate one."""

from typing import Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, say, seconds, table
from atoll.cli.runs.numbered import read_numbered
from atoll.cli.runs.sites import say_sites
from atoll.ground.printable import printable_size
from atoll.operations.place import STATE
from atoll.operations.views import read_view
from atoll.protocol.paging import Paging

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="List the rounds of a run, or the exchanges of one of messages, or explain one.",
)

Number = Annotated[
    int | None,
    typer.Argument(
        metavar="[N]",
        callback=options.between(1, 2**31),
        help="Number of the round or exchange, which may still be open; by default the newest one.",
    ),
]


Client = Annotated[
    str, typer.Option("--client", metavar="NAME", help="Print the rounds only that have invited this client.")
]
OfFate = Annotated[
    str,
    typer.Option(
        "--fate",
        metavar="FATE",
        help="Print the rounds only in which a client, or --client, has this fate, such as lost.",
    ),
]


@app.command("list")
def list_rounds(
    run: options.Run = "",
    last: options.Last = None,
    after: options.After = None,
    client: Client = "",
    fate: OfFate = "",
    state: options.State = STATE,
    database: options.Database = "",
    json: options.Json = False,
) -> None:
    """List the rounds of a run, an open one last: phase, reason, version, updates, bytes and duration.

    A run of messages has exchanges in their place: what was sent to how many nodes, and what came back. A note names
    the command for the rows that are left out.
    """
    seen = read_numbered(
        "rounds", state, database, run=run, last=last, after=after, paging=Paging(client=client, fate=fate)
    )
    if json:
        as_json(seen["rows"])
        return
    if seen["rows"] and "kinds" in seen["rows"][0]:
        _list_exchanges(seen["rows"])
        return
    shown: tuple[str, ...] = (
        "round",
        "phase",
        "reason",
        "version",
        "invited",
        "reported",
        "carried_in",
        "too_old",
        "staleness",
        "num_examples",
    )
    if any(found.get("epsilon") is not None for found in seen["rows"]):
        shown = (*shown, "epsilon")
    table(
        [*(name.replace("_", " ") for name in shown), "received", "took"],
        [
            (
                *(_cell(name, found[name]) for name in shown),
                printable_size(found["num_bytes"]),
                seconds(found["seconds"]),
            )
            for found in seen["rows"]
        ],
        empty=f"run {seen['run']} has {'no such round' if client or fate or after else 'had no round yet'}",
    )


def _cell(name: str, value: Any) -> Any:
    return f"{value:.4f}" if name == "epsilon" and value is not None else value


def _list_exchanges(rows: list[dict[str, Any]]) -> None:
    shown = ("phase", "reason", "nodes", "num_messages", "reported", "missing")
    table(
        [
            *("exchange", "kind", "phase", "reason", "nodes", "messages", "replies", "missing"),
            *("errors", "down", "up", "took"),
        ],
        [
            (
                *(found["round"], ", ".join(found["kinds"]), *(found[name] for name in shown)),
                ", ".join(f"{number} {reason}" for reason, number in found["errors"].items()),
                *(printable_size(found["bytes_down"]), printable_size(found["bytes_up"]), seconds(found["seconds"])),
            )
            for found in rows
        ],
        empty="",
    )


@app.command()
def show(
    number: Number = None,
    run: options.Run = "",
    state: options.State = STATE,
    database: options.Database = "",
    follow: options.Follow = False,
    json: options.Json = False,
) -> None:
    """Explain a round, or an exchange of a run of messages, in sentences.

    Of a round: the invited clients, the outcome of each, and the reason for the round's end. Of an exchange: the
    messages, the replies, and the cause of each missing reply.

    `--follow` prints each sentence as it comes, until the round has ended; with `--json` the record whenever it has
    changed, one a line. The round may be one that has not begun yet.
    """
    if follow:
        from atoll.cli.runs.following import follow_round

        follow_round(number, run, state, database, json=json)
        return
    record = read_view("round", state, database, run=run, number=number or 0)
    if json:
        as_json(record)
        return
    for sentence in record["sentences"]:
        say(sentence)
    if training := record.get("training"):  # an older coordinator elsewhere shows none
        say_sites("training", training)
