"""`atoll audit ...`: who did what, and whether the log of it is whole."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError, Commands
from atoll.cli.printing import as_json, note, say, table
from atoll.protocol.printable import printable

if TYPE_CHECKING:
    from atoll.protocol.audit.chain import Checkpoint, Line, Verifier
    from atoll.server.audit.reading import Source

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Who did what, and whether the log of it is whole.")

EXIT_FAULTS = 1

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE]...", help="Files of a log, in order, or an export; by default the state directory's."
    ),
]
Key = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="The public key that must have signed, kept elsewhere than the log."),
]
Known = Annotated[
    list[str],
    typer.Option("--checkpoint", metavar="SEQ:DIGEST", help="A checkpoint that must be in the log; repeatable."),
]
Last = Annotated[
    int, typer.Option("--last", metavar="N", callback=options.between(1), help="How many of the newest events.")
]
ActionIs = Annotated[
    str, typer.Option("--action", metavar="A", help="Only of this action: `run.stop`, or all of `run`.")
]
Actor = Annotated[str, typer.Option("--actor", metavar="NAME", help="Only what this one did.")]
Since = Annotated[str, typer.Option("--since", metavar="TIME", help="From this instant on, such as 2026-01-31T12:00Z.")]
Until = Annotated[str, typer.Option("--until", metavar="TIME", help="Before this instant.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to; by default standard output.")]


@app.command()
def verify(
    files: Files = None,
    key: Key = None,
    known: Known = [],  # noqa: B006 - typer's way to say "none given"; never changed
    state: options.State = options.STATE,
    json: options.Json = False,
) -> None:
    """Find any line that was changed, is missing, out of order or repeated, and any signature that is wrong.

    Ends with 0 when there is no fault, with 1 when there is one. That a log was cut off at its end, or written anew by
    whoever has its key, only a checkpoint shows that was kept elsewhere: name it with --checkpoint.
    """
    from atoll.server.audit.reading import verify as verify_source

    expected = [_checkpoint(text) for text in known]
    with _source(files, key, state) as source:
        found = verify_source(source, expected)
    if json:
        said = {"mended": [_event(line) for line in found.mended], "cut_files": [path.name for path in source.cut]}
        faults = {"num_faults": found.num_faults, "faults": [str(fault) for fault in found.faults]}
        as_json(_summary(found) | said | faults)
    else:
        _say_verdict(found, source.cut)
    if found.num_faults:
        raise typer.Exit(EXIT_FAULTS)


@app.command()
def show(
    files: Files = None,
    last: Last = 20,
    action: ActionIs = "",
    actor: Actor = "",
    state: options.State = options.STATE,
    json: options.Json = False,
) -> None:
    """Show the newest events, and the checkpoint to remember elsewhere. Whether they are sound, `verify` tells."""
    from atoll.server.audit.reading import last_checkpoint, last_events

    with _source(files, None, state) as source:
        lines = last_events(source, last, action=action, actor=actor)
        newest = last_checkpoint(source)
    if json:
        as_json({"events": [_event(line) for line in lines], "checkpoint": str(newest) if newest else None})
        return
    shown = ("seq", "time", "actor", "role", "action", "object", "outcome")
    rows = [[printable(str(_event(line)[name])) for name in shown] for line in lines]
    table(shown, rows, empty="no such event")
    note(f"checkpoint {newest}" if newest else "no checkpoint yet")


@app.command()
def export(
    files: Files = None,
    since: Since = "",
    until: Until = "",
    out: Out = None,
    state: options.State = options.STATE,
) -> None:
    """Copy the log as it is, JSON lines with times in RFC 3339, or the part of a period; `verify` reads it, too."""
    from atoll.server.audit.reading import between

    begin, end = _instant("--since", since), _instant("--until", until)
    if begin and end and end <= begin:
        raise CommandError(f"--until {until} is not after --since {since}: nothing lies between them")
    with _source(files, None, state) as source:
        lines = between(source, begin, end)
        if out is None:
            for line in lines:
                sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            return
        with out.open("xb") as file:
            file.writelines(lines)


@contextmanager
def _source(files: list[Path] | None, key: Path | None, state: Path) -> "Iterator[Source]":
    """What is to be read: these files, the state directory's log, or a copy of that of a coordinator elsewhere."""
    from atoll.cli.looking import admin
    from atoll.protocol.audit.files import audit_folder
    from atoll.server.audit.reading import Source

    with ExitStack() as stack:
        if files:
            source = Source.of_files(files)
        elif admin.is_elsewhere(state):
            copy = Path(stack.enter_context(TemporaryDirectory(prefix="atoll-audit-")))
            folder = audit_folder(copy)
            folder.mkdir()
            admin.fetch_audit_log(state, folder)
            source = Source.of_state(copy)
        else:
            source = Source.of_state(state)
        yield source.with_key(key) if key is not None else source


def _checkpoint(text: str) -> "Checkpoint":
    from atoll.protocol.audit.chain import Checkpoint

    try:
        return Checkpoint.parse(text)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _instant(option: str, text: str) -> str:
    """As the log has it; a time without a zone is UTC."""
    from atoll.protocol.audit.chain import instant

    if not text:
        return ""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise CommandError(f"{option} {text[:80]!r}: allowed is a time such as 2026-01-31T12:00:00Z") from error
    return instant((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp())


def _summary(found: "Verifier") -> dict[str, Any]:
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
    }


def _say_verdict(found: "Verifier", cut: Sequence[Path]) -> None:
    for line in found.mended:
        event = _event(line)
        say(printable(f"line {line.seq} of {line.time}: {event['action']}: {event['object']}: {event['outcome']}"))
    for path in cut:
        say(printable(f"{path.name}: what was cut off, kept beside the log"))
    for fault in found.faults:
        say(printable(str(fault)))
    if found.num_faults > len(found.faults):
        say(f"... and {found.num_faults - len(found.faults)} more")
    what = _summary(found)
    which = "" if found.first is None else f", lines {what['first']} to {what['last']}"
    say(f"{what['events']} events and {what['checkpoints']} checkpoints{which}")
    if what["first"]:
        say(f"the log goes back to line 0, these files to line {what['first']} only")
    if what["checkpoint"]:
        say(f"last checkpoint {what['checkpoint']} of {what['checkpoint_time']}, signed by {what['key']}")
    if what["unsigned"]:
        say(f"{what['unsigned']} events at the end are signed by no checkpoint yet")
    say(f"FAULTY: {found.num_faults} faults" if found.num_faults else _soundness(what["first"]))


def _soundness(first: int) -> str:
    """That there is no fault, as far as was looked."""
    nothing = "nothing is changed, missing or out of order"
    if first == 0:
        return f"sound: {nothing}"
    return f"sound from line {first} on: {nothing} there; what came before was not looked at"


def _event(line: "Line") -> dict[str, Any]:
    event = line.event
    assert event is not None
    return {
        "seq": line.seq,
        "time": event.time,
        "actor": event.actor,
        "role": event.role,
        "action": event.action,
        "object": event.object,
        "outcome": event.outcome,
        "digests": dict(event.digests),
    }
