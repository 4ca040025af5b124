"""The files of an exported app: its description, its two parts, and the code of the task."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from atoll.cli.flower import templates
from atoll.cli.flower.counterparts import A_NUMBER, Counterpart
from atoll.cli.flower.sources import Sources
from atoll.flower.exported.run_values import RunValues
from atoll.ground.version import __version__
from atoll.plugins.reference import is_file, split
from atoll.task.task import task_name


@dataclass(frozen=True, slots=True)
class Fitted:
    """A run as it fits a task."""

    found: Counterpart
    values: RunValues
    measures: bool
    """The server measures each version."""


@dataclass(frozen=True)
class AppFiles:
    """The files of an app.

    Args:
        task: the reference of the task.
        sites: the task's sites.
        fitted: the run.
        sources: the code of the task.
    """

    task: str
    sites: Sequence[str]
    fitted: Fitted
    sources: Sources

    @cached_property
    def package(self) -> str:
        """The name of the app's package, which none of the task's code has."""
        package = f"{re.sub(r'[^a-z0-9]', '_', self.fitted.values.run)}_app"
        package = package if package[0].isalpha() else f"run_{package}"
        while any(path.parts[0].removesuffix(".py") == package for path in self.sources.files):
            package += "_"
        return package

    @property
    def files(self) -> dict[str, bytes]:
        """The content of each file, by its place in the folder."""
        package, is_of_file = self.package, is_file(split(self.task)[0])
        texts = {
            "README.md": self._readme(is_of_file=is_of_file),
            "pyproject.toml": tomli_w.dumps(self._project),
            f"{package}/__init__.py": self._init(is_of_file=is_of_file),
            f"{package}/client_app.py": templates.CLIENT_APP.substitute(self._names),
            f"{package}/server_app.py": self._server_app(),
        }
        code = Path(package) / "task" if is_of_file else Path()
        copied = {str(code / file): (self.sources.folder / file).read_bytes() for file in self.sources.files}
        return {**copied, **{place: text.encode() for place, text in texts.items()}}

    @property
    def _names(self) -> Mapping[str, str]:
        return {"task": task_name(self.task), "package": self.package}

    def _init(self, *, is_of_file: bool) -> str:
        place, attribute = split(self.task)
        if is_of_file:
            return templates.INIT_OF_FILE.substitute(self._names, file=Path(place).name, attribute=attribute)
        return templates.INIT_OF_MODULE.substitute(self._names, reference=self.task)

    def _server_app(self) -> str:
        found = self.fitted.found
        return templates.SERVER_APP.substitute(
            self._names,
            strategy=found.strategy,
            arguments="\n".join(f"        {key}={value!r}," for key, value in found.arguments.items()),
            a_number=f"{A_NUMBER:g}",
            timeout=found.timeout,
            evaluate_fn=templates.EVALUATE_FN if self.fitted.measures else "",
        )

    def _readme(self, *, is_of_file: bool) -> str:
        left_out, data = ", ".join(self.fitted.found.left_out), ", ".join(self.sources.data)
        own = f"`{self.package}/task/`" if is_of_file else "its own package"
        return templates.README.substitute(
            self._names,
            code=own if self.sources.files else "an installed package",
            data=f" ({data})" if data else "",
            sites=f" ({', '.join(self.sites)})" if self.sites else "",
            left_out=f"\nLeft out, as Flower has no counterpart: {left_out}.\n" if left_out else "",
        )

    @property
    def _project(self) -> dict[str, Any]:
        name, package = self.fitted.values.run, self.package
        app = {
            "publisher": "atoll",
            "components": {"serverapp": f"{package}.server_app:app", "clientapp": f"{package}.client_app:app"},
            "config": self.fitted.values.config,
        }
        return {
            "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
            "project": {
                "name": re.sub(r"[_.]+", "-", name).strip("-") or "app",
                "version": "1.0.0",
                "description": f"{task_name(self.task)} of Atoll as a Flower app",
                "dependencies": [f"atoll[flower]>={__version__}", *self.sources.packages],
            },
            "tool": {"hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}}, "flwr": {"app": app}},
        }
