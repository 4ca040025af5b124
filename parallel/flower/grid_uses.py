"""The uses of its grid by a `main()`, from its source: natively there is one alone, that of its `strategy.start`.

A function or class of the app's that is given the grid counts as often as it uses it in turn; a class keeps it in
attributes. What the source does not show, such as another name of the grid, is found when it happens.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def uses_grid_again(main: Callable[..., Any], folder: Path) -> bool:
    """Return whether a `main()` uses its grid more than once on one way through it, or in a loop.

    Args:
        main: without its source the answer is no.
        folder: of the app.
    """
    main = inspect.unwrap(main)
    with suppress(OSError, TypeError, ValueError, SyntaxError, StopIteration):
        grid = next(iter(inspect.signature(main).parameters))
        return _Uses(folder).by(main, grid) > 1
    return False


class _Ways(NamedTuple):
    """The most uses on a way through statements."""

    left: int
    """Ends with a return or an exception."""
    on: int | None
    """Goes on to what follows; None: no way does."""

    @property
    def most(self) -> int:
        """The most uses on any way."""
        return max(self.left, self.on or 0)

    @classmethod
    def one_of(cls, ways: Iterable["_Ways"], before: int) -> "_Ways":
        """Return one of several ways, after some uses before."""
        ways = [*ways]
        on = [way.on for way in ways if way.on is not None]
        return cls(before + max(way.left for way in ways), before + max(on) if on else None)


IsUse = Callable[[ast.AST], bool]


class _Uses:
    """The uses of a value that is given to functions and classes of an app."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._inside: set[Any] = set()

    def by(self, function: Callable[..., Any], name: str) -> int:
        """Return the most uses of a parameter on a way through a function, or by all methods of a class.

        Raises:
            OSError: its source is not here.
            SyntaxError: it is no whole statement.
        """
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        known = vars(inspect.getmodule(function) or ast)
        if not isinstance(tree, ast.ClassDef):
            return self._walk(lambda node: _is(node, name), known).through(getattr(tree, "body", ())).most
        return self._by_methods(tree, name, known)

    def _by_methods(self, tree: ast.ClassDef, name: str, known: Mapping[str, Any]) -> int:
        """Return the uses by the methods that no other one calls, with those that they call themselves."""
        kept = {name, *_attributes_of(tree, name)}
        walk = self._walk(lambda node: _is(node, name) or _is_attribute(node, kept), known)
        methods = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
        calls = {each: _calls_of(method) & methods.keys() - {each} for each, method in methods.items()}
        left = dict(calls)
        while left:  # first those that call none of the others; of several that call each other any one
            each = min(left, key=lambda one: len(left[one] & left.keys()))
            walk.known[each] = walk.through(methods[each].body).most
            del left[each]
        called = set().union(*calls.values())
        return sum(walk.known[each] for each in methods if each not in called)

    def _walk(self, is_use: IsUse, known: Mapping[str, Any]) -> "_Walk":
        return _Walk(is_use, lambda call: self._given(call, is_use, known))

    def _given(self, call: ast.Call, is_use: IsUse, known: Mapping[str, Any]) -> int | None:
        """Return the uses by a function or class of the app that a call gives the value; None: it is another."""
        called: Any = known.get(getattr(call.func, "id", ""))
        file = getattr(inspect.getmodule(called), "__file__", None) if callable(called) else None
        if file is None or not Path(file).is_relative_to(self._folder) or called in self._inside:
            return None
        with suppress(OSError, TypeError, ValueError, SyntaxError, StopIteration):
            parameter = next(_parameters(called, call, is_use))
            self._inside.add(called)
            return self.by(called, parameter)
        return None


def _parameters(called: Callable[..., Any], call: ast.Call, is_use: IsUse) -> Iterator[str]:
    """Yield the parameters of a function that a call gives the value."""
    known = [*inspect.signature(called).parameters]
    yield from (known[place] for place, given in enumerate(call.args) if is_use(given) and place < len(known))
    yield from (given.arg for given in call.keywords if given.arg is not None and is_use(given.value))


def _attributes_of(tree: ast.AST, name: str) -> Iterator[str]:
    """Yield the attributes that are given the value of a name."""
    for to, value in _assigned(tree):
        if isinstance(to, ast.Attribute) and _is(value, name):
            yield to.attr


def _assigned(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the targets and values of assignments, also of several in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value


def _name_of(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _calls_of(method: ast.AST) -> set[str]:
    """Return the attributes that a method names, with the other methods that it calls."""
    return {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_attribute(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Load)


class _Walk:
    """The uses on the ways through syntax.

    Args:
        is_use: tells whether a node is one.
        given: returns the uses by what a call gives the value; None: the call is any other.
    """

    def __init__(self, is_use: IsUse, given: Callable[[ast.Call], int | None]) -> None:
        self._is_use, self._given = is_use, given
        self.known: dict[str, int] = {}
        """The uses by functions that were defined on the way, and by methods: where they are named."""

    def through(self, statements: Iterable[ast.AST]) -> _Ways:
        """Return the most uses on a way through statements; those after a return or an exception are none."""
        left, here = 0, 0
        for statement in statements:
            way = self._one(statement)
            left = max(left, here + way.left)
            if way.on is None:
                return _Ways(left, None)
            here += way.on
        return _Ways(left, here)

    def _one(self, node: ast.AST) -> _Ways:
        if isinstance(node, ast.If):
            return _Ways.one_of([self.through(node.body), self.through(node.orelse)], self._uses(node.test))
        if isinstance(node, ast.Match):
            ways = [self.through(case.body) for case in node.cases]
            return _Ways.one_of([*ways, _Ways(0, 0)], self._uses(node.subject))
        if isinstance(node, ast.With | ast.AsyncWith):
            return _Ways.one_of([self.through(node.body)], sum(map(self._uses, node.items)))
        number = self._uses(node)
        return _Ways(number, None if isinstance(node, ast.Return | ast.Raise) else number)

    def _uses(self, node: ast.AST) -> int:
        """Return the most uses within a node; in a loop, twice each."""
        if self._is_use(node):
            return 1
        if isinstance(node, ast.Name | ast.Attribute) and (number := self.known.get(_name_of(node))) is not None:
            return number
        if isinstance(node, ast.Call) and (number := self._given(node)) is not None:
            return number
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(
            isinstance(to, ast.Attribute) and self._is_use(value) for to, value in _assigned(node)
        ):
            return 0  # kept for later
        if isinstance(node, FUNCTIONS) and any(self._is_use(ast.Name(each)) for each in _own_names(node)):
            return 0  # a name of its own
        if isinstance(node, ast.If | ast.Match):
            return self._one(node).most
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.known[node.name] = self.through(node.body).most
            return 0
        number = sum(map(self._uses, ast.iter_child_nodes(node)))
        return 2 * number if isinstance(node, LOOPS) else number


def _own_names(function: ast.AST) -> Iterator[str]:
    """Yield the names of the parameters of a function."""
    arguments = getattr(function, "args", None)
    if isinstance(arguments, ast.arguments):
        yield from (each.arg for each in ast.walk(arguments) if isinstance(each, ast.arg))
