"""A small text that every Python includes: the sources of its standard library, byte by byte.

The files of `sysconfig.get_paths()["stdlib"]` are read in the order of their names up to a limit, without tests and
installed packages. Every tenth file belongs to the server's test set; the others are split between two sites, and each
site holds back a tenth of its files as a test split. The same Python gives the same text.
"""

import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from examples.datasets.streaming import ByteTokens
from examples.datasets.text import BYTES, TokenWindows

SITES = ["north", "south"]
VOCAB_SIZE = BYTES.vocab_size
SEQUENCE = 128
BYTES_MAX = 2_000_000

LEFT_OUT = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


@cache
def files(bytes_max: int = BYTES_MAX) -> tuple[Path, ...]:
    """Return the sources in the order of their names, up to `bytes_max` bytes in all.

    Raises:
        FileNotFoundError: this Python has no sources, or the first one exceeds the limit.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen = []
    for path in sorted(_sources(root), key=Path.as_posix):
        bytes_max -= path.stat().st_size
        if bytes_max < 0:
            break
        chosen.append(path)
    if not chosen:
        raise FileNotFoundError(f"{root}: no source of the standard library within the limit: raise bytes_max")
    return tuple(chosen)


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)  # os.walk skips the others
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def load_site(site: str, split: str) -> TokenWindows:
    """Return the windows of one split of a site's files."""
    of_sites = [path for place, path in enumerate(files()) if place % 10]
    of_site = of_sites[SITES.index(site) :: len(SITES)]
    return windows([path for place, path in enumerate(of_site) if (place % 10 == 0) == (split == "test")])


def load_test() -> TokenWindows:
    """Return the windows of the server's files."""
    return windows([*files()[::10]])


def windows(paths: list[Path]) -> TokenWindows:
    """Return the windows of some files' text, one file after the other."""
    tokens = ByteTokens(paths)
    return TokenWindows(tokens[0 : len(tokens)], SEQUENCE, eos=BYTES.eos)
