"""The page of the versions of a run's model: digest, size, metrics, best, kept or not."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import (
    Block,
    Cell,
    Facts,
    Page,
    TableBlock,
    cell,
    instant,
    left_out,
    page_of_run,
    server_first,
    shown,
    size,
)
from atoll.ground.printable import count_of

Document = Mapping[str, Any]

METRICS_MAX = 20
"""Largest number of columns of metrics."""


def versions(
    place: int,
    label: str,
    document: Document,
    rows: Sequence[Document],
    following: str | None,
    asked: Mapping[str, str],
) -> Page:
    """Return the page of a run's versions, the newest first.

    Args:
        place: the number of the place.
        label: its name.
        document: the run, as `atoll run show --json`.
        rows: a page of its versions, as `atoll model list --json`.
        following: the cursor of the older ones; None: there are none.
        asked: the cursor of this page.
    """
    run_id = str(document["run"])
    names = list(dict.fromkeys(name for row in reversed(rows) for name in _metrics(row)))
    notes = [left_out(len(names), METRICS_MAX, "metric")]
    if following is not None:
        notes.append(f"{count_of(len(rows), 'version')}; older ones follow")
    start = (document["settings"].get("model") or {}).get("start") or "the task's model"
    blocks: list[Block] = [
        Facts("Lineage", [("version 0", cell(start)), ("newest version", cell(document["version"]))]),
        TableBlock(
            "Versions",
            ("version", "created", "kept", "best", "size", *map(shown, names[:METRICS_MAX]), "digest"),
            [_row(row, names[:METRICS_MAX]) for row in reversed(rows)],
            "; ".join(filter(None, notes)),
            "the run has no version yet",
            addresses.other_pages(place, run_id, "versions", asked, following, ("Newest", "Older")),
        ),
    ]
    return page_of_run(f"Versions of {run_id}", blocks, place, label, run_id)


def _metrics(row: Document) -> dict[str, Any]:
    """Return the metrics of a version by SOURCE/NAME, the server's first."""
    found = row["metrics"]
    return {f"{source}/{name}": value for source in server_first(found) for name, value in found[source].items()}


def _row(row: Document, names: Sequence[str]) -> list[Cell]:
    measured = _metrics(row)
    return [
        cell(row["version"]),
        instant(row["created_at"]),
        Cell("-" if row["kept"] is None else "kept" if row["kept"] else "deleted"),
        Cell("best" if row["best"] else "-", mark="finished" if row["best"] else ""),
        size(row["num_bytes"]),
        *(cell(measured.get(name)) for name in names),
        cell(row["digest"]),
    ]
