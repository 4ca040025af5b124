"""The user's files that a task needs, for processes that cannot find them: on other machines, or from a fork server.

A task's file imports modules of its folder, which other machines do not have. The source of every such module that is
loaded here is sent, and nothing else of the folder: no data, no models, no other task. The receiver imports them under
the same names and paths, even in functions that import only when they are called.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

TASK_FILE = "_atoll_user_"
"""Prefix of the module names that `plugins.reference` gives to tasks' files; no process can import them."""

OURS = "atoll"


@dataclass(frozen=True, slots=True)
class Source:
    """Source of one module."""

    path: str
    """Path on the machine that sends it."""
    code: bytes


def sources() -> dict[str, Source]:
    """Return the sources of all modules loaded from the folders of tasks' files or from below the current folder."""
    modules = dict(sys.modules)
    folders = {Path(str(m.__file__)).parent for name, m in modules.items() if name.startswith(TASK_FILE)} | {Path.cwd()}
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    found = {}
    for name, module in modules.items():
        path = _file_of(module)
        if path is None or name.split(".")[0] in (OURS, "__main__"):
            continue
        is_users = not any(path.is_relative_to(prefix) for prefix in installed) and "site-packages" not in path.parts
        if is_users and any(path.is_relative_to(folder) for folder in folders):
            found[name] = Source(str(path), path.read_bytes())
    return found


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    path = _resolved(file) if isinstance(file, str) and file.endswith(".py") else None
    return path if path is not None and path.is_file() else None


@cache
def _resolved(file: str) -> Path:
    return Path(file).resolve()


def let_import(files: Mapping[str, Source], *, first: bool = False) -> None:
    """Make modules importable in this process.

    Args:
        files: the sources by module.
        first: True if they take precedence over modules that this process finds by itself; on the sending machine it
            finds the modules that were not sent.
    """
    if files:
        sys.meta_path.insert(0 if first else len(sys.meta_path), _Finder(files, has_folders=first))


class Parcel:
    """Wrapper that is unpickled in another process of this machine as its content, after importing the user's files.

    Args:
        content: any object that multiprocessing can pickle.
        environment: variables of the other process, which are set before any of the user's files is imported.
    """

    def __init__(self, content: Any, environment: Mapping[str, str] | None = None) -> None:
        self._content, self._environment = content, dict(environment or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (sources(), bytes(ForkingPickler.dumps(self._content)), self._environment)


def _opened(files: Mapping[str, Source], content: bytes, environment: Mapping[str, str]) -> Any:
    os.environ.update(environment)
    let_import(files, first=True)
    return pickle.loads(content)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, files: Mapping[str, Source], *, has_folders: bool) -> None:
        self._files, self._has_folders = files, has_folders
        folders = {name.rpartition(".")[0] for name in files} - set(files) - {""}
        self._folders = set[str]() if has_folders else folders
        """Namespace packages, which have no file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._files:
            source = self._files[fullname]
            search: list[str] | None = None
            if source.path.endswith("__init__.py"):
                search = [str(Path(source.path).parent)] if self._has_folders else []
            loader = _Loader(source)
            return importlib.util.spec_from_file_location(
                fullname, source.path, loader=loader, submodule_search_locations=search
            )
        if any(each == fullname or each.startswith(f"{fullname}.") for each in self._folders):
            return importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        return None


class _Loader(importlib.abc.SourceLoader):
    def __init__(self, source: Source) -> None:
        self._source = source

    def get_filename(self, fullname: str) -> str:
        return self._source.path

    def get_data(self, path: str) -> bytes:
        if path != self._source.path:
            raise OSError(f"{path} was not sent")  # the compiled file, which is requested first
        return self._source.code
