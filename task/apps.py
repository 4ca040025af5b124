"""Apps of other frameworks as tasks: the form of a reference to an app, and the interface of its framework.

An app is a folder whose `pyproject.toml` describes it. A reference to it is `path/to/pyproject.toml:app`; on a command
line its folder is short for it. Every room knows apps only by these classes: the package registers one framework.
"""

import hashlib
import importlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

if TYPE_CHECKING:
    from atoll.task.arrays import Arrays

PROJECT, ATTRIBUTE = "pyproject.toml", "app"

Json = dict[str, Any]


class AppTask(ABC):
    """Task of another framework's app, such as Flower's, with all its clients in one process, for the simulator."""

    sites: tuple[str, ...]

    @abstractmethod
    def with_options(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with a run's values; errors as in `given.with_values`."""

    @abstractmethod
    def with_site_settings(self, tables: Mapping[str, Mapping[str, Any]]) -> Self:
        """Return a copy with settings of some sites; errors as in `given.with_tables`."""

    @abstractmethod
    def in_folder(self, folder: Path) -> Self:
        """Return a copy whose `main()` has this current folder, which is made."""

    @abstractmethod
    def bench(self, request: Json) -> Any:
        """Make the `worker.bench.Bench` of a request's site; without a site return the one that runs `main()`."""

    @abstractmethod
    def initial(self, seed: int) -> "Arrays":
        """Return the arrays of version 0."""

    @abstractmethod
    def conclude(self, arrays: "Arrays", history: Json) -> None:
        """Run `main()` to its end, with the last version and the metrics by kind, round and name."""


class Framework(Protocol):
    """A framework whose apps are tasks: the module that `atoll.APPS` names."""

    def name_of(self, reference: str) -> str:
        """Return the name on which a coordinator and its agents agree.

        Raises:
            TaskNotFound: the description of the app is missing or wrong; the message lists all faults.
        """
        ...

    def bench(self, reference: str, request: Json) -> Any:
        """Make the `worker.bench.Bench` of a request's site in a worker process, or of the coordinator."""
        ...

    def program(self, reference: str, options: Mapping[str, Any]) -> Callable[[Any], Any]:
        """Return an app's server program, a function of a `Grid`.

        Raises:
            ValueError: it has no such options; the message lists all faults.
        """
        ...

    def program_of(self, found: object, options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        """Return an object of the framework as a server program, or None if it is not one."""
        ...


def framework() -> Framework:
    """Return the framework that the package registers: the module that `atoll.APPS` names."""
    root = sys.modules[__name__.partition(".")[0]]
    return cast(Framework, importlib.import_module(root.APPS))


def is_app(reference: object) -> bool:
    """Return whether a reference has the form of a reference to an app."""
    return isinstance(reference, str) and Path(reference).name == f"{PROJECT}:{ATTRIBUTE}"


def with_app(what: str) -> str:
    """Return the reference to the app in a folder; any other string is returned unchanged."""
    return str(Path(what) / f"{PROJECT}:{ATTRIBUTE}") if what and Path(what).is_dir() else what


def simulated_number(task: str, given: Mapping[str, Any], seed: int) -> int:
    """Return the number of a simulated run, from 1 to 2^63 - 1: the same whenever the same run is simulated.

    Args:
        task: the name of the task.
        given: the run's values for the task.
        seed: the seed of the run.
    """
    text = json.dumps([task, given, seed], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1 or 1
