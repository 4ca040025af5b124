"""The description of a Flower app: the `[tool.flwr.app]` table of its `pyproject.toml`. Importing this imports no flwr.

[tool.flwr.app]                publisher = "bench"
[tool.flwr.app.components]     serverapp = "quick.server_app:app", clientapp = "quick.client_app:app"
[tool.flwr.app.config]         num-server-rounds = 3, optimizer.lr = 0.1        flattened: "optimizer.lr"
"""

import hashlib
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.ground.faults import Refused
from atoll.ground.folders import in_words
from atoll.task.apps import PROJECT
from atoll.task.errors import TaskNotFound

PREFIX = "flower:"
"""The prefix of the name of a task that is a Flower app."""

TABLES = ("project", "tool", "tool.flwr", "tool.flwr.app", "tool.flwr.app.components", "tool.flwr.app.config",
          "tool.flwr.federations")  # fmt: skip
"""The keys whose values must be tables."""

REFERENCE = re.compile(r"[^.:][^:]*:[^.:][^:]*")
"""The form of a reference to an object of an app: a module from the app's folder, and an attribute."""

SERVER = 1
"""The id of the server in Flower."""

UNNUMBERED = 1
"""The run id where no coordinator has given the run a number: before a run, or by an older coordinator."""

Config = dict[str, Any]


def node_id(site: str) -> int:
    """Return the node id of a site: the first 63 bits of the SHA-256 of its name, the same after each restart."""
    return int.from_bytes(hashlib.sha256(site.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class FlowerApp:
    """A Flower app in its folder."""

    folder: Path
    publisher: str
    name: str
    version: str
    serverapp: str
    """Reference of the ServerApp, `module:attribute`."""
    clientapp: str
    """Reference of the ClientApp."""
    config: Config
    """The run config: its defaults, flattened with dots."""
    num_supernodes: int = 0
    """The number of clients of a simulation, as stated by the project's federations; 0: not stated."""

    @property
    def task(self) -> str:
        """The name on which a coordinator and its agents agree."""
        return f"{PREFIX}{self.publisher}/{self.name}"

    def run_config(self, given: Mapping[str, Any]) -> Config:
        """Return the run config: the defaults, overridden by a run's values.

        Raises:
            ValueError: values without a default, or of another type; the message lists all faults.
        """
        faults, changed = [], dict(self.config)
        for key, value in given.items():
            if key not in self.config:
                known = ", ".join(self.config) or "none"
                faults.append(f"task.{key}: unknown key, got {value!r} (known, from [tool.flwr.app.config]: {known})")
            elif (fitting := _fitted(value, self.config[key])) is None:
                kind = type(self.config[key]).__name__
                faults.append(f"task.{key}: expected {kind}, got {value!r}")
            else:
                changed[key] = fitting
        if faults:
            raise Refused(*faults)
        return changed

    def load(self, reference: str) -> Any:
        """Return the object that `module:attribute` names, with the app's folder first on `sys.path`.

        The modules of another app that this process has loaded are unloaded: two apps may have modules of the same
        names.

        Raises:
            TaskNotFound: there is no such module or attribute, or a module from elsewhere has its name.
            Exception: any error that the app's module raises.
        """
        module, _, attribute = reference.partition(":")
        _import_from(self.folder)
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise TaskNotFound(f"{self.folder}: there is no module {error.name} for {reference}") from error
        first = module.partition(".")[0]
        is_here = (self.folder / first).exists() or (self.folder / f"{first}.py").exists()
        if is_here and not _is_in(self.folder, sys.modules[first]):
            raise TaskNotFound(f"{self.folder}: this process has another module {first}: {sys.modules[first]!r}")
        for part in attribute.split("."):
            if not hasattr(found, part):
                raise TaskNotFound(f"{self.folder}: {reference} names no attribute of {module}")
            found = getattr(found, part)
        return found


def _import_from(folder: Path) -> None:
    """Put the folder of an app first on `sys.path`, and unload the modules of earlier apps."""
    for other in [each for each in _folders if each != folder]:
        _folders.remove(other)
        sys.path[:] = [path for path in sys.path if path != str(other)]
        gone = {name for name, module in [*sys.modules.items()] if "." not in name and _is_in(other, module)} - {
            "__main__"
        }
        for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
            del sys.modules[name]
    _folders.add(folder)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


_folders: set[Path] = set()
"""The folder of the app whose modules this process has loaded."""


def _is_in(folder: Path, module: Any) -> bool:
    """Return whether a folder, and not a subfolder, has the file of a module or the package."""
    file = getattr(module, "__file__", None)
    places = [Path(file).parent if Path(file).stem == "__init__" else Path(file)] if file else []
    places += [] if file else map(Path, getattr(module, "__path__", ()))
    return any(place.parent.resolve() == folder for place in places)


def read_app(reference: str) -> FlowerApp:
    """Read the description of an app.

    Raises:
        TaskNotFound: there is no such file, or required keys are missing; the message lists all faults.
    """
    folder = Path(reference).resolve().parent
    try:
        document = tomllib.loads((folder / PROJECT).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        others = "any other TASK is module:attribute or path/to/file.py:attribute"
        raise TaskNotFound(f"{folder} is not a task: the folder of a Flower app has a {PROJECT}, {others}") from error
    except OSError as error:
        raise TaskNotFound(in_words(error)) from error
    except ValueError as error:
        raise TaskNotFound(f"{folder / PROJECT}: not TOML: {error}") from error
    table, components = _at(document, "tool.flwr.app") or {}, "tool.flwr.app.components"
    texts = ("project.name", "project.version", "tool.flwr.app.publisher")
    references = (f"{components}.serverapp", f"{components}.clientapp")
    given = {key: _at(document, key) for key in (*texts, *references)}
    faults = [
        f"{key} must be a table, got {value!r}"
        for key in TABLES
        if (value := _at(document, key)) is not None and not isinstance(value, Mapping)
    ]
    faults = faults or [f"{key} must be a string, got {value!r}" for key, value in given.items() if not _is_text(value)]
    faults += [
        f"{key} must be module:attribute, got {given[key]!r}"
        for key in references
        if _is_text(given[key]) and not REFERENCE.fullmatch(given[key])
    ]
    if faults:
        raise TaskNotFound(*(f"{folder / PROJECT}: {fault}" for fault in faults))
    return FlowerApp(
        folder=folder,
        publisher=given["tool.flwr.app.publisher"],
        name=given["project.name"],
        version=given["project.version"],
        serverapp=given[references[0]],
        clientapp=given[references[1]],
        config=dict(flattened(table.get("config", {}))),
        num_supernodes=_num_supernodes(_at(document, "tool.flwr.federations") or {}),
    )


def _at(table: Any, path: str) -> Any:
    """Return the value of nested tables at keys joined by dots, or None."""
    for key in path.split("."):
        table = table.get(key) if isinstance(table, Mapping) else None
    return table


def flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables, their keys joined by dots."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _num_supernodes(federations: Mapping[str, Any]) -> int:
    """Return the number of clients of the default federation, or of the first one that states it."""
    tables = [value for value in federations.values() if isinstance(value, Mapping)]
    if isinstance(default := federations.get(str(federations.get("default"))), Mapping):
        tables.insert(0, default)
    for table in tables:
        number = _at(table, "options.num-supernodes")
        if type(number) is int and number > 0:
            return number
    return 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _fitted(value: Any, default: Any) -> Any:
    """Return a value as the type of its default, or None if it is of another type."""
    if isinstance(default, bool) or isinstance(value, bool):
        return value if type(value) is type(default) else None
    if isinstance(default, float) and isinstance(value, int):
        return float(value)
    return value if type(value) is type(default) else None
