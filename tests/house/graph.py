"""Directed graphs of names: circles, and the longest chain."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping

Graph = Mapping[str, Collection[str]]
"""Each name with the names that it depends on."""


def graph_of(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Build a graph from (name, what it depends on), in a fixed order and without loops from a name to itself."""
    graph: dict[str, set[str]] = {}
    for name, below in pairs:
        graph.setdefault(name, set())
        graph.setdefault(below, set())
        if name != below:
            graph[name].add(below)
    return {name: sorted(graph[name]) for name in sorted(graph)}


def components(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components, every component after those that it depends on.

    Source: R. Tarjan, "Depth-first search and linear graph algorithms", 1972; with a stack of its own in place of
    recursion.
    """
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    open_names: list[str] = []
    done: list[list[str]] = []
    finished: set[str] = set()
    for start in graph:
        if start in number:
            continue
        path = [(start, iter(graph[start]))]
        number[start] = low[start] = len(number)
        open_names.append(start)
        while path:
            name, rest = path[-1]
            below = next(rest, None)
            if below is not None:
                if below not in number:
                    number[below] = low[below] = len(number)
                    open_names.append(below)
                    path.append((below, iter(graph[below])))
                elif below not in finished:
                    low[name] = min(low[name], number[below])
                continue
            path.pop()
            if path:
                low[path[-1][0]] = min(low[path[-1][0]], low[name])
            if low[name] == number[name]:
                at = open_names.index(name)
                done.append(sorted(open_names[at:]))
                finished.update(open_names[at:])
                del open_names[at:]
    return done


def circles(graph: Graph) -> list[list[str]]:
    """Return the components of more than one name, largest first."""
    return sorted((found for found in components(graph) if len(found) > 1), key=lambda found: (-len(found), found))


def shortest_circle(graph: Graph, members: Collection[str]) -> list[str]:
    """Return a shortest circle among the members of one component; the last name depends on the first."""
    inside = set(members)
    found = [_circle_from(start, graph, inside) for start in sorted(inside)]
    return min(found, key=lambda circle: (len(circle), circle))


def _circle_from(start: str, graph: Graph, inside: set[str]) -> list[str]:
    came_from: dict[str, str] = {}
    queue = deque([start])
    while queue:
        name = queue.popleft()
        for below in graph[name]:
            if below == start:
                circle = [name]
                while circle[-1] != start:
                    circle.append(came_from[circle[-1]])
                return circle[::-1]
            if below in inside and below not in came_from:
                came_from[below] = name
                queue.append(below)
    raise ValueError(f"{start} is in no circle")


def levels(graph: Graph) -> dict[str, int]:
    """Return the level of each name: 1 for a name without dependencies, else 1 more than the highest below it.

    The names of one circle share a level.
    """
    level: dict[str, int] = {}
    for component in components(graph):
        below = {other for name in component for other in graph[name]} - set(component)
        height = 1 + max((level[other] for other in below), default=0)
        level |= dict.fromkeys(component, height)
    return level
