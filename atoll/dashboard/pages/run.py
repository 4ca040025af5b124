"""The page of a run: its state and wait, its curves, the fates of its newest rounds, and its settings."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.dashboard.charts import CURVES_MAX, Chart, chart
from atoll.dashboard.pages import addresses
from atoll.dashboard.pages.blocks import (
    Block,
    Cell,
    Curves,
    Facts,
    Grid,
    Page,
    Sentences,
    cell,
    distinct,
    instant,
    left_out,
    server_first,
    shown,
    size,
    state_cell,
    text,
)
from atoll.ground.printable import count_of, printable

Document = Mapping[str, Any]

SITES_MAX, ROUNDS_MAX = 100, 24
"""Largest numbers of sites and rounds in the grid of fates."""


def run(
    place: int,
    label: str,
    document: Document,
    toml: str,
    rounds: Sequence[Document],
    fates: Document,
    lines: Sequence[tuple[float, str]] = (),
) -> Page:
    """Return the page of a deployed run.

    Args:
        place: the number of the place.
        label: its name.
        document: the run, as `atoll run show --json`.
        toml: its settings.
        rounds: its newest rounds, as `atoll round list --json`.
        fates: the fates of the clients in its newest rounds.
        lines: the newest lines of its log with their times, the newest last.
    """
    run_id = str(document["run"])
    blocks: list[Block] = [_state(place, document, rounds)]
    if said := _sentences(document):
        blocks.append(Sentences("Now", said))
    if (curves := curves_of(document["metrics"])) is not None:
        blocks.append(curves)
    if fates["rounds"]:
        blocks.append(grid(place, run_id, fates))
    if lines:
        newest = [f"{instant(at).text}  {shown(line)}" for at, line in reversed(lines)]
        blocks.append(Sentences("Log", newest, is_log=True, note="the newest line first"))
    blocks.append(text("Settings", toml))
    tabs, key = addresses.tabs(place, run_id), addresses.key_of(place, run_id)
    return Page(run_id, blocks, addresses.trail(place, label), tabs, key, _lead(document))


def curves_of(metrics: Mapping[Any, Mapping[str, Document]], over: str = "version") -> Curves | None:
    """Return a picture for each metric, with a curve for each source; None: nothing was measured.

    Args:
        metrics: the values by version, source and metric.
        over: what the versions count.
    """
    points: dict[str, dict[str, list[tuple[float, float | None]]]] = {}
    for version, by_source in sorted(metrics.items(), key=lambda one: int(one[0])):
        for source, values in by_source.items():
            for name, value in values.items():
                if value is None or isinstance(value, int | float):
                    points.setdefault(name, {}).setdefault(source, []).append((int(version), value))
    titles = distinct(sorted(points, key=lambda name: (name.endswith("loss"), name)))
    charts = [chart(title, over, _named(points[name])) for name, title in titles.items()]
    return curves_within(charts)


def curves_within(charts: Iterable[Chart | None]) -> Curves | None:
    """Return the pictures with at most `CURVES_MAX` curves, and a note on the rest; None: there is no picture."""
    found = [each for each in charts if each is not None]
    if not found:
        return None
    kept, num = list[Chart](), 0
    for each in found:
        if num + len(each.lines) > CURVES_MAX:
            break
        kept.append(each)
        num += len(each.lines)
    return Curves("Curves", kept, left_out(len(found), len(kept), "metric"))


def grid(place: int, run_id: str, fates: Document) -> Grid:
    """Return the fates of a run's clients in its newest rounds, those with troubles first."""
    rounds, clients = list(fates["rounds"])[-ROUNDS_MAX:], fates["clients"]

    def troubles(name: str) -> int:
        return sum(fate not in ("reported", "joined", "waiting") for fate in clients[name].values())

    names = sorted(clients, key=lambda name: (-troubles(name), name))
    num_left_out = len(names) - SITES_MAX
    rows = [
        (
            cell(name, addresses.of_run(place, run_id, "site", name=name)),
            [state_cell(clients[name].get(str(number), "")) for number in rounds],
        )
        for name in names[:SITES_MAX]
    ]
    heads = [Cell(str(number), addresses.of_run(place, run_id, f"rounds/{number}")) for number in rounds]
    note = f"{count_of(num_left_out, 'site')} with fewer troubles left out: Sites lists all" if num_left_out > 0 else ""
    return Grid("Fates of the newest rounds", heads, rows, note)


def _named(
    curves: Mapping[str, Sequence[tuple[float, float | None]]],
) -> dict[str, Sequence[tuple[float, float | None]]]:
    return {label: curves[source] for source, label in distinct(server_first(curves)).items()}


def _lead(document: Document) -> str:
    if (exchanges := document.get("exchanges")) is not None:
        return f"{shown(document['state'])}; {count_of(exchanges, 'exchange')}"
    return f"{shown(document['state'])}; version {document['version']} of {document['rounds']}"


def _state(place: int, document: Document, rounds: Sequence[Document]) -> Facts:
    run_id = str(document["run"])
    rows = [
        ("state", state_cell(document["state"])),
        ("cause", cell(document["cause"] or document.get("pausing"))),
        ("task", cell(document["task"])),
        ("created", instant(document["created_at"])),
        ("ended", instant(document["ended_at"])),
    ]
    if best := document.get("best"):
        value = f"{shown(best['metric'])} {shown(best['value'])} ({shown(best['source'])})"
        rows.append(("best version", Cell(f"{best['version']}: {value}")))
    if rounds:
        number = rounds[-1]["round"]
        rows.append(("newest round", cell(number, addresses.of_run(place, run_id, f"rounds/{number}"))))
        up = sum(int(each.get("num_bytes") or each.get("bytes_up") or 0) for each in rounds)
        rows.append((f"received in {count_of(len(rounds), 'round')}", size(up)))
        took = [each["seconds"] for each in rounds if each.get("seconds") is not None]
        if took:
            rows.append(("seconds of a round, mean", cell(sum(took) / len(took))))
    return Facts("State", rows)


def _sentences(document: Document) -> list[str]:
    changes = [
        f"from round {change['round']} on: "
        + ", ".join(f"{key} {value['before']} -> {value['after']}" for key, value in change["values"].items())
        for change in document.get("changes", ())
    ]
    conflicts = [] if document.get("waiting") else [row["sentence"] for row in document.get("name_conflicts", ())]
    privacy = document.get("privacy") or {}
    said = [
        document.get("waiting"),
        *conflicts,
        *document.get("sentences", ()),
        *document.get("undecided", ()),
        privacy.get("sentence"),
        *changes,
        *(
            f"version {missing['version']} was not measured ({missing['source']}): {missing['reason']}"
            for missing in document.get("unmeasured", ())[-1:]
        ),
        *document.get("clocks", ()),
        *document.get("notices", ()),
    ]
    return [printable(str(sentence)) for sentence in dict.fromkeys(said) if sentence]
