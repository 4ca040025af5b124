"""`atoll audit ...`: verify, show and export a coordinator's audit log."""

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, note, say, table
from atoll.cli.waiting import waiting_for
from atoll.ground.printable import count_of, instead_of, printable, printable_size
from atoll.operations.audit import (
    actor_in_words,
    event_of,
    faults_in,
    newest_events,
    opened_log,
    reading_log,
    soundness,
    summary_of,
    verified_log,
)
from atoll.operations.faults import CommandError
from atoll.operations.place import STATE, is_elsewhere
from atoll.protocol.signals import ExitCode

if TYPE_CHECKING:
    from atoll.protocol.audit.chain import Checkpoint, Verifier

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Verify, show and export a coordinator's audit log.")

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE]...", help="Files of a log, in order, or an export; by default the state directory's log."
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="The public key that must have signed, stored apart from the log; by default the state directory's, "
        "and any key for named files.",
    ),
]
Known = Annotated[
    list[str],
    typer.Option("--checkpoint", metavar="SEQ:DIGEST", help="A checkpoint that must be in the log; repeatable."),
]
Last = Annotated[
    int, typer.Option("--last", metavar="N", callback=options.between(1), help="Number of events, the newest ones.")
]
ActionIs = Annotated[
    str, typer.Option("--action", metavar="A", help="Only events of this action: `run.stop`, or `run` for all of run.")
]
Actor = Annotated[
    str, typer.Option("--actor", metavar="NAME", help="Only events of this actor, or on behalf of this user.")
]
Before = Annotated[
    int,
    typer.Option(
        "--before",
        metavar="SEQ",
        callback=options.between(0, 2**53),
        help="Only events before the line of this number; 0: up to the end.",
    ),
]
Since = Annotated[
    str,
    typer.Option("--since", metavar="TIME", help="First instant, such as 2026-01-31T12:00Z; UTC without a time zone."),
]
Until = Annotated[str, typer.Option("--until", metavar="TIME", help="End of the period, exclusive; as --since.")]
Archives = Annotated[
    list[Path] | None,
    typer.Option(
        "--archive", metavar="DIR", help="The archive with the lines before, as `audit archive` made it; repeatable."
    ),
]
Into = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The archive: a new folder, or the one of the last archive.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="The new file to write; by default standard output.")
]


@app.command()
def verify(
    files: Files = None,
    key: Key = None,
    known: Known = [],  # noqa: B006 - typer's way to say "none given"; never changed
    archives: Archives = None,
    state: options.State = STATE,
    json: options.Json = False,
) -> None:
    """Verify a log: find every line that was changed, removed, reordered or repeated, and every wrong signature.

    A log whose older lines were archived is verified from there on, and says what it relies on; with --archive, all
    of it is. Exit code 0: no fault; 1: faults. A log that was cut off at its end, or rewritten by a holder of its key,
    fails only against a checkpoint that was stored elsewhere: name it with --checkpoint.
    """
    expected = _checkpoints(known)
    with opened_log(state, files=files or (), archives=archives or (), key=key) as source:
        found, document = verified_log(source, expected)
    if json:
        as_json(document)
    else:
        _say_verdict(found, source.cut)
    if found.num_faults:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def show(
    files: Files = None,
    last: Last = 20,
    action: ActionIs = "",
    actor: Actor = "",
    before: Before = 0,
    archives: Archives = None,
    state: options.State = STATE,
    json: options.Json = False,
) -> None:
    """Show the newest events, and the newest checkpoint, to store elsewhere. `atoll audit verify` checks them."""
    with opened_log(state, files=files or (), archives=archives or ()) as source:
        found = newest_events(source, last, action=action, actor=actor, before=before)
    if not found["events"] and action:
        _check_action(action)
    if json:
        as_json(found)
        return
    shown = ("seq", "time", "actor", "role", "action", "object", "outcome")
    events = [event | {"actor": actor_in_words(event)} for event in found["events"]]
    rows = [[printable(str(event[name])) for name in shown] for event in events]
    table(shown, rows, empty="no such event")
    note(f"checkpoint {found['checkpoint']}" if found["checkpoint"] else "no checkpoint yet")


@app.command()
def export(
    files: Files = None,
    since: Since = "",
    until: Until = "",
    out: Out = None,
    archives: Archives = None,
    state: options.State = STATE,
) -> None:
    """Export the log or a period of it, unchanged: JSON lines, times in RFC 3339. `atoll audit verify` reads it."""
    from atoll.server.audit.reading import between

    begin, end = _period(since, until)
    with opened_log(state, files=files or (), archives=archives or ()) as source:
        if out is None:
            for line in between(source, begin, end):
                sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            return
        with out.open("xb") as file, reading_log(source) as shown:
            file.writelines(between(shown, begin, end))


@app.command()
def archive(out: Into, state: options.State = STATE, json: options.Json = False) -> None:
    """Move all lines of the log into an archive, also while the coordinator runs; the log continues behind them.

    The archive keeps its proof: its last line is a checkpoint, whose hash the log's next line names. `atoll audit
    verify --archive DIR` verifies across. Keep the archive as long as the log must be kept.
    """
    from atoll.protocol.audit.files import audit_folder

    if is_elsewhere(state):
        raise CommandError("the log is archived on the coordinator's machine: run this there, with --state")
    as_archived(audit_folder(state), out, "coordinator", json=json)


def as_archived(folder: Path, out: Path, writer: str, *, json: bool) -> None:
    """Archive the lines of a log, and print what was moved.

    Raises:
        CommandError: there is no log, or the archive cannot be written.
    """
    from atoll.ground.folders import in_words
    from atoll.operations.local_audit import os_user
    from atoll.protocol.audit.files import AuditFiles, log_files

    if not log_files(folder):
        raise CommandError(f"there is no log in {folder}: name another state directory with --state")
    try:
        with waiting_for(f"the lock of {folder}", "until its holder has written"):
            files = AuditFiles(folder, time.time, writer=writer)
            try:
                done = files.archive(out, actor=os_user(), role="local")
            finally:
                files.close()
    except OSError as error:
        raise CommandError(f"nothing is archived: {in_words(error)}") from error
    found = done.found
    if json:
        lines = {"first": done.first, "last": done.last, "bytes": done.num_bytes} if done.files else {}
        as_json({"out": str(out), "files": [path.name for path in done.files], **lines, **faults_in(found)})
    else:
        _say_faults(found)
        if done.files:
            moved = f"lines {done.first} to {done.last} ({printable_size(done.num_bytes)}) are in {out}"
            say(f"{moved}; the log continues behind")
        elif not found.num_faults:
            say("nothing to archive: no line was written since the last archive")
    if found.num_faults:
        what = "the archived lines have" if done.files else f"nothing is archived: the log in {folder} has"
        note(f"FAULTY: {what} {count_of(found.num_faults, 'fault')}: keep {out if done.files else 'it'} as evidence")
        raise typer.Exit(ExitCode.FAILED)


def _check_action(action: str) -> None:
    """Refuse an action that no event can have; a log of a later Atoll may have others, so it is searched first.

    Raises:
        CommandError: the action is unknown.
    """
    from atoll.server.audit.actions import Action

    known = {str(each) for each in Action} | {str(each).partition(".")[0] for each in Action}
    if action not in known:
        raise CommandError(f"--action {action!r} is not an action{instead_of(action, sorted(known))}")


def _checkpoints(texts: Sequence[str]) -> "list[Checkpoint]":
    """Parse the checkpoints that must be in the log.

    Raises:
        CommandError: texts are no checkpoints; the message lists them.
    """
    from atoll.protocol.audit.chain import Checkpoint

    found, faults = [], []
    for text in texts:
        try:
            found.append(Checkpoint.parse(text))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise CommandError(*faults)
    return found


def _period(since: str, until: str) -> tuple[str, str]:
    """Parse the begin and the end of a period, into times as the log writes them; an empty one is open.

    Raises:
        CommandError: a text that is no time, or an end that is not after the begin.
    """
    faults: list[str] = []
    begin, end = _instant("--since", since, faults), _instant("--until", until, faults)
    if begin and end and end <= begin:
        faults.append(f"--until {until} is not after --since {since}: nothing lies between them")
    if faults:
        raise CommandError(*faults)
    return begin, end


def _instant(option: str, text: str, faults: list[str]) -> str:
    """Parse a time, into one as the log writes it; a time without a zone is UTC."""
    from atoll.protocol.audit.chain import instant

    if not text:
        return ""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        faults.append(f"{option} {text[:80]!r}; allowed: a time such as 2026-01-31T12:00:00Z")
        return ""
    return instant((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp())


def _say_faults(found: "Verifier") -> None:
    for fault in found.faults:
        say(printable(str(fault)))
    if found.num_faults > len(found.faults):
        say(f"... and {found.num_faults - len(found.faults)} more")


def _say_verdict(found: "Verifier", cut: Sequence[Path]) -> None:
    for line in found.mended:
        event = event_of(line)
        say(printable(f"line {line.seq} of {line.time}: {event['action']}: {event['object']}: {event['outcome']}"))
    for path in cut:
        say(printable(f"{path.name}: the bytes that were cut off, beside the log"))
    _say_faults(found)
    what = summary_of(found)
    lines = "" if found.first is None else f", lines {what['first']} to {what['last']}"
    say(f"{count_of(what['events'], 'event')} and {count_of(what['checkpoints'], 'checkpoint')}{lines}")
    if (archived := found.archived) is not None:
        moved = f"lines 0 to {archived.seq - 1} were archived at {archived.time}, the last with hash {archived.prev}"
        outcome = "" if archived.event is None or archived.event.outcome == "ok" else f", {archived.event.outcome}"
        say(printable(f"{moved}{outcome}: with --archive DIR they are verified, too"))
    elif what["first"]:
        say(f"a log begins at line 0, these files at line {what['first']}")
    if what["checkpoint"]:
        say(f"last checkpoint {what['checkpoint']} of {what['checkpoint_time']}, signed by {what['key']}")
    if what["unsigned"]:
        say(
            f"{count_of(what['unsigned'], 'event at the end is', 'events at the end are')} not "
            "signed by a checkpoint yet"
        )
    say(soundness(found.num_faults, what["first"]))
