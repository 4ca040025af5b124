"""`atoll run statistics`: statistics of the sites' data before a training, merged exactly."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, clock, say, shortened, table
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.place import STATE
from atoll.operations.runs import collect
from atoll.operations.views import read_view

ROWS_MAX = 40
"""Most rows of one table; --json has all."""

What = Annotated[
    str | None,
    typer.Argument(
        metavar="TASK | RUN.toml",
        help="The TOML of the planned run, or its task (`module:attribute` or `path/to/file.py:attribute`).",
        show_default=False,
    ),
]
Deadline = Annotated[
    float,
    typer.Option(
        "--deadline",
        metavar="SECONDS",
        callback=options.between(0.1, 86_400),
        help="Seconds in which sites may answer; the command ends as soon as all have.",
    ),
]
Show = Annotated[
    int | None,
    typer.Option(
        "--show",
        metavar="NUMBER",
        callback=options.between(0, 2**31),
        help="Show the kept result of this number again, and ask no site; 0: the newest.",
    ),
]


def statistics(
    what: What = None,
    state: options.StateOfRun = None,
    overrides: options.Set = [],  # noqa: B006 - typer's way to say "none given"; never changed
    deadline: Deadline = 300.0,
    show: Show = None,
    json: options.Json = False,
) -> None:
    """Ask the connected sites of a task for statistics of their data before a run: counts, labels, moments, other sums.

    No model is involved, and no run begins. Each site's policy decides what leaves it. The sums are exact: mean and
    variance equal those of the pooled data. Before a run with secure sums the statistics that secure.statistics names
    are added in one, and no site's numbers are known. `docs/statistics.md` explains the output.
    """
    if (what is None) == (show is None):
        got = "" if what is None else f"got {what} and --show {show}: "
        raise CommandError(
            f"{got}name the task of the planned run, or its TOML, to ask the sites; or --show 0 for the newest result"
        )
    if what is None:
        if overrides:
            raise CommandError(f"--set {overrides[0]}: a kept result does not change: name a task, or leave out --set")
        found = read_view("statistics", state or STATE, number=show or 0)
    else:
        where, number = collect(what, state, overrides, deadline)
        found = read_view("statistics", where, number=number)
    if json:
        as_json(found)
    else:
        say_statistics(found)


def say_statistics(found: Mapping[str, Any]) -> None:
    """Print statistics as tables: all sites together, each site that allows it, and the reasons."""
    if "number" in found:
        answered, asked = len(found["answered"]), count_of(len(found["asked"]), "site")
        when = clock(found["ended_at"])
        if (secure := found.get("secure")) is None:
            how = f"{answered} of {asked} answered"
        else:
            sums = count_of(secure["sessions"], "secure sum") if "sessions" in secure else "secure sum"
            how = f"{sums} of {answered} of {asked}" if secure["sites"] else f"no secure sum of {asked} was opened"
        say(f"statistics {found['number']} of {found['task']}, {when}: {how}")
    for each in found.get("secure", {}).get("lost", ()):
        say(f"no secure sum of {', '.join(each['sites'])}: {shortened(each['why'], 200)}")
    for site, why in found["refused"].items():
        say(f"no answer of {site}: {shortened(why, 200)}")
    for split in dict.fromkeys(split for part in _of_sites(found).values() for split in part):
        _say_split(split, {name: part[split] for name, part in _of_sites(found).items() if split in part})
    for place, why in found["not_merged"].items():
        say(f"no sum of {place}: {why}")
    for site, places in found["left_out"].items():
        for why in dict.fromkeys(places.values()):
            names = [place for place, reason in places.items() if reason == why]
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            say(f"left out by {site}: {', '.join(names[:10])}{more}: {why}")
    for why in dict.fromkeys(found["not_shown"].values()):
        say(f"not shown: {', '.join(site for site, reason in found['not_shown'].items() if reason == why)}: {why}")


def _of_sites(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"all": found["merged"], **found["sites"]}


def _say_split(split: str, parts: Mapping[str, Mapping[str, Any]]) -> None:
    say(f"\n{split}:")
    sizes = [(name, part.get("examples"), part.get("sites")) for name, part in parts.items() if "examples" in part]
    _table(["site", "examples", "sites"], sizes)
    for name in _names(parts, "labels"):
        _say_labels(
            name, {site: part["labels"][name] for site, part in parts.items() if name in part.get("labels", ())}
        )
    for group in ("target_bins", "feature_bins"):
        for name in _names(parts, group):
            bins = {site: part[group][name] for site, part in parts.items() if name in part.get(group, ())}
            _say_labels(name, bins, "bin")
    for group in ("targets", "features"):
        rows = [
            (name, site, *_moments(part[group][name]))
            for name in _names(parts, group)
            for site, part in parts.items()
            if name in part.get(group, ())
        ]
        _table(
            [group[:-1], "site", "values", "missing", "infinite", "outside", "mean", "std", "min", "max", "sites"], rows
        )
    own = [
        (name, site, numbers["merge"], shortened(str(numbers["value"])), numbers.get("sites"))
        for name in _names(parts, "own")
        for site, part in parts.items()
        if (numbers := part.get("own", {}).get(name)) is not None
    ]
    _table(["own", "site", "merge", "value", "sites"], own)


def _say_labels(name: str, parts: Mapping[str, Mapping[str, Any]], cell: str = "label") -> None:
    labels = list(dict.fromkeys(label for part in parts.values() for label in part["counts"]))
    rows = [(label, *(part["counts"].get(label) for part in parts.values())) for label in labels]
    _table([f"{cell} of {name}", *parts], rows)
    for site, part in parts.items():
        if part.get("withheld"):
            few = count_of(part["withheld"], f"{cell} is", f"{cell}s are")
            say(f"{few} left out by {'the sites: these counts are lower limits' if site == 'all' else site}")


def _moments(part: Mapping[str, Any]) -> Iterator[object]:
    variance = part["variance"]
    yield from (part.get(name) for name in ("count", "missing", "infinite", "outside", "mean"))
    yield None if variance is None else variance**0.5
    yield from (part.get(name) for name in ("min", "max", "sites"))


def _names(parts: Mapping[str, Mapping[str, Any]], group: str) -> list[str]:
    return list(dict.fromkeys(name for part in parts.values() for name in part.get(group, ())))


def _cell(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def _table(columns: list[str], rows: list[Any]) -> None:
    """Print the columns that are not empty, `ROWS_MAX` rows at most."""
    if not rows:
        return
    used = [place for place, column in enumerate(columns) if any(row[place] is not None for row in rows)]
    say("")
    table(
        [columns[place] for place in used], [[_cell(row[place]) for place in used] for row in rows[:ROWS_MAX]], empty=""
    )
    if len(rows) > ROWS_MAX:
        say(f"... and {count_of(len(rows) - ROWS_MAX, 'row')} more; --json has all")
