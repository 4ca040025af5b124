"""A small text that every Python brings along: the sources of its own standard library, byte by byte.

The files of `sysconfig.get_paths()["stdlib"]` come in the order of their names, as far as a limit allows, without tests
and without what was installed later. Every tenth belongs to the server's test set; the others are dealt to two owners,
and each holds back a tenth of its own as a test split. The same Python gives the same text.
"""

import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from atoll.parallel.data.streaming import ByteTokens
from atoll.parallel.data.text import BYTES, TokenWindows

SITES = ["north", "south"]
VOCAB_SIZE = BYTES.vocab_size
SEQUENCE = 128
BYTES_MAX = 2_000_000

LEFT_OUT = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}


@cache
def files(bytes_max: int = BYTES_MAX) -> tuple[Path, ...]:
    """The sources, in the order of their names, until one would exceed the limit [bytes].

    Raises:
        FileNotFoundError: this Python has come without them, or the limit is below the first.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen = []
    for path in sorted(_sources(root), key=Path.as_posix):
        bytes_max -= path.stat().st_size
        if bytes_max < 0:
            break
        chosen.append(path)
    if not chosen:
        raise FileNotFoundError(f"{root}: none of the standard library's sources within the limit")
    return tuple(chosen)


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - LEFT_OUT)  # what is not among them is not walked
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def load_site(site: str, split: str) -> TokenWindows:
    """The windows of one owner's sources."""
    others = [path for place, path in enumerate(files()) if place % 10]
    own = others[SITES.index(site) :: len(SITES)]
    return _windows([path for place, path in enumerate(own) if (place % 10 == 0) == (split == "test")])


def load_test() -> TokenWindows:
    """The windows of the sources that the server holds."""
    return _windows(list(files()[::10]))


def _windows(paths: list[Path]) -> TokenWindows:
    tokens = ByteTokens(paths)
    return TokenWindows(tokens[0 : len(tokens)], SEQUENCE, eos=BYTES.eos)
