"""Whether there is a compiler for loops (numba, the extra `fast`), and whether it pays: numpy does the same."""

import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Generic, TypeVar

Loops = TypeVar("Loops")

COMPILED_FROM = 1 << 22
"""Elements from which on it pays to load the compiler, which takes a second and 60 MB."""


def has_compiler() -> bool:
    """Whether numba is installed (the extra `fast`)."""
    return find_spec("numba") is not None


class Meter(Generic[Loops]):
    """Loads loops when this process has had so much for them to do that it pays.

    Args:
        load: compiles them, or reads them from a file.
    """

    def __init__(self, load: Callable[[], Loops]) -> None:
        self._load, self._lock = load, threading.Lock()
        self._seen = 0
        self._loops: Loops | None = None
        self._is_missing = False

    def loops(self, num_elements: int) -> Loops | None:
        """For so many more elements; None: let numpy do it, as also while another thread compiles."""
        if self._loops is not None or self._is_missing:
            return self._loops
        self._seen += num_elements  # threads may lose a count: it only decides when
        if self._seen >= COMPILED_FROM and self._lock.acquire(blocking=False):
            try:
                self._is_missing = not has_compiler()
                self._loops = None if self._is_missing else self._load()
            finally:
                self._lock.release()
        return self._loops
