"""The pages of sites: the list, and one site with its rounds, times, failures and metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.dashboard.charts import chart
from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import (
    Block,
    Cell,
    Facts,
    Field,
    Page,
    Sentences,
    TableBlock,
    cell,
    distinct,
    duration,
    instant,
    page_of_run,
    shown,
    size,
    state_cell,
)
from atoll.dashboard.pages.run import curves_within
from atoll.ground.printable import count_of

Document = Mapping[str, Any]


def sites(
    place: int, label: str, run_id: str, rows: Sequence[Document], following: str | None, asked: Mapping[str, str]
) -> Page:
    """Return the page of a run's clients, in the order of their names.

    Args:
        place: the number of the place.
        label: its name.
        run_id: the run.
        rows: a page of them, as `atoll client list --json`.
        following: the cursor of the next page; None: there is none.
        asked: the filters and the cursor of this page.
    """
    table = TableBlock(
        "Sites",
        ("site", "connected", "since", "run", "invited", "used", "download", "training", "upload", "last failure"),
        [_row(place, run_id, row) for row in rows],
        f"{count_of(len(rows), 'site')}; more follow" if following is not None else "",
        "no such site" if asked.keys() - {"after"} else "no client is invited or connected yet",
        addresses.other_pages(place, run_id, "sites", asked, following, ("First", "Next")),
        [
            Field("state", "state", asked.get("state", ""), ("connected", "away", "failed")),
            Field("prefix", "name begins with", asked.get("prefix", "")),
            Field("text", "text", asked.get("text", "")),
        ],
    )
    return page_of_run(f"Sites of {run_id}", [table], place, label, run_id)


def site(
    place: int,
    label: str,
    run_id: str,
    name: str,
    client: Document | None,
    rounds: Sequence[Document],
    fates: Document,
    metrics: Document,
) -> Page:
    """Return the page of a site.

    Args:
        place: the number of the place.
        label: its name.
        run_id: the run.
        name: the name of the site.
        client: its row, as `atoll client list --json`; None: there is none.
        rounds: the newest rounds that have invited it, as `atoll round list --json`.
        fates: the fates of the clients in the newest rounds.
        metrics: the metrics of single sites, as `atoll run show --sites --json`.
    """
    blocks: list[Block] = []
    if client is None:
        blocks.append(Sentences("This site", ["no client of this run has this name"]))
    else:
        blocks.append(Facts("This site", _facts(client)))
    charts = []
    for kind in ("evaluation", "training"):
        lines = metrics[kind]["curves"].get(name) or {}
        titles = distinct(sorted(lines))
        charts += [chart(f"{titles[each]} ({kind})", "version", {shown(name): lines[each]}) for each in titles]
    if (curves := curves_within(charts)) is not None:
        blocks.append(curves)
    own = {int(number): fate for number, fate in (fates["clients"].get(name) or {}).items()}
    blocks.append(
        TableBlock(
            "Its rounds",
            ("round", "its fate", "phase", "version", "reason", "took"),
            [
                (
                    cell(row["round"], addresses.of_run(place, run_id, f"rounds/{row['round']}")),
                    state_cell(own.get(int(row["round"]), "")),
                    *(state_cell(row["phase"]), cell(row["version"]), cell(row["reason"]), duration(row["seconds"])),
                )
                for row in reversed(rounds)
            ],
            empty="it was not invited yet",
            links=[("All", addresses.of_run(place, run_id, "rounds", client=name))],
        )
    )
    hidden = [
        f"{kind}: {shown(why)}" for kind in ("evaluation", "training") if (why := metrics[kind]["not_shown"].get(name))
    ]
    if hidden:
        blocks.append(Sentences("Not shown", hidden))
    if (mesh := (metrics.get("meshes") or {}).get(name)) is not None:
        blocks.append(Facts("Its mesh, newest training", [*_mesh(mesh)]))
    return page_of_run(f"Site {shown(name)}", blocks, place, label, run_id, above="Sites")


def _row(place: int, run_id: str, row: Document) -> list[Cell]:
    failure = row["last_failure"]
    return [
        cell(row["client"], addresses.of_run(place, run_id, "site", name=row["client"])),
        Cell("yes" if row["connected"] else "no", mark="joined" if row["connected"] else ""),
        instant(row["connected_since"] or row["seen_at"]),
        cell("available" if row["available"] else row["why_not"]),
        *(cell(row["invited"]), cell(row["used"])),
        *(duration(row[f"{kind}_seconds"]) for kind in ("download", "train", "upload")),
        cell("" if failure is None else failure["reason"]),
    ]


def _facts(client: Document) -> list[tuple[str, Cell]]:
    failure = client["last_failure"]
    offset = client.get("clock_offset")
    found = [
        ("connected", cell(client["connected"])),
        ("since", instant(client["connected_since"] or client["seen_at"])),
        ("in this run", cell("available" if client["available"] else client["why_not"])),
        ("version of Atoll", cell(client["software"])),
        ("address", cell(client.get("address"))),
        ("clock", Cell("-" if offset is None else f"{offset:+.1f} s")),
        ("certificate until", instant(client.get("certificate_until"))),
        ("standing", cell(client.get("standing"))),
        ("examples", cell(client["num_examples"])),
        ("label", cell(client["label"])),
        ("invited, used", cell(f"{client['invited']}, {client['used']}")),
        *((f"newest {kind}", duration(client[f"{kind}_seconds"])) for kind in ("download", "train", "upload")),
    ]
    if failure is not None:
        found.append(("last failure", cell(f"{failure['reason']}: {failure['detail']}", mark="failed")))
        found.append(("it failed at", instant(failure["at"])))
    if client["name_conflict"]:
        found.append(("name in double use", cell(client["name_conflict"], mark="refused")))
    return found


def _mesh(mesh: Document) -> list[tuple[str, Cell]]:
    mfu = mesh.get("mfu")
    return [
        ("round", cell(mesh["round"])),
        ("ranks", cell(mesh["num_ranks"])),
        ("most memory of a rank", size(mesh["peak_bytes"])),
        ("steps a second", cell(mesh["steps_per_s"])),
        ("model FLOPs utilization", cell(mesh.get("why_no_mfu") if mfu is None else f"{mfu:.1%}")),
    ]
