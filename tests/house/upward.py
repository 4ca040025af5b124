"""Imports that run up a floor, held against the table in `tests/house/floors.py`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.house.imports import Edge
from tests.house.tree import Fault

Floors = Mapping[str, Sequence[Sequence[str]]]
ROOT, VERSION = "atoll/__init__.py", "__version__"
"""The root package, and its one name that every place may import."""

PROJECT = "atoll/cli/project/"
"""The project that `atoll new` writes: a user's code, outside of the rooms as the examples are."""


@dataclass(frozen=True)
class House:
    """The table: the floors of each room, the rooms that each room may import, and the places of tests that do not
    mirror their folder."""

    floors: Floors
    may_import: Mapping[str, set[str]]
    tests_elsewhere: Mapping[str, str] = field(default_factory=dict)

    def place(self, path: str) -> str:
        """Return the place of a file: itself if the table names it or it lies in a room's root, else its folder."""
        room, _, rest = path.partition("/")
        named = {place for floor in self.floors.get(room, ()) for place in floor}
        folder = rest.rpartition("/")[0]
        return path if rest in named or not folder else f"{room}/{folder}"

    def heights(self) -> dict[str, int]:
        """Return the floor of each place, from 0."""
        return {
            f"{room}/{place}": height
            for room, floors in self.floors.items()
            for height, floor in enumerate(floors)
            for place in floor
        }


def upward_imports(house: House, edges: Iterable[Edge]) -> list[Fault]:
    """Report imports of a higher room, of a higher floor, or of another place on the same floor."""
    heights = house.heights()
    faults = (_judged(house, heights, edge) for edge in edges)
    return list(dict.fromkeys(fault for fault in faults if fault is not None))


def _judged(house: House, heights: Mapping[str, int], edge: Edge) -> Fault | None:
    room, other = edge.importer.split("/", 1)[0], edge.imported.split("/", 1)[0]
    if room not in house.may_import or other not in house.may_import:
        return None  # benchmarks, examples and tests stand outside
    if edge.importer.startswith(PROJECT) or (edge.imported, edge.name) == (ROOT, VERSION):
        return None
    if room != other:
        is_fine = other in house.may_import[room]
        return None if is_fine else Fault(*_at(edge), f"imports {edge.imported}: {room} may not import it")
    mine, theirs = house.place(edge.importer), house.place(edge.imported)
    if mine == theirs or mine not in heights or theirs not in heights or heights[theirs] < heights[mine]:
        return None
    text = f"imports {edge.imported}: {theirs} is on floor {heights[theirs]}, {mine} on floor {heights[mine]}"
    return Fault(*_at(edge), text)


def _at(edge: Edge) -> tuple[str, int]:
    return edge.importer, edge.line


def missing_places(house: House, paths: Sequence[str], edges: Iterable[Edge]) -> list[Fault]:
    """Report files without a place in the table, one for each folder, and places of the table without a file.

    An `__init__.py` in a room's root that imports nothing needs no place.
    """
    importers = {edge.importer for edge in edges}
    inside = [path for path in paths if path.split("/", 1)[0] in house.floors]
    needed = {house.place(path) for path in inside if not _is_bare_root(path, importers)}
    declared, there = set(house.heights()), {house.place(path) for path in inside}
    missing = [Fault(place, 0, "is missing in tests/house/floors.py") for place in sorted(needed - declared)]
    stale = [Fault(place, 0, "is in tests/house/floors.py, and has no file") for place in sorted(declared - there)]
    return missing + stale


def _is_bare_root(path: str, importers: set[str]) -> bool:
    return path.count("/") == 1 and path.endswith("/__init__.py") and path not in importers
