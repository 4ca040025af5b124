"""Sizes: the lines of a function, which are held; the files of a folder and the lines of a file, which are warnings."""

import ast
from collections import Counter
from collections.abc import Sequence

from tests.house.tree import Fault, Module

FILES_PER_FOLDER = 30
LINES_PER_FILE = 600
LINES_PER_FUNCTION = 60


def warnings(modules: Sequence[Module]) -> list[Fault]:
    """Report full folders and long files: a reason to think about the cut, and none to split or shorten by number."""
    folders = Counter(module.folder for module in modules)
    full = [
        Fault(folder, 0, f"{count} Python files, of at most {FILES_PER_FOLDER}")
        for folder, count in folders.items()
        if count > FILES_PER_FOLDER
    ]
    long = [module for module in modules if module.lines > LINES_PER_FILE]
    return full + [Fault(module.path, 0, f"{module.lines} lines, of at most {LINES_PER_FILE}") for module in long]


def long_functions(modules: Sequence[Module]) -> list[Fault]:
    """Report functions of more than `LINES_PER_FUNCTION` lines, without decorators and docstring."""
    return [
        Fault(module.path, found.lineno, f"{found.name}: {count} lines")
        for module in modules
        for found in module.statements
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and (count := _lines(found)) > LINES_PER_FUNCTION
    ]


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[1] if len(function.body) > 1 and ast.get_docstring(function) is not None else function.body[0]
    head = function.body[0].lineno - function.lineno
    return head + (function.end_lineno or first.lineno) - first.lineno + 1
