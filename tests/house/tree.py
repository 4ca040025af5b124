"""The Python files of the repository, each parsed once."""

import ast
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROOMS = (
    "ground",
    "plugins",
    "tensors",
    "task",
    "training",
    "flower",
    "parallel",
    "aggregation",
    "protocol",
    "server",
    "client",
    "simulations",
    "atoll",
)
"""The folders of shipped code."""
AROUND = ("benchmarks", "examples", "tools")
"""Code that a reader meets beside the shipped code; its docstrings follow the same style."""
TESTS = "tests"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Fault(NamedTuple):
    """A violation of one bound, at a line of a file; line 0 is the file or folder as a whole."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{place}: {self.text}"


@dataclass(frozen=True)
class Module:
    """A parsed file; `path` is relative to the root of the repository, with slashes."""

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

    @cached_property
    def name(self) -> str:
        """The full dotted name; the rooms are imported as `atoll.ROOM`."""
        return dotted(self.path)

    @cached_property
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


def dotted(path: str) -> str:
    """Return the dotted name of the module at a path: `server/rounds/policy.py` is `atoll.server.rounds.policy`."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[:1] == ["atoll"] or parts[0] not in ROOMS else ["atoll", *parts])


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement below a node, without the expressions between them, which are most of a tree."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        children = getattr(node, field, ())
        for child in children if isinstance(children, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def read(root: Path, folders: Iterable[str]) -> list[Module]:
    """Read all Python files below folders of the root, without links, hidden folders and protoc's files."""
    return read_files(root, (path for folder in folders for path in python_files(root / folder)))


def read_files(root: Path, paths: Iterable[Path]) -> list[Module]:
    """Read files of a root; each is parsed once, when its tree is first asked for."""
    return [Module(path.relative_to(root).as_posix(), path.read_text("utf-8")) for path in paths]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: all trees stay alive, and visiting them again and again takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def python_files(place: Path) -> Iterator[Path]:
    """Yield a Python file, or those below a folder in the order of their names."""
    if place.is_file():
        if place.suffix == ".py" and "_pb2" not in place.name:
            yield place
    elif place.is_dir():
        for child in sorted(place.iterdir()):
            if not child.is_symlink() and not child.name.startswith((".", "__pycache__")):
                yield from python_files(child)
