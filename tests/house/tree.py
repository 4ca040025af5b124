"""The Python files of the repository, with their imports."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("ground", "plugins", "tensors", "task", "training", "flower", "parallel"),
    *("aggregation", "protocol", "server", "client", "simulations", "atoll"),
)
"""The folders of shipped code."""
AROUND = ("benchmarks", "examples", "tools")
"""Code that a reader meets beside the shipped code; its docstrings follow the same style."""
TESTS = "tests"


class Fault(NamedTuple):
    """A violation of one rule, at a line of a file; line 0 is the file or folder as a whole."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.text}"


@dataclass(frozen=True)
class Module:
    """A Python file; `path` is relative to the root of the repository, with slashes."""

    path: str
    source: str

    @property
    def room(self) -> str:
        """The first folder of the path."""
        return self.path.split("/", 1)[0]

    @property
    def folder(self) -> str:
        """The folder of the file, relative to the root."""
        return self.path.rpartition("/")[0]

    @property
    def lines(self) -> int:
        """The number of lines."""
        return len(self.source.splitlines())

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.source, filename=self.path)

    @cached_property
    def statements(self) -> tuple[ast.stmt, ...]:
        """All statements at any depth, in the order of the file."""
        return tuple(statements(self.tree))

    def imports(self) -> Iterator[tuple[int, str]]:
        """Yield the line and the full dotted name of all that the file imports, from any package, at any depth."""
        for statement in self.statements:
            if isinstance(statement, ast.Import):
                yield from ((statement.lineno, alias.name) for alias in statement.names)
            elif isinstance(statement, ast.ImportFrom):
                yield from ((statement.lineno, f"{statement.module}.{alias.name}") for alias in statement.names)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement below a node, without the expressions between them, which are most of a tree."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        children = getattr(node, field, ())
        for child in children if isinstance(children, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def read(root: Path, places: Iterable[str]) -> list[Module]:
    """Read the Python files at places below the root, without links, hidden folders and protoc's files."""
    paths = (path for place in places for path in _python_files(root / place))
    return [Module(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in paths]


def _python_files(place: Path) -> Iterator[Path]:
    if place.is_file():
        if place.suffix == ".py" and "_pb2" not in place.name:
            yield place
    elif place.is_dir():
        for child in sorted(place.iterdir()):
            if not child.is_symlink() and not child.name.startswith((".", "__pycache__")):
                yield from _python_files(child)
