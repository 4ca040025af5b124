"""The page of runs side by side: differing settings, a metric over rounds, bytes or time; of a sweep with its axes."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.dashboard.charts import CURVES_MAX, chart
from atoll.dashboard.pages.blocks import (
    Block,
    Cell,
    Curves,
    Field,
    Page,
    Sentences,
    TableBlock,
    cell,
    distinct,
    duration,
    left_out,
    shown,
    size,
    state_cell,
)
from atoll.ground.printable import count_of

Document = Mapping[str, Any]

RUNS_MAX = 20
"""Largest number of chosen runs."""

CELLS_MAX = 200
"""Largest number of cells of a sweep."""

SETTINGS_MAX, AXES_MAX = 200, 20
"""Largest numbers of differing settings, and of those that are columns of a sweep's table."""

OVER = {"round": "round", "bytes": "megabytes", "seconds": "seconds"}
"""What the axes count."""

MEGABYTE = 1e6


def compare(
    document: Document,
    hrefs: Mapping[str, str],
    hidden: Sequence[tuple[str, str]],
    *,
    sweep: str = "",
    num_left: int = 0,
) -> Page:
    """Return the page of compared runs.

    Args:
        document: the comparison, as `side_by_side` returns it.
        hrefs: the pages of the runs by their names.
        hidden: the values in the address that choose the runs.
        sweep: the name of the sweep whose cells they are; empty: they are chosen one by one.
        num_left: the number of its cells that are left out.
    """
    runs, settings, metric = document["runs"], document["settings"], document["metric"]
    blocks: list[Block] = []
    if not sweep:
        blocks.append(_settings(runs, settings))
    axes = settings[:AXES_MAX] if sweep else []
    columns = ("run", *(shown(axis["setting"]) for axis in axes), "state", "version", "of")
    columns += (f"final {shown(metric)}", f"best {shown(metric)}") if metric else ()
    notes = [left_out(len(runs) + num_left, len(runs), "cell", "choose runs on the page of all runs")]
    notes += [left_out(len(settings), AXES_MAX, "differing setting", "the runs' pages have them")] if sweep else []
    blocks.append(
        TableBlock(
            "Sweep" if sweep else "Runs",
            (*columns, "bytes", "time"),
            [_row(number, run, axes, hrefs, has_metric=metric is not None) for number, run in enumerate(runs)],
            "; ".join(filter(None, notes)),
            "no run can be read",
            (),
            [
                Field("metric", "metric", metric or "", [*document["metrics"][:CURVES_MAX]]),
                Field("over", "over", document["over"], [*OVER]),
            ],
            hidden=hidden,
        )
    )
    if (curves := _curves(document)) is not None:
        blocks.append(curves)
    if document["left_out"]:
        said = [f"{shown(name)}: {shown(why)}" for name, why in document["left_out"].items()]
        blocks.append(Sentences("Without a curve", said[:CELLS_MAX], note=left_out(len(said), CELLS_MAX, "run")))
    title = f"Sweep {shown(sweep)}" if sweep else "Compare"
    return Page(title, blocks, [("Runs", "/")], lead=count_of(len(runs), "run"))


def _settings(runs: Sequence[Document], settings: Sequence[Document]) -> TableBlock:
    rows = [[cell(one["setting"]), *map(_value, one["values"])] for one in settings[:SETTINGS_MAX]]
    note = left_out(len(settings), SETTINGS_MAX, "setting", "the pages of the runs have all")
    columns = ("setting", *(shown(run["name"]) for run in runs))
    return TableBlock("Differing settings", columns, rows, note, "all settings are the same")


def _value(value: Any) -> Cell:
    """Return a setting; a number with all digits that tell it from others."""
    if isinstance(value, float):
        return Cell(f"{value:.12g}")
    return cell(", ".join(map(str, value)) if isinstance(value, list) else value)


def _row(
    number: int, run: Document, axes: Sequence[Document], hrefs: Mapping[str, str], *, has_metric: bool
) -> list[Cell]:
    return [
        cell(run["name"], hrefs.get(run["name"], "")),
        *(_value(axis["values"][number]) for axis in axes),
        *(state_cell(str(run["state"])), cell(run["version"]), cell(run["rounds"])),
        *((cell(run["final"]), cell(run["best"])) if has_metric else ()),
        *(size(run["bytes"]), duration(run["seconds"])),
    ]


def _curves(document: Document) -> Curves | None:
    scale = MEGABYTE if document["over"] == "bytes" else 1.0
    named = list(document["curves"].items())
    labels = distinct(document["curves"])
    lines = {labels[name]: [(x / scale, value) for x, value in points] for name, points in named[:CURVES_MAX]}
    found = chart(shown(document["metric"]), OVER[document["over"]], lines)
    return None if found is None else Curves("Curves", [found], left_out(len(named), CURVES_MAX, "curve"))
