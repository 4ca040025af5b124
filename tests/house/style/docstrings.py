"""The docstrings of a module, of its classes and functions, and the strings below assignments."""

import ast
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from tests.house.style import words
from tests.house.tree import Fault, Module

Kind = Literal["module", "class", "function", "attribute"]


class Docstring(NamedTuple):
    """A docstring, with the line on which it begins and the name of what it describes."""

    kind: Kind
    name: str
    line: int
    text: str

    def about(self, remark: str) -> str:
        """Return a remark with the name of what it is about; of a module the path says it."""
        return remark if self.kind == "module" else f"{self.kind} {self.name}: {remark}"


def docstrings(module: Module) -> Iterator[Docstring]:
    """Yield all docstrings of a module, of public and private names."""
    yield from _leading("module", module.path, module.tree)
    yield from _below_assignments(module.tree.body)
    for found in module.statements:
        if isinstance(found, ast.ClassDef):
            yield from _leading("class", found.name, found)
            yield from _below_assignments(found.body)
        elif isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _leading("function", found.name, found)
            yield from _below_assignments(found.body)


def _leading(
    kind: Kind, name: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Docstring]:
    if node.body and (text := _string(node.body[0])) is not None:
        yield Docstring(kind, name, node.body[0].lineno, text)


def _below_assignments(body: list[ast.stmt]) -> Iterator[Docstring]:
    for assignment, below in pairwise(body):
        if isinstance(assignment, ast.Assign | ast.AnnAssign) and (text := _string(below)) is not None:
            target = assignment.targets[0] if isinstance(assignment, ast.Assign) else assignment.target
            yield Docstring("attribute", ast.unparse(target), below.lineno, text)


def _string(statement: ast.stmt) -> str | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def faults(modules: Iterable[Module]) -> list[Fault]:
    """Report the banned turns in every docstring of the modules, each at its own line of the file."""
    return [
        Fault(module.path, docstring.line + turn.line, docstring.about(turn.text))
        for module in modules
        for docstring in docstrings(module)
        for turn in words.turns(docstring.text)
    ]
