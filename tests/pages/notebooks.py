"""The notebooks of `docs/notebooks`: `python -m tests.pages.notebooks` executes them and stores their outputs.

What is stored holds neither times nor paths: a notebook prints none.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.waiting import BOUND_S

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))

KEPT = ("text/plain", "text/html", "image/png")
"""The forms of an output that are stored."""

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
TOLERANCE = 0.02
"""The largest relative difference of a number with a fraction: other processors round in other places."""

PLACE = re.compile(r"/(?:home|tmp|root|work|usr|var)/|\d\d:\d\d:\d\d|0x[0-9a-f]{6,}")
"""A path of a machine, a time, or an address in memory."""

Notebook = Any
"""A notebook of nbformat, which has no types."""


def read(path: Path) -> Notebook:
    """Read a notebook."""
    return nbformat.read(path, as_version=4)


def run(notebook: Notebook, folder: Path) -> Notebook:
    """Execute a copy of a notebook in a folder, and return it with all its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has failed.
    """
    fresh = nbformat.from_dict(notebook)
    place, commands = {"metadata": {"path": str(folder)}}, str(Path(sys.executable).parent)
    client = NotebookClient(fresh, timeout=BOUND_S, kernel_name="python3", resources=place)
    client.execute(env={**os.environ, "PATH": os.pathsep.join([commands, os.environ.get("PATH", "")])})
    return fresh


def executed(notebook: Notebook, folder: Path) -> Notebook:
    """Execute a copy of a notebook, and return it with its outputs as they are stored; errors as `run`."""
    fresh = run(notebook, folder)
    fresh.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in fresh.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _joined(output for output in map(_stored, cell.outputs) if output is not None)
    return fresh


def _joined(outputs: Iterable[Notebook]) -> list[Notebook]:
    """Join the parts of a stream, which come as the kernel flushes them."""
    found: list[Notebook] = []
    for output in outputs:
        if found and output.output_type == "stream" and found[-1].get("name") == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def _stored(output: Notebook) -> Notebook | None:
    """Return an output as it is stored; None: it is empty, as a progress bar that has disappeared."""
    if "data" not in output:
        return output
    output.metadata = {}
    output.data = {form: text for form, text in output.data.items() if form in KEPT}
    return output if any(output.data.values()) else None


def differences(stored: Notebook, fresh: Notebook) -> list[str]:
    """Return what differs between a stored and a freshly executed notebook: images are there or not, numbers with a
    fraction are about equal, all else is equal.
    """
    if len(stored.cells) != len(fresh.cells):
        return [f"{len(stored.cells)} cells, and now {len(fresh.cells)}"]
    found = []
    for number, (before, now) in enumerate(zip(stored.cells, fresh.cells, strict=True)):
        if before.source != now.source:
            found.append(f"cell {number}: another source")
        there, here = _forms(before), _forms(now)
        if [kind for kind, _ in there] != [kind for kind, _ in here]:
            found.append(f"cell {number}: {[kind for kind, _ in there]}, and now {[kind for kind, _ in here]}")
        elif different := [(a, b) for (_, a), (_, b) in zip(there, here, strict=True) if not is_alike(a, b)]:
            found.append(f"cell {number}: {different[0][0]!r}, and now {different[0][1]!r}")
    return found


def _forms(cell: Notebook) -> list[tuple[str, str]]:
    """Return the outputs of a cell: (form, text), with an empty text for an image."""
    found = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            found.append((output.name, output.text))
        for form, text in sorted(output.get("data", {}).items()):
            found.append((form, "" if form.startswith("image/") or _is_of_an_image(output) else text))
    return found


def _is_of_an_image(output: Notebook) -> bool:
    return "image/png" in output.get("data", {})


def is_alike(one: str, other: str) -> bool:
    """Return whether two texts are equal but for small differences of numbers with a fraction."""
    if NUMBER.sub("#", one).split() != NUMBER.sub("#", other).split():
        return False
    return all(
        a == b or ("." in a + b and abs(float(a) - float(b)) <= TOLERANCE * max(abs(float(a)), abs(float(b))))
        for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    )


def main() -> None:
    """Execute all notebooks, or those whose names are given, and store their outputs."""
    for path in NOTEBOOKS:
        if not sys.argv[1:] or path.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                nbformat.write(executed(read(path), Path(folder)), path)
            sys.stdout.write(f"{path.name}: written\n")


if __name__ == "__main__":
    main()
