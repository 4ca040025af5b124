"""The contracts of imports in `pyproject.toml`, held by import-linter over a copy of the package.

import-linter follows no links, and the rooms are links under `atoll/`: the copy has them as folders.
"""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.house.tree import ROOMS, ROOT

CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
    "contracts"
]


def floors(folder: str) -> list[list[str]]:
    """Return the places in a folder by floor, the lowest first; names on one floor do not import each other."""
    package = folder if folder.startswith("atoll") else f"atoll/{folder}"
    (found,) = (each["layers"] for each in CONTRACTS if each.get("containers") == [package.replace("/", ".")])
    return [floor.split(" | ") for floor in reversed(found)]


def may_import(room: str) -> set[str]:
    """Return the rooms that a room may import: those below it, without what a contract forbids it."""
    rooms = floors("atoll")
    height = max(at for at, floor in enumerate(rooms) if room in floor or room == "atoll")
    below = {name for floor in rooms[:height] for name in floor}.intersection(ROOMS)
    for contract in CONTRACTS:
        if contract["type"] == "forbidden" and f"atoll.{room}" in contract["source_modules"]:
            below -= {name.removeprefix("atoll.") for name in contract["forbidden_modules"]}
    return below


def broken(root: Path = ROOT) -> str:
    """Return what import-linter says of broken contracts; "" if all are kept."""
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "atoll"
        shutil.copytree(root / "atoll", copy, ignore=lambda _, names: [n for n in names if n == "__pycache__"])
        command = [Path(sys.executable).with_name("lint-imports"), root / "pyproject.toml", "--no-cache"]
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return "" if found.returncode == 0 else found.stdout + found.stderr
