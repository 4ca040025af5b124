"""`atoll rank ...`: list the aggregation ranks of a running coordinator."""

from typing import Any

import typer

from atoll.cli import options
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, note, table
from atoll.ground.printable import printable_size
from atoll.operations.place import STATE

app = typer.Typer(cls=Commands, no_args_is_help=True, help="List the aggregation ranks.")


@app.command("list")
def list_ranks(state: options.State = STATE, json: options.Json = False) -> None:
    """List the aggregation ranks of a running coordinator, with the address of each and the bytes that it has moved.

    Bytes received are updates, bytes sent are versions, and bytes exchanged are partial sums sent to other ranks.
    """
    from atoll.operations import admin

    reply = admin.ranks(state)
    rows: list[dict[str, Any]] = [
        {
            "rank": row.rank,
            "address": row.address,
            "here": bool(row.address),
            "received_bytes": row.received_bytes,
            "sent_bytes": row.sent_bytes,
            "exchanged_bytes": row.exchanged_bytes,
            "conflict": row.conflict,
        }
        for row in reply.ranks
    ]
    if json:
        as_json({"ranks": rows, "coordinator": {"received_bytes": reply.received_bytes}})
        return
    table(
        ["rank", "address", "received", "sent", "exchanged"],
        [
            (
                *(row["rank"], row["address"] or "away"),
                *(
                    printable_size(row[f"{what}_bytes"]) if row["here"] else ""
                    for what in ("received", "sent", "exchanged")
                ),
            )
            for row in rows
        ],
        empty="no aggregation ranks: the coordinator was started without --aggregators, and aggregates itself",
    )
    for row in rows:
        if row["conflict"]:
            note(row["conflict"])
    note(f"the coordinator itself has received {printable_size(reply.received_bytes)} of updates")
