"""The reading of audit logs: a log that is being written, a copy, or only some files of a log."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from atoll.protocol.audit.chain import Checkpoint, Line, LineFault, Verifier, read_line
from atoll.protocol.audit.files import (
    PUBLIC_KEY,
    AuditUnusable,
    audit_folder,
    cut_files,
    first_number,
    is_log_file,
    log_files,
    public_key,
    read_lines,
    sizes,
)


@dataclass(frozen=True, slots=True)
class Source:
    """Files of a log in their order, each with the number of bytes to read."""

    files: tuple[tuple[Path, int], ...]
    key: str | None
    """Public key [hex] that must have signed its checkpoints; None: any key."""
    is_whole: bool
    """Whether the files are claimed to be the complete log."""
    cut: tuple[Path, ...] = ()
    """Files of torn ends, the incomplete last lines that a crash left; they were moved out of the log."""
    on_bytes: Callable[[int], None] = lambda more: None
    """Called with the number of bytes of each line."""

    @classmethod
    def of_state(cls, state: Path) -> "Source":
        """Find the log of a coordinator's state directory.

        Raises:
            AuditUnusable: the directory has no audit log.
        """
        return cls.of_folder(audit_folder(state))

    @classmethod
    def of_folder(cls, folder: Path) -> "Source":
        """Find the log in a folder, of a coordinator or of an agent's decisions; raises AuditUnusable."""
        if not log_files(folder):
            what = f"{folder.parent} holds no audit log: there is no {folder.name}/audit-*.jsonl in it"
            raise AuditUnusable(what)
        return cls(tuple(sizes(folder)), public_key(folder / PUBLIC_KEY), is_whole=True, cut=tuple(cut_files(folder)))

    def behind(self, archives: Iterable[Path]) -> "Source":
        """Return this source preceded by the files of archives, in the order of their lines.

        Raises:
            AuditUnusable: a folder has no file of a log.
        """
        found: dict[str, tuple[Path, int]] = {}
        for folder in archives:
            if not (files := log_files(folder)):
                raise AuditUnusable(f"{folder} is not an archive: there is no audit-*.jsonl in it")
            found |= {path.name: (path, path.stat().st_size) for path in files}
        found |= {path.name: (path, size) for path, size in self.files}
        return replace(self, files=tuple(found[name] for name in sorted(found)))

    @classmethod
    def of_files(cls, files: Iterable[Path]) -> "Source":
        """Return a source of some files of a log, or an export of `atoll audit export`, in the given order."""
        return cls(tuple((path, path.stat().st_size) for path in files), None, is_whole=False)

    def with_key(self, path: Path) -> "Source":
        """Return this source with the public key of a file, which its checkpoints must match."""
        return replace(self, key=public_key(path))

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """Yield each line, with its line end, and its place: file and line number, counted from 1."""
        for path, num_bytes in self.files:
            for number, line in enumerate(read_lines(path, num_bytes=num_bytes), 1):
                self.on_bytes(len(line))
                yield f"{path.name}:{number}", line


def verify(source: Source, expected: Iterable[Checkpoint] = ()) -> Verifier:
    """Verify a log; the `faults` of the result list its faults."""
    verifier = Verifier(source.key, whole=source.is_whole, expected=list(expected))
    for where, line in source.lines():
        verifier.feed(line, where)
    verifier.finish()
    return verifier


def events_of(source: Source) -> Iterator[Line]:
    """Yield the readable events; only `verify` reports faults of the log."""
    for _, data in source.lines():
        try:
            line = read_line(data)
        except LineFault:
            continue
        if line.event is not None:
            yield line


def newest_first(source: Source, before: int = 0) -> Iterator[Line]:
    """Yield the readable lines from the newest on, a file after the other; each file is read as a whole.

    Args:
        source: the log.
        before: the number of the line before which they lie; 0: all. The files behind it are not read.
    """
    for path, num_bytes in reversed(source.files):
        if before and is_log_file(path.name) and first_number(path) >= before:
            continue
        for data in reversed([*read_lines(path, num_bytes=num_bytes)]):
            source.on_bytes(len(data))
            with suppress(LineFault):
                line = read_line(data)
                if not before or line.seq < before:
                    yield line


def last_checkpoint(source: Source) -> Checkpoint | None:
    """Return the newest readable checkpoint, or None."""
    return next((line.checkpoint for line in newest_first(source) if line.event is None), None)


def last_events(source: Source, count: int, *, action: str = "", actor: str = "", before: int = 0) -> list[Line]:
    """Return the newest `count` events with this action (or a prefix of it up to a dot) and actor; "" matches all.

    Args:
        source: the log.
        count: the largest number.
        action: the action.
        actor: the actor, or the user for whom one acts.
        before: the number of the line before which they lie; 0: at the end.
    """
    lines = (line for line in newest_first(source, before) if line.event is not None)
    return [*islice((line for line in lines if _is_wanted(line, action, actor)), count)][::-1]


def _is_wanted(line: Line, action: str, actor: str) -> bool:
    assert line.event is not None
    is_action = not action or line.event.action == action or line.event.action.startswith(f"{action}.")
    return is_action and (not actor or actor in (line.event.actor, line.event.on_behalf_of))


def between(source: Source, since: str, until: str) -> Iterator[bytes]:
    """Yield the lines unchanged, from the first at `since` to the last before `until`, both RFC 3339 as in the log.

    The lines are contiguous, so that an excerpt can be verified, too. An unreadable line counts to the readable line
    before it.
    """
    has_begun = False
    for _, data in source.lines():
        try:
            at = read_line(data).time
        except LineFault:
            at = ""
        has_begun = has_begun or at >= since
        if at and until and at >= until:
            return
        if has_begun:
            yield data
