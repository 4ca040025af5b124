"""The peak memory of processes and their descendants, by kind of process."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_S = 0.1


class Peaks:
    """The peak memory of processes during a `with` block: `greatest` has the largest VmHWM of each kind [bytes].

    Args:
        roots: name -> process id of the processes to watch, with their descendants.
    """

    def __init__(self, roots: Mapping[str, int]) -> None:
        self._roots = roots
        self.greatest: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self._look()
            if self._over.wait(POLL_S):
                return

    def _look(self) -> None:
        children: dict[int, list[int]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parts[2]))
            except (FileNotFoundError, ProcessLookupError):
                continue
        for pid in {found for root in self._roots.values() for found in _descendants(root, children)}:
            if (known := _kind_and_peak(pid)) is not None:
                self.greatest[known[0]] = max(known[1], self.greatest.get(known[0], 0))


def _descendants(root: int, children: Mapping[int, list[int]]) -> Iterator[int]:
    yield root
    for child in children.get(root, ()):
        yield from _descendants(child, children)


def _kind_and_peak(pid: int) -> tuple[str, int] | None:
    """Return the kind of a process, the program or module of its command line, and its VmHWM; None: it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    peak = next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0) * 1024
    return (_kind(words), peak) if words and peak else None


def _kind(words: list[str]) -> str:
    names = [Path(word).name for word in words if not word.startswith("-")]
    if names[0].startswith("python") and "-m" in words:
        return words[words.index("-m") + 1]
    if names[0].startswith("python") and len(names) > 1:
        names = names[1:]
    return " ".join(names[:2]) if names[0] == "atoll" else names[0]
