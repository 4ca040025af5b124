"""The code of an app's own that would run during or after `strategy.start`, and needs the grid or Flower's own loop.

It is looked for before a run begins: natively it would be left out, or fail after the last round.
"""

import ast
import dis
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

OURS = ("flwr.", "atoll.")
EXITS = ("exit", "_exit", "quit")
ITEMS_MAX = 1000
"""Most items of a list or table that are looked at: a larger one is data."""


def changed_methods(strategy: Any) -> Iterator[str]:
    """Yield the names of the methods of a strategy of Flower's that an app has replaced, in the object or its class."""
    for name in dir(type(strategy)):
        found = getattr(strategy, name)
        function = getattr(found, "__func__", found)
        is_method = inspect.isfunction(inspect.getattr_static(type(strategy), name, None))
        if is_method and not getattr(function, "__globals__", {}).get("__name__", "").startswith(OURS):
            yield name


def reached_by(function: Any, folder: Path) -> list[Any]:
    """Return the objects that a function may use: those to which it refers, and to which these refer in turn.

    Only code below `folder`, and objects of classes defined there, are followed. Of an object those attributes count
    that some function among these names.
    """
    found, num_seen = {id(function): function}, -1
    names = {"__call__"}
    while num_seen != len(found) + len(names):
        num_seen = len(found) + len(names)
        for each in [*found.values()]:
            if inspect.isfunction(each):
                names |= _names(each.__code__)
            found |= {id(other): other for other in _next(each, names, folder)}
    return [*found.values()]


def _next(each: Any, names: set[str], folder: Path) -> Iterator[Any]:
    """Yield the objects to which one refers."""
    if isinstance(each, functools.partial):
        yield from (each.func, *each.args, *each.keywords.values())
    elif inspect.ismethod(each):
        yield from (each.__func__, each.__self__)
    elif isinstance(each, property):
        yield from filter(None, (each.fget, each.fset))
    elif isinstance(each, dict):  # no other mapping: an archive of arrays reads its values anew each time
        yield from dict.values(each) if len(each) <= ITEMS_MAX else ()
    elif isinstance(each, list | tuple | set | frozenset):
        yield from each if len(each) <= ITEMS_MAX else ()
    elif inspect.isfunction(each):
        if _is_below(folder, each.__code__.co_filename):
            yield from _of_function(each)
    else:
        tables = [*_attributes(each, folder)]
        yield from (value for table in tables for name, value in [*table.items()] if name in names)


def _attributes(each: Any, folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the attributes of a module of an app, of a class defined in it, or of an object of such a class."""
    if inspect.ismodule(each):
        yield from [vars(each)] if _is_of(folder, each.__name__) else ()
        return
    of_class = [
        vars(base)
        for base in (each if inspect.isclass(each) else type(each)).__mro__
        if _is_of(folder, base.__module__)
    ]
    yield from of_class
    yield from [getattr(each, "__dict__", {})] if of_class else ()


def _of_function(function: FunctionType) -> Iterator[Any]:
    """Yield what a function refers to: in its closure, its globals, its defaults."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name without a value as yet
            yield cell.cell_contents
    known = function.__globals__
    yield from (known[name] for name in _names(function.__code__) if name in known)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and in those that it defines."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)


def _is_of(folder: Path, module: str) -> bool:
    return _is_below(folder, getattr(sys.modules.get(module), "__file__", None) or "")


def _is_below(folder: Path, file: str) -> bool:
    return Path(file).is_relative_to(folder)


def keeps_something(reached: list[Any], folder: Path) -> bool:
    """Return whether functions of an app set a variable beyond their own, or an attribute."""
    functions = filter(inspect.isfunction, reached)
    own = (each.__code__ for each in functions if _is_below(folder, each.__code__.co_filename))
    return any(_is_kept(step, code) for code in own for step in dis.get_instructions(code))


def _is_kept(step: dis.Instruction, code: CodeType) -> bool:
    is_of_outer = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
    return is_of_outer or step.opname in ("STORE_GLOBAL", "STORE_ATTR")


# ------------------------------------------------------------ the end of Flower's loop


def ends_the_rounds(reached: list[Any], *, is_caught: bool) -> str:
    """Return how functions may end the rounds: by an exit, or an exception that is caught; empty: they do not.

    Args:
        reached: the functions, among other objects.
        is_caught: `strategy.start` is called where the app catches exceptions.
    """
    for each in filter(inspect.isfunction, reached):
        for node in ast.walk(_parsed(each) or ast.Pass()):
            if isinstance(node, ast.Call) and _called(node) in EXITS:
                return "exits"
            if isinstance(node, ast.Raise) and is_caught:
                return "raises an exception, which main() catches"
    return ""


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def is_caught(frame: FrameType | None, folder: Path) -> bool:
    """Return whether a frame, or one that it returns to, is of an app and in a `try` that catches exceptions."""
    while frame is not None:
        if _is_below(folder, frame.f_code.co_filename) and _is_in_try(frame):
            return True
        frame = frame.f_back
    return False


def _is_in_try(frame: FrameType) -> bool:
    tree, line = _parsed(frame.f_code), frame.f_lineno - frame.f_code.co_firstlineno + 1
    bodies = (body for node in ast.walk(tree or ast.Pass()) if (body := _tried(node)))
    return any(body[0].lineno <= line <= (body[-1].end_lineno or 0) for body in bodies)


def _tried(node: ast.AST) -> list[ast.stmt]:
    """Return the statements whose exceptions a node catches."""
    if isinstance(node, ast.Try | ast.TryStar):
        return node.body if node.handlers else []
    if isinstance(node, ast.With | ast.AsyncWith):
        entered = (item.context_expr for item in node.items)
        return node.body if any(isinstance(e, ast.Call) and _called(e) == "suppress" for e in entered) else []
    return []


def _parsed(source_of: Callable[..., Any] | CodeType) -> ast.AST | None:
    """Return the syntax of a function; None: its source is not here, or is no whole statement."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(source_of)))
    except (OSError, TypeError, SyntaxError):
        return None
