"""The code of a task: its file or package, and the files beside it that this code imports. Nothing is run."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

from atoll.plugins.reference import is_file, split


@dataclass(frozen=True, slots=True)
class Sources:
    """The files of a task's code."""

    folder: Path
    """The folder in which imports find them."""
    files: tuple[Path, ...]
    """Relative to the folder; none: the task is in an installed package."""
    packages: tuple[str, ...]
    """The installed distributions that they import."""
    data: tuple[str, ...] = ()
    """The data files beside them whose names are in their strings."""


def sources_of(reference: str) -> Sources:
    """Return the code of a task; a module of an installed package is one of its `packages`.

    An import by a computed name is not seen, nor a file that the code opens.
    """
    place, _ = split(reference)
    if is_file(place):
        file = Path(place).resolve()
        files = _reached(file.parent, [file])
        return _sources(file.parent, files)
    folder, top = Path.cwd(), place.partition(".")[0]
    if files := _reached(folder, _at(folder, top)):
        return _sources(folder, files)
    return Sources(folder, (), tuple(packages_distributions().get(top, (top,))))


def _reached(folder: Path, first: list[Path]) -> list[Path]:
    """Return the files in a folder that these import, and those that they import, with these."""
    found: dict[Path, None] = {}
    waiting = list(first)
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = None
        for name in _imported(file):
            waiting += _at(folder, name)
    return sorted(found)


def _at(folder: Path, name: str) -> list[Path]:
    """Return the files of a top-level module in a folder: its file, or all of its package; empty: it is not there."""
    if (file := folder / f"{name}.py").is_file():
        return [file]
    return sorted((folder / name).rglob("*.py"))


def _imported(file: Path) -> Iterator[str]:
    """Yield the top-level names that a file imports anywhere, but for those relative to its package."""
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _sources(folder: Path, files: list[Path]) -> Sources:
    relative = tuple(file.relative_to(folder) for file in files)
    return Sources(folder, relative, _distributions(folder, files), _named(files))


def _named(files: list[Path]) -> tuple[str, ...]:
    """Return the strings in source files that name a file beside one of them."""
    found = set()
    for file in files:
        texts = {node.value for node in ast.walk(_parsed(file)) if isinstance(node, ast.Constant)}
        found |= {text for text in texts if isinstance(text, str) and _is_data(file.parent, text)}
    return tuple(sorted(found))


def _is_data(folder: Path, text: str) -> bool:
    is_name = 0 < len(text) < 200 and text.isprintable() and not text.endswith(".py")
    return is_name and (folder / text).is_file()


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes(), str(file))


def _distributions(folder: Path, files: list[Path]) -> tuple[str, ...]:
    """Return the distributions of the installed modules that files import, but for Atoll itself."""
    names = {name for file in files for name in _imported(file)} - set(sys.stdlib_module_names)
    installed = packages_distributions()
    found = {package for name in names if not _at(folder, name) for package in installed.get(name, ())}
    return tuple(sorted(found - {"atoll"}))
