"""The export of a run in progress: `--export` of `atoll simulate` and `atoll train`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.operations.reporter import note

if TYPE_CHECKING:
    from atoll.exports.exporter import LiveExport, LiveSource


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
