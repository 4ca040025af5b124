"""A proposal of floors from the real imports: the lowest floor on which each place can lie."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from tests.house.graph import circles, graph_of, levels
from tests.house.imports import Edge
from tests.house.upward import House

FEW = 6
"""Imports from one place to another are listed up to this number."""


def proposal(house: House, room: str, paths: Iterable[str], edges: Iterable[Edge]) -> str:
    """Return the entry of a room for `FLOORS`, and below it the imports by which places form a circle.

    A folder whose files belong to different floors shows up in a circle: name the files of it in the table that lie
    lower or higher than the rest, and ask again.
    """
    inside = [edge for edge in edges if edge.importer.startswith(f"{room}/") and edge.imported.startswith(f"{room}/")]
    between: dict[tuple[str, str], list[Edge]] = defaultdict(list)
    for edge in inside:
        between[house.place(edge.importer), house.place(edge.imported)].append(edge)
    alone = {house.place(path) for path in paths if path.startswith(f"{room}/")}
    graph = graph_of([*between, *((place, place) for place in alone)])
    floors: dict[int, list[str]] = defaultdict(list)
    for place, level in levels(graph).items():
        if place != f"{room}/__init__.py" or graph[place]:
            floors[level].append(place.removeprefix(f"{room}/"))
    lines = [f'    "{room}": (']
    lines += [f"        {_row(sorted(floors[level]))}," for level in sorted(floors)]
    lines.append("    ),")
    for members in circles(graph):
        lines += ["", f"A circle of {', '.join(members)}:", *_links(members, between)]
    return "\n".join(lines)


def _row(places: Sequence[str]) -> str:
    names = ", ".join(f'"{place}"' for place in places)
    return f"({names},)" if len(places) == 1 else f"({names})"


def _links(members: Sequence[str], between: dict[tuple[str, str], list[Edge]]) -> list[str]:
    """The imports between the members of a circle, the rarest first: these are the ones to change."""
    inside = set(members)
    pairs = [pair for pair in between if pair[0] != pair[1] and inside.issuperset(pair)]
    lines = []
    for pair in sorted(pairs, key=lambda pair: (len(between[pair]), pair)):
        lines.append(f"  {pair[0]} imports {pair[1]}, {len(between[pair])} times")
        if len(between[pair]) <= FEW:
            lines += [f"    {edge.importer}:{edge.line} {edge.imported} {edge.name}".rstrip() for edge in between[pair]]
    return lines
