"""Statistics of the sites' data as sentences and tables: all sites together, each site that allows it, the reasons."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.ground.printable import count_of, shortened, some_of

WHY_MAX = 200
"""Characters of a reason that a site has given."""

PLACES_MAX = 10
"""Number of left-out statistics that a sentence names."""


@dataclass(frozen=True, slots=True)
class Split:
    """A split of the data, such as `train`, to which the parts behind it belong."""

    name: str


@dataclass(frozen=True, slots=True)
class Rows:
    """A table, without the columns that are empty in all of its rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


Part = str | Split | Rows


def headline(found: Mapping[str, Any], at: str) -> str:
    """Return what was asked of how many sites, in a sentence.

    Args:
        found: a kept result of statistics, as `atoll run statistics --json`.
        at: the instant of its end, as a text.
    """
    answered, asked = len(found["answered"]), count_of(len(found["asked"]), "site")
    if (secure := found.get("secure")) is None:
        how = f"{answered} of {asked} answered"
    else:
        sums = count_of(secure["sessions"], "secure sum") if "sessions" in secure else "secure sum"
        how = f"{sums} of {answered} of {asked}" if secure["sites"] else f"no secure sum of {asked} was opened"
    return f"statistics {found['number']} of {found['task']}, {at}: {how}"


def parts_of(found: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the sentences and tables of statistics, in the order in which a person reads them."""
    for each in found.get("secure", {}).get("lost", ()):
        yield f"no secure sum of {', '.join(each['sites'])}: {shortened(each['why'], WHY_MAX)}"
    for site, why in found["refused"].items():
        yield f"no answer of {site}: {shortened(why, WHY_MAX)}"
    by_site = {"all": found["merged"], **found["sites"]}
    for split in dict.fromkeys(split for part in by_site.values() for split in part):
        yield Split(split)
        yield from _of_split({name: part[split] for name, part in by_site.items() if split in part})
    for place, why in found["not_merged"].items():
        yield f"no sum of {place}: {why}"
    for site, places in found["left_out"].items():
        for why in dict.fromkeys(places.values()):
            names = [place for place, reason in places.items() if reason == why]
            yield f"left out by {site}: {some_of(names, PLACES_MAX)}: {why}"
    for why in dict.fromkeys(found["not_shown"].values()):
        yield f"not shown: {', '.join(site for site, reason in found['not_shown'].items() if reason == why)}: {why}"


def _of_split(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[Part]:
    sizes = [(name, part.get("examples"), part.get("sites")) for name, part in parts.items() if "examples" in part]
    yield from _rows(["site", "examples", "sites"], sizes)
    for name in _names(parts, "labels"):
        counted = {site: part["labels"][name] for site, part in parts.items() if name in part.get("labels", ())}
        yield from _labels(name, counted)
    for group in ("target_bins", "feature_bins"):
        for name in _names(parts, group):
            bins = {site: part[group][name] for site, part in parts.items() if name in part.get(group, ())}
            yield from _labels(name, bins, "bin")
    for group in ("targets", "features"):
        rows = [
            (name, site, *_moments(part[group][name]))
            for name in _names(parts, group)
            for site, part in parts.items()
            if name in part.get(group, ())
        ]
        heads = ("values", "missing", "infinite", "outside", "mean", "std", "min", "max", "sites")
        yield from _rows([group[:-1], "site", *heads], rows)
    own = [
        (name, site, numbers["merge"], shortened(str(numbers["value"])), numbers.get("sites"))
        for name in _names(parts, "own")
        for site, part in parts.items()
        if (numbers := part.get("own", {}).get(name)) is not None
    ]
    yield from _rows(["own", "site", "merge", "value", "sites"], own)


def _labels(name: str, parts: Mapping[str, Mapping[str, Any]], cell: str = "label") -> Iterator[Part]:
    labels = list(dict.fromkeys(label for part in parts.values() for label in part["counts"]))
    rows = [(label, *(part["counts"].get(label) for part in parts.values())) for label in labels]
    yield from _rows([f"{cell} of {name}", *parts], rows)
    for site, part in parts.items():
        if part.get("withheld"):
            few = count_of(part["withheld"], f"{cell} is", f"{cell}s are")
            yield f"{few} left out by {'the sites: these counts are lower limits' if site == 'all' else site}"


def _moments(part: Mapping[str, Any]) -> Iterator[object]:
    variance = part["variance"]
    yield from (part.get(name) for name in ("count", "missing", "infinite", "outside", "mean"))
    yield None if variance is None else variance**0.5
    yield from (part.get(name) for name in ("min", "max", "sites"))


def _names(parts: Mapping[str, Mapping[str, Any]], group: str) -> list[str]:
    return list(dict.fromkeys(name for part in parts.values() for name in part.get(group, ())))


def _rows(columns: list[str], rows: list[Any]) -> Iterator[Rows]:
    if rows:
        used = [place for place, _ in enumerate(columns) if any(row[place] is not None for row in rows)]
        yield Rows([columns[place] for place in used], [[row[place] for place in used] for row in rows])
