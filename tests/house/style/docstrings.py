"""The docstrings of a module: its own, those of its classes and functions, and the strings below assignments."""

import ast
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from tests.house.style import words
from tests.house.tree import Fault, Module

Kind = Literal["module", "class", "function", "property", "attribute"]
Rule = Literal["opening", "brevity", "turn"]


class Docstring(NamedTuple):
    """A docstring, with the line on which it begins and the name of what it describes."""

    kind: Kind
    name: str
    line: int
    text: str


class Break(NamedTuple):
    """A break of the style and the rule that it breaks."""

    rule: Rule
    fault: Fault


def docstrings(module: Module) -> Iterator[Docstring]:
    """Yield all docstrings of a module, of public and private names."""
    yield from _leading("module", module.path, module.tree)
    yield from _below_assignments(module.tree.body)
    for found in module.statements:
        if isinstance(found, ast.ClassDef):
            yield from _leading("class", found.name, found)
            yield from _below_assignments(found.body)
        elif isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            kind: Kind = "property" if _is_property(found) else "function"
            yield from _leading(kind, found.name, found)
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


def _is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
    return bool(names & {"property", "cached_property"})


def breaks(modules: Iterable[Module]) -> list[Break]:
    """Judge every docstring of the modules by all rules."""
    return [found for module in modules for docstring in docstrings(module) for found in judged(module.path, docstring)]


def judged(path: str, docstring: Docstring) -> Iterator[Break]:
    """Yield the breaks of one docstring, each at its own line of the file."""
    is_magic = docstring.name.startswith("__") and docstring.name.endswith("__")
    may_be_unit = is_magic or docstring.kind in ("property", "attribute")
    remarks: list[tuple[Rule, words.Remark | None]] = [
        ("opening", words.opening(docstring.text)),
        ("brevity", words.brevity(docstring.text, may_be_unit=may_be_unit)),
        *(("turn", turn) for turn in words.turns(docstring.text)),
    ]
    for rule, remark in remarks:
        if remark is not None:
            text = f"{docstring.kind} {docstring.name}: {remark.text}" if docstring.kind != "module" else remark.text
            yield Break(rule, Fault(path, docstring.line + remark.line, text))
