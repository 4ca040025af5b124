"""The page of a run's privacy: what its releases guarantee, the budget spent, and the sessions of its secure sums."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.dashboard.charts import chart
from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import (
    Block,
    Cell,
    Curves,
    Facts,
    Page,
    Sentences,
    TableBlock,
    cell,
    left_out,
    page_of_run,
    shown,
)

Document = Mapping[str, Any]

ROWS_MAX = 500
"""Largest number of sessions."""

ENDS = ("opened", "failed", "dropped")
"""The last stages of a session."""

NONE = "its settings have no table [privacy]: nothing is guaranteed about its versions"


def privacy(
    place: int,
    label: str,
    run_id: str,
    guarantee: Document | None,
    sums: Sequence[Document],
    rounds: Sequence[Document],
) -> Page:
    """Return the page of a run's privacy.

    Args:
        place: the number of the place.
        label: its name.
        run_id: the run.
        guarantee: what it has released so far, as `atoll privacy show --json`; None: it has no privacy.
        sums: the secure sums of its newest rounds, ascending.
        rounds: its newest rounds, as `atoll round list --json`.
    """
    blocks: list[Block] = []
    if guarantee is None:
        blocks.append(Sentences("Guarantee", [NONE]))
    else:
        blocks.append(Facts("Budget", [*_budget(guarantee)]))
        blocks.append(Sentences("Guarantee", [shown(guarantee["sentence"])]))
    points = [(float(row["round"]), row["epsilon"]) for row in rounds if row.get("epsilon") is not None]
    if (spent := chart("epsilon spent", "round", {"the client charged most": points})) is not None:
        blocks.append(Curves("Spent", [spent]))
    blocks.append(
        TableBlock(
            "Secure sums of the newest rounds",
            (
                *("round", "session", "attempt", "stage", "members", "open it", "keys", "shares"),
                *("masked", "signed", "revealed", "left", "why"),
            ),
            [_row(place, run_id, row) for row in reversed(sums[-ROWS_MAX:])],
            left_out(len(sums), ROWS_MAX, "session", "the pages of the rounds have them"),
            "no secure sum in the newest rounds: the updates are plain, or no round has begun",
        )
    )
    return page_of_run(f"Privacy of {run_id}", blocks, place, label, run_id)


def _budget(guarantee: Document) -> Iterator[tuple[str, Cell]]:
    yield "epsilon spent", cell(guarantee["epsilon"])
    yield "epsilon allowed", cell(guarantee["epsilon_max"])
    yield "delta", cell(guarantee["delta"])
    left = f"{guarantee['clients_with_budget']} of {guarantee['clients']}"
    yield "clients with budget left", Cell(left, mark="" if guarantee["clients_with_budget"] else "lapsed")
    yield "sums of one client, at most", cell(guarantee["participations_max"])


def _row(place: int, run_id: str, row: Document) -> list[Cell]:
    sent = row["sent"]
    why = row["detail"] or (f"left out: {', '.join(row['left_out'])}" if row["left_out"] else "")
    why += f"; wrong shares of {', '.join(row['wrong'])}" if row["wrong"] else ""
    stage = "dropped" if row["is_dropped"] else str(row["stage"])
    return [
        cell(row["round"], addresses.of_run(place, run_id, f"rounds/{row['round']}")),
        cell(row["session"]),
        cell(row["attempt"]),
        cell(stage, mark=stage if stage in ENDS else "securing"),
        *(cell(row["members"]), cell(row["threshold"] or None)),
        *(cell(sent[name]) for name in ("keys", "shares", "masked", "signed", "revealed")),
        *(cell(row["left"]), cell(why)),
    ]
