"""The tools that an export can go to, by their names; each is imported when it is used.

A package that is missing is reported in one sentence before anything runs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from atoll.exports.destination import Destination
from atoll.ground.printable import instead_of
from atoll.protocol.settings import ConfigError

PACKAGES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "alembic"), "wandb": ("wandb",), "jsonl": ()}
"""The tools, each with the packages that it needs; the extra of Atoll has the name of the tool."""


@dataclass(frozen=True, slots=True)
class Target:
    """A tool, and the place of the export there; an empty place is the default one."""

    tool: str
    to: str = ""

    def at(self, default: Path) -> "Target":
        """Return the target with a default folder in the place of an empty one."""
        return self if self.to else Target(self.tool, str(default / self.tool))

    def open(self) -> Destination:
        """Open the tool's destination (TensorBoard, MLflow, ...)."""
        match self.tool:
            case "tensorboard":
                from atoll.exports.tensorboard import TensorBoard

                return TensorBoard(Path(self.to))
            case "mlflow":
                from atoll.exports.mlflow import Mlflow

                return Mlflow(self.to)
            case "wandb":
                from atoll.exports.wandb import WeightsAndBiases

                return WeightsAndBiases(Path(self.to))
        from atoll.exports.jsonl import JsonLines

        return JsonLines(Path(self.to))


def checked(targets: Sequence[Target], source: str, *, of_place: str = "", others: Sequence[str] = ()) -> list[Target]:
    """Check that an export to each target can begin, and return the targets.

    Args:
        targets: the targets.
        source: the option or argument that names them, for messages.
        of_place: the option that names the place; empty: `source`.
        others: further tools that are allowed there and are no targets, for messages.

    Raises:
        ConfigError: an unknown tool, a package that is not installed, a place that the tool does not take, or one
            named twice; the message lists all faults.
    """
    faults = [f"{source}: {fault}" for target in targets if (fault := _fault_of_tool(target.tool, others))]
    faults += [f"{of_place or source}: {fault}" for target in targets if (fault := _fault_of_place(target))]
    tools = [target.tool for target in targets]
    faults += [
        f"{source}: {tool} is named twice: leave one of them out"
        for tool in dict.fromkeys(tools)
        if tools.count(tool) > 1
    ]
    if faults:
        raise ConfigError(faults)
    return list(targets)


def parsed(texts: Sequence[str]) -> list[Target]:
    """Parse the values of --export, TOOL or TOOL:PLACE, and check the targets.

    Raises:
        ConfigError: as `checked` raises it.
    """
    return checked([Target(*map(str.strip, text.partition(":")[::2])) for text in texts], "--export")


def _fault_of_tool(tool: str, others: Sequence[str]) -> str:
    """Return why no export to a tool can begin; empty: it can."""
    if tool not in PACKAGES:
        return f"got {tool!r}{instead_of(tool, (*PACKAGES, *others))}"
    if missing := [name for name in PACKAGES[tool] if find_spec(name) is None]:
        return (
            f"{tool} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install 'atoll[{tool}]'"
        )
    return ""


def _fault_of_place(target: Target) -> str:
    """Return why an export cannot write to the place of a target; empty: it can."""
    if target.tool != "mlflow" and re.match(r"[a-z][a-z0-9+.-]+:/", target.to):
        return f"got {target.to!r}; allowed for {target.tool}: a folder"
    place = Path(target.to)
    if target.to and not re.match(r"[a-z][a-z0-9+.-]+:", target.to) and place.exists() and not place.is_dir():
        return f"got {target.to!r}, which is a file; allowed: a folder"
    return ""
