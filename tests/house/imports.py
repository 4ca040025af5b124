"""The imports between our modules: of the whole file, `if TYPE_CHECKING` and function bodies included.

An import of `atoll.server.rounds.policy` also executes the `__init__.py` of each folder above it. That is no edge here:
those files hold a docstring, and a name that is taken from one (`from atoll import Task`) is an edge to it.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.house.graph import circles, graph_of, levels, shortest_circle
from tests.house.tree import Fault, Module


class Edge(NamedTuple):
    """An import of one of our modules by another; `name` is what is taken from it, empty for the module itself."""

    importer: str
    imported: str
    line: int
    name: str


def edges(modules: Sequence[Module]) -> list[Edge]:
    """Return all imports among the modules, by path."""
    paths = {module.name: module.path for module in modules}
    return [edge for module in modules for edge in _edges_of(module, paths)]


def _edges_of(module: Module, paths: dict[str, str]) -> Iterator[Edge]:
    for statement in module.statements:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if (found := _nearest(alias.name, paths)) is not None:
                    yield Edge(module.path, found, statement.lineno, "")
        elif isinstance(statement, ast.ImportFrom):
            source = _source(module, statement)
            for alias in statement.names:
                if (submodule := paths.get(f"{source}.{alias.name}")) is not None:
                    yield Edge(module.path, submodule, statement.lineno, "")
                elif source in paths:
                    yield Edge(module.path, paths[source], statement.lineno, alias.name)


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the full dotted name of everything that a file imports, from any package."""
    for statement in module.statements:
        if isinstance(statement, ast.Import):
            yield from ((statement.lineno, alias.name) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            source = _source(module, statement)
            yield from ((statement.lineno, f"{source}.{alias.name}") for alias in statement.names)


def _source(module: Module, statement: ast.ImportFrom) -> str:
    """The full name of the module that a `from` statement names; a relative one counts from the package."""
    if not statement.level:
        return statement.module or ""
    package = module.name.split(".")
    package = package[: len(package) - statement.level + module.path.endswith("/__init__.py")]
    return ".".join([*package, *([statement.module] if statement.module else [])])


def _nearest(name: str, paths: dict[str, str]) -> str | None:
    """The module of a dotted name, or the closest package above it that is ours."""
    while name not in paths and "." in name:
        name = name.rpartition(".")[0]
    return paths.get(name)


def module_circles(found: Iterable[Edge]) -> list[Fault]:
    """Report each import circle between modules once, by a shortest way around it."""
    return _circles([(edge.importer, edge.imported, edge) for edge in found], "modules")


def folder_circles(found: Iterable[Edge], places: dict[str, str]) -> list[Fault]:
    """Report each circle between the folders of one room once; `places` has the place of each path in the table.

    The files in a room's root, and those that the table names singly, are places by themselves.
    """
    inside = [edge for edge in found if _room(edge.importer) == _room(edge.imported)]
    return _circles([(places[edge.importer], places[edge.imported], edge) for edge in inside], "folders")


def _circles(links: Sequence[tuple[str, str, Edge]], kind: str) -> list[Fault]:
    graph = graph_of((name, below) for name, below, _ in links)
    first: dict[tuple[str, str], Edge] = {}
    for name, below, edge in links:
        first.setdefault((name, below), edge)
    faults = []
    for members in circles(graph):
        way = shortest_circle(graph, members)
        steps = [first[pair] for pair in zip(way, [*way[1:], way[0]], strict=True)]
        text = "; ".join([f"imports {steps[0].imported}", *(_sentence(edge) for edge in steps[1:])])
        among = f" (the shortest way around a circle of {len(members)} {kind})" if len(members) > len(way) else ""
        faults.append(Fault(steps[0].importer, steps[0].line, f"{text}{among}"))
    return faults


def _sentence(edge: Edge) -> str:
    return f"{edge.importer}:{edge.line} imports {edge.imported}"


def room_levels(found: Iterable[Edge], room: str) -> int:
    """Return the length of the longest chain of imports inside a room, in modules; 1 if no module imports another."""
    inside = [edge for edge in found if _room(edge.importer) == _room(edge.imported) == room]
    return max(levels(graph_of((edge.importer, edge.imported) for edge in inside)).values(), default=1)


def _room(path: str) -> str:
    return path.split("/", 1)[0]
