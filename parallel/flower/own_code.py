"""The code of an app's own that would run during or after `strategy.start`, and needs the grid or Flower's own loop.

It is looked for before a run begins: natively it would be left out, or fail after the last round.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from atoll.parallel.flower.server_host import Started

LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
OURS = ("flwr.", "atoll.")


def changed_methods(strategy: Any) -> Iterator[str]:
    """Yield the names of the methods of a strategy of Flower's that an app has replaced, in the object or its class."""
    for name in dir(type(strategy)):
        found = getattr(strategy, name)
        function = getattr(found, "__func__", found)
        is_method = inspect.isfunction(inspect.getattr_static(type(strategy), name, None))
        if is_method and not getattr(function, "__globals__", {}).get("__name__", "").startswith(OURS):
            yield name


def uses_grid_again(main: Callable[..., Any]) -> bool:
    """Return whether a `main()` names its grid more than once on one way through it, or in a loop.

    The first time is that of its `strategy.start`. Without its source the answer is no.
    """
    main = inspect.unwrap(main)
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(main))).body
        grid = next(iter(inspect.signature(main).parameters))
    except (OSError, TypeError, ValueError, SyntaxError, StopIteration):
        return False
    return sum(_uses(statement, grid) for statement in getattr(function, "body", ())) > 1


def _uses(node: ast.AST, name: str) -> int:
    """Return how often a name is used on the way through a node with the most uses; in a loop, twice each."""
    if isinstance(node, ast.Name):
        return int(node.id == name)
    if isinstance(node, FUNCTIONS) and name in {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}:
        return 0  # a name of its own
    if isinstance(node, ast.If):
        return _uses(node.test, name) + max(sum(_uses(each, name) for each in way) for way in (node.body, node.orelse))
    if isinstance(node, ast.Match):
        return _uses(node.subject, name) + max(_uses(case, name) for case in node.cases)
    number = sum(_uses(child, name) for child in ast.iter_child_nodes(node))
    return 2 * number if isinstance(node, LOOPS) else number


def reached_by_evaluate_fn(started: Started) -> Iterator[str]:
    """Yield the names of what `evaluate_fn` refers to and may use, or change for the rounds that follow."""
    reached = {id(each) for each in _reached(started.evaluate_fn)}
    yield from (name for name, each in started.given.items() if each is not None and id(each) in reached)


def _reached(function: Any) -> Iterator[Any]:
    """Yield the objects to which a function refers: its closure, globals, defaults, bound arguments and attributes."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _reached(function.func)
        return
    owner = getattr(function, "__self__", None if inspect.isfunction(function) else function)
    yield from getattr(owner, "__dict__", {}).values()
    plain = getattr(function, "__func__", function)
    plain = plain if inspect.isfunction(plain) else inspect.getattr_static(type(function), "__call__", None)
    if inspect.isfunction(plain):
        for cell in plain.__closure__ or ():
            with suppress(ValueError):  # a name without a value as yet
                yield cell.cell_contents
        yield from (plain.__globals__[name] for name in plain.__code__.co_names if name in plain.__globals__)
        yield from (*(plain.__defaults__ or ()), *(plain.__kwdefaults__ or {}).values())
