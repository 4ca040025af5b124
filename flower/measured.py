"""The metrics of an app's `evaluate_fn` by version, with integers, which a run's journal lacks.

In a file beside the folder of `main()`, a line for each: {"version": 2, "metrics": {"loss": "0.25", "seen": 100}}. A
float is a string, as JSON has no NaN.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import MetricRecord


class Measured:
    """The records of one call of `main()`, and of earlier calls in the same folder.

    Args:
        folder: the folder of the `main()`; None: the records are in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder.with_name(f"{folder.name}.measured.jsonl")
        self._found: dict[int, dict[str, Any]] = {}
        if self._file is not None and self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):  # otherwise it was cut off
                    row = json.loads(line)
                    self._found[row["version"]] = row["metrics"]

    def __contains__(self, version: int) -> bool:
        return version in self._found

    def add(self, version: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a version, in place of older ones of this version."""
        encoded = self._found[version] = {name: _of_each(_text, value) for name, value in metrics.items()}
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"version": version, "metrics": encoded}) + "\n")

    def records(self, last: int) -> dict[int, MetricRecord]:
        """Return the metrics of the versions from 0 to the last one."""
        return {
            version: MetricRecord({name: _of_each(_number, value) for name, value in encoded.items()})
            for version, encoded in sorted(self._found.items())
            if version <= last
        }


def _of_each(convert: Any, value: Any) -> Any:
    return [convert(item) for item in value] if isinstance(value, list) else convert(value)


def _text(number: Any) -> int | str:
    return int(number) if isinstance(number, int | np.integer) else repr(float(number))


def _number(text: int | str) -> int | float:
    return text if isinstance(text, int) else float(text)
