"""`atoll backup` and `atoll restore`: copy a coordinator's state directory, and make one from the copy."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.aggregation.printable import printable_size
from atoll.cli import options
from atoll.cli.faults import CommandError
from atoll.cli.printing import as_json, clock, note, say
from atoll.cli.waiting import waiting_for

if TYPE_CHECKING:
    from atoll.server.backup.backup import Backup

From = Annotated[Path, typer.Argument(metavar="STATE", help="The coordinator's state directory; it may be in use.")]
Out = Annotated[
    Path, typer.Argument(metavar="FILE.tar | DIR", help="The backup to write: a new folder, or a .tar file.")
]
Source = Annotated[Path, typer.Argument(metavar="FILE.tar | DIR", help="The backup to read.")]
To = Annotated[Path, typer.Argument(metavar="STATE", help="The state directory to make: new, or empty.")]
WithoutKeys = Annotated[
    bool, typer.Option("--without-keys", help="Leave out the authority, all certificates, and the audit log's key.")
]

NAMED = 5
"""The number of files left out that are listed by name."""


def backup(state: From, out: Out, without_keys: WithoutKeys = False, json: options.Json = False) -> None:
    """Back up a state directory, also while its coordinator runs.

    A backup is a snapshot of the journal with every file that it refers to. Without --without-keys it contains the
    coordinator's private keys: protect it as you protect them.
    """
    from atoll.cli.local_audit import recorded
    from atoll.cli.temporary import size_of, writing_to
    from atoll.server.audit.actions import Action
    from atoll.server.backup.backup import back_up
    from atoll.server.backup.contents import BackupFailed

    try:
        copying = waiting_for(f"the backup of {state}", "its files are copied and checked")
        writing = writing_to("FILE.tar | DIR", out, size_of(state), spared=(BackupFailed,))
        with recorded(state, Action.STATE_BACKUP, str(out.absolute())), copying as wait, writing:
            made = back_up(state, out, keys=not without_keys, on_bytes=wait.advance)
    except BackupFailed as error:
        raise CommandError(str(error)) from error
    if json:
        as_json({"backup": out, **_contents(made), "left_out": made.strangers})
        return
    say(f"{out} holds {state} as of {clock(made.made_at)} ({printable_size(made.num_bytes)})")
    _list_runs(made)
    if made.strangers:
        more = f" and {len(made.strangers) - NAMED} more" if len(made.strangers) > NAMED else ""
        note(f"left out, as no files of the coordinator: {', '.join(made.strangers[:NAMED])}{more}")


def restore(source: Source, state: To, json: options.Json = False) -> None:
    """Make a state directory from a backup, after checking every file against its digest and the journal.

    Everything after the backup is lost: updates and rounds, and also invitations and revocations, which you must
    repeat. Never use both the old directory and the restored one.
    """
    from atoll.cli.local_audit import record_local_action
    from atoll.cli.temporary import size_of, writing_to
    from atoll.server.audit.actions import Action
    from atoll.server.backup.contents import BackupFailed
    from atoll.server.backup.restore import restore as restore_from

    try:
        copying = waiting_for(f"the files of {source}", "they are copied and checked")
        with copying as wait, writing_to("STATE", state, size_of(source), spared=(BackupFailed,)):
            made = restore_from(source, state, on_bytes=wait.advance)
    except BackupFailed as error:
        raise CommandError(str(error)) from error
    record_local_action(state, Action.STATE_RESTORE, str(source.absolute()))
    if json:
        as_json({"state": state, **_contents(made)})
        return
    say(f"{state} is as of {clock(made.made_at)}")
    _list_runs(made)
    note("everything later is lost, revocations too: repeat `atoll client revoke` for each member revoked since")
    if not made.has_keys:
        note("the backup has no keys: put identity/ in place, or every client must enrol again")
        note(f"also put audit/key.pem in place, or move {state}/audit away to begin a new log (docs/backup.md)")


def _contents(made: "Backup") -> dict[str, Any]:
    runs = [{"run": n.run_id, "state": n.state, "version": n.version, "next_round": n.next_round} for n in made.needs]
    return {"made_at": made.made_at, "has_keys": made.has_keys, "num_bytes": made.num_bytes, "runs": runs}


def _list_runs(made: "Backup") -> None:
    for need in made.needs:
        say(f"{need.run_id} is {need.state}, at version {need.version}, before round {need.next_round}")
