"""The build of this program: a digest of the running sources, which distinguishes an upgraded site from others."""

import hashlib
import os
from functools import cache
from pathlib import Path

from atoll.ground.version import __version__

LETTERS = 10
"""Hexadecimal digits of a build's digest."""


@cache
def software() -> str:
    """Return name, version and build of this program, such as `atoll 0.1.0 build 3f2a9c1d07`."""
    return f"atoll {__version__} build {build_of(Path(__file__).absolute().parents[1])}"


def build_of(package: Path) -> str:
    """Return the digest of a package's sources, equal for a wheel, an installation and a checkout with equal content.

    Args:
        package: the folder of the package; its rooms may be links.

    Returns:
        The SHA-256 over path and SHA-256 of each Python file in the order of their paths, cut to `LETTERS` digits.
    """
    digest = hashlib.sha256()
    for path in sorted(_sources(package)):
        digest.update(f"{path}\n".encode() + hashlib.sha256((package / path).read_bytes()).digest())
    return digest.hexdigest()[:LETTERS]


def _sources(package: Path) -> list[str]:
    found = []
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [os.path.relpath(os.path.join(folder, name), package) for name in names if name.endswith(".py")]
    return found
