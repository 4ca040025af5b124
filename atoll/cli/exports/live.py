"""The option `--export` of `atoll simulate` and `atoll train`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.printing import note

if TYPE_CHECKING:
    from atoll.exports.exporter import LiveExport, LiveSource

Exports = Annotated[
    list[str],
    typer.Option(
        "--export",
        metavar="TOOL[:PLACE]",
        help="Also export the run as it goes on: tensorboard, mlflow, wandb or jsonl, and its folder or address; by "
        "default a folder of the tool's name in the run's. Repeatable. `atoll export` does the same later.",
    ),
]


def live_export(texts: Sequence[str], source: "LiveSource", folder: Path) -> "LiveExport":
    """Return the export to the places of --export, which have been checked.

    Args:
        texts: the values of the option.
        source: the run.
        folder: its folder, for places that are not given.

    Raises:
        ConfigError: no such tool, or its package is not installed.
        OSError: a place cannot be used.
    """
    from atoll.exports.exporter import LiveExport
    from atoll.exports.tools import parsed

    found = LiveExport([target.at(folder).open() for target in parsed(texts)], source, note)
    found.check()
    return found
