"""Sizes: files per folder, lines per file and function, parameters."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tests.house.tree import Fault, Function, Module

FILES_PER_FOLDER = 30
LINES_PER_FILE = 600
LINES_PER_FUNCTION = 60
PARAMETERS = 8


def files_per_folder(modules: Iterable[Module]) -> Counter[str]:
    """Count the Python files that lie directly in each folder, `__init__.py` included."""
    return Counter(module.folder for module in modules)


def full_folders(modules: Iterable[Module]) -> list[Fault]:
    """Report folders with more than `FILES_PER_FOLDER` files, fullest first."""
    counted = files_per_folder(modules).most_common()
    return [Fault(folder, 0, f"{count} Python files") for folder, count in counted if count > FILES_PER_FOLDER]


def long_files(modules: Iterable[Module]) -> list[Fault]:
    """Report files with more than `LINES_PER_FILE` lines, longest first."""
    found = sorted(modules, key=lambda module: -module.lines)
    return [Fault(module.path, 0, f"{module.lines} lines") for module in found if module.lines > LINES_PER_FILE]


def long_functions(modules: Iterable[Module]) -> list[Fault]:
    """Report functions with more than `LINES_PER_FUNCTION` lines."""
    return [
        Fault(module.path, function.lineno, f"{function.name}: {count} lines")
        for module in modules
        for function in functions(module)
        if (count := lines_of(function)) > LINES_PER_FUNCTION
    ]


def wide_functions(modules: Sequence[Module]) -> list[Fault]:
    """Report functions with more than `PARAMETERS` parameters.

    A command of typer is exempt: each of its parameters is an option of the command line, and typer reads them from
    the signature.
    """
    by_call = commands_by_call(modules)
    return [
        Fault(module.path, function.lineno, f"{function.name}: {count} parameters")
        for module in modules
        for function in functions(module)
        if (count := parameters_of(function)) > PARAMETERS
        and not (module.path.startswith("atoll/cli/") and is_decorated_command(function))
        and (module.name, function.name) not in by_call
    ]


def functions(module: Module) -> Iterator[Function]:
    """Yield the functions and methods of a module at any depth."""
    return (found for found in module.statements if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef))


def lines_of(function: Function) -> int:
    """Count the lines from `def` to the end, without the docstring and without decorators."""
    count = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if len(function.body) > 1 and isinstance(first, ast.Expr) and ast.get_docstring(function) is not None:
        count -= (first.end_lineno or first.lineno) - first.lineno + 1
    return count


def parameters_of(function: Function) -> int:
    """Count the parameters, `*args` and `**kwargs` as one each; a leading `self` or `cls` does not count."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    count = len(names) + len(given.kwonlyargs) + (given.vararg is not None) + (given.kwarg is not None)
    return count - (names[:1] in (["self"], ["cls"]))


def is_decorated_command(function: Function) -> bool:
    """Return whether a decorator is a call of some `app.command`."""
    return any(_is_command(decorator) for decorator in function.decorator_list)


def commands_by_call(modules: Iterable[Module]) -> set[tuple[str, str]]:
    """Return (module, function) of the commands that a module of `atoll/cli` registers as `app.command()(function)`."""
    found = set()
    for module in modules:
        if not module.path.startswith("atoll/cli/"):
            continue
        origins = _origins(module)
        for statement in module.statements:
            call = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(call, ast.Call) and _is_command(call.func):
                names = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
                found |= {origins.get(name, (module.name, name)) for name in names}
    return found


def _origins(module: Module) -> dict[str, tuple[str, str]]:
    """The names that a module imports, with (module, name) where they come from."""
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for statement in module.statements
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def _is_command(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "command"
