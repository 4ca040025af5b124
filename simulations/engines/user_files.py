"""The user's own files that a task needs, for processes on machines that do not have them.

A task's file imports its neighbours: modules that no other machine can find. Of these every one that is loaded here is
sent with its source, and nothing else of the folder: no data, no models, no other task. There they are imported under
their own names and with the paths that they have here, also by functions that import as late as they are called.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

TASK_FILE = "_atoll_user_"
"""What `parallel.reference` calls a task's file: no other process could import it by this name."""

OURS = "atoll"


@dataclass(frozen=True, slots=True)
class Source:
    """One file."""

    path: str
    """Where it lies on the machine that sends it."""
    code: bytes


def sources() -> dict[str, Source]:
    """By module: what is loaded from the folders of the tasks' files, or from below the current one."""
    modules = dict(sys.modules)
    folders = {Path(str(m.__file__)).parent for name, m in modules.items() if name.startswith(TASK_FILE)} | {Path.cwd()}
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    found = {}
    for name, module in modules.items():
        path = _file_of(module)
        if path is None or name.split(".")[0] in (OURS, "__main__") or name.startswith(TASK_FILE):
            continue
        is_theirs = not any(path.is_relative_to(prefix) for prefix in installed) and "site-packages" not in path.parts
        if is_theirs and any(path.is_relative_to(folder) for folder in folders):
            found[name] = Source(str(path), path.read_bytes())
    return found


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    path = Path(file).resolve() if isinstance(file, str) and file.endswith(".py") else None
    return path if path is not None and path.is_file() else None


def let_import(files: Mapping[str, Source]) -> None:
    """Let this process import these modules; those that it finds by itself come from where it finds them."""
    if files:
        sys.meta_path.append(_Finder(files))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, files: Mapping[str, Source]) -> None:
        self._files = files
        self._folders = {name.rpartition(".")[0] for name in files} - set(files) - {""}
        """Packages without a file of their own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._files:
            source = self._files[fullname]
            inside: list[str] | None = [] if source.path.endswith("__init__.py") else None
            loader = _Loader(source)
            return importlib.util.spec_from_file_location(
                fullname, source.path, loader=loader, submodule_search_locations=inside
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
            raise OSError(f"{path} was not sent")  # its compiled twin, which is asked for first
        return self._source.code
