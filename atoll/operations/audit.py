"""The audit log of a coordinator, or the log of a site's decisions: its newest events, its checkpoint, its proof."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from atoll.ground.printable import count_of, printable_size
from atoll.operations.place import is_elsewhere
from atoll.operations.reporter import waiting_for

if TYPE_CHECKING:
    from atoll.protocol.audit.chain import Checkpoint, Line, Verifier
    from atoll.server.audit.reading import Source

Document = dict[str, Any]


@contextmanager
def opened_log(
    state: Path, *, files: Sequence[Path] = (), archives: Sequence[Path] = (), key: Path | None = None
) -> "Iterator[Source]":
    """Open a log for reading in the block: named files, a state directory's log, or a copy from the joined coordinator.

    Args:
        state: the coordinator's state directory.
        files: the files of a log; none: the log of the state directory.
        archives: the archives with the lines before.
        key: the public key that must have signed; None: the state directory's, and of named files any key.

    Raises:
        AuditUnusable: there is no such log.
        CommandError: the joined coordinator refuses, or does not answer.
    """
    from atoll.operations import admin
    from atoll.protocol.audit.files import audit_folder
    from atoll.server.audit.reading import Source

    with ExitStack() as stack:
        if files:
            source = Source.of_files(files)
        elif is_elsewhere(state):
            copy = Path(stack.enter_context(TemporaryDirectory(prefix="atoll-audit-")))
            folder = audit_folder(copy)
            folder.mkdir()
            admin.fetch_audit_log(state, folder)
            source = Source.of_state(copy)
        else:
            with waiting_for(f"the lock of the audit log {audit_folder(state)}", "until its holder has written"):
                source = Source.of_state(state)
        source = source.behind(archives) if archives else source
        yield source.with_key(key) if key is not None else source


@contextmanager
def reading_log(source: "Source") -> "Iterator[Source]":
    """Report, when the block takes long, that the log is being read, and how much of it is left."""
    num_bytes = sum(size for _, size in source.files)
    reading = waiting_for("the end of the audit log", f"its {printable_size(num_bytes)} are read")
    with reading as wait:
        yield replace(source, on_bytes=lambda more: wait.advance(more, num_bytes))


def newest_events(source: "Source", count: int, *, action: str = "", actor: str = "", before: int = 0) -> Document:
    """Return the newest events of a log and its newest checkpoint, as `atoll audit show --json` has them.

    Args:
        source: the log.
        count: the largest number of events.
        action: the action of the events, or a part of it up to a dot; empty: any.
        actor: the actor of the events, or the user for whom one has acted; empty: any.
        before: the number of the line before which the events lie; 0: at the end.
    """
    from atoll.server.audit.reading import last_checkpoint, last_events

    with reading_log(source) as read:
        lines = last_events(read, count, action=action, actor=actor, before=before)
        newest = last_checkpoint(source)
    return {"events": [event_of(line) for line in lines], "checkpoint": str(newest) if newest else None}


def verified_log(source: "Source", expected: "Sequence[Checkpoint]" = ()) -> "tuple[Verifier, Document]":
    """Verify a log from its first line on; return the verifier, and the verdict as `atoll audit verify --json`.

    Args:
        source: the log.
        expected: checkpoints that must be in it.
    """
    from atoll.server.audit.reading import verify

    with reading_log(source) as read:
        found = verify(read, expected)
    repairs = {"mended": [event_of(line) for line in found.mended], "cut_files": [path.name for path in source.cut]}
    return found, summary_of(found) | repairs | faults_in(found)


def summary_of(found: "Verifier") -> Document:
    """Return what a verified log has: the numbers of its lines, its newest checkpoint, and the archive it relies on."""
    newest, first = found.last_checkpoint, found.first
    return {
        "events": found.events,
        "checkpoints": found.checkpoints,
        "first": first.seq if first is not None else None,
        "last": found.newest.seq if found.newest is not None else None,
        "unsigned": found.unsigned,
        "checkpoint": str(newest.checkpoint) if newest is not None else None,
        "checkpoint_time": newest.time if newest is not None else None,
        "key": found.key,
        "relies_on": None if found.archived is None else found.archived.prev,
    }


def faults_in(found: "Verifier") -> Document:
    """Return the faults of a verified log."""
    return {"num_faults": found.num_faults, "faults": [str(fault) for fault in found.faults]}


def event_of(line: "Line") -> Document:
    """Return the event of a line in plain values."""
    event = line.event
    assert event is not None
    user = {"on_behalf_of": event.on_behalf_of} if event.on_behalf_of else {}
    return {
        "seq": line.seq,
        "time": event.time,
        "actor": event.actor,
        "role": event.role,
        "action": event.action,
        "object": event.object,
        "outcome": event.outcome,
        "digests": dict(event.digests),
        **user,
    }


def actor_in_words(event: Mapping[str, Any]) -> str:
    """Return the actor of an event, and the user for whom it has acted if it has named one."""
    user = event.get("on_behalf_of")
    return f"{event['actor']} for {user}" if user else str(event["actor"])


def soundness(num_faults: int, first: int | None) -> str:
    """Return the verdict on a verified log in words, with the lines that it covers.

    Args:
        num_faults: the number of its faults.
        first: the number of its first line; None: it has none.
    """
    if num_faults:
        return f"FAULTY: {count_of(num_faults, 'fault')}"
    nothing = "nothing is changed, missing or out of order"
    if first == 0:
        return f"sound: {nothing}"
    return f"sound from line {first} on: {nothing} there; earlier lines were not checked"
