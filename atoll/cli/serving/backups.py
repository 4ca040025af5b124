"""`atoll backup` and `atoll restore`: copy a coordinator's state directory, check the copy, and make one from it."""

from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, clock, note, say
from atoll.cli.waiting import waiting_for
from atoll.ground.printable import printable_size, some_of

if TYPE_CHECKING:
    from atoll.server.backup.backup import Backup

MAKE = "make"


class _Backup(Commands):
    """The commands of `atoll backup`, of which `make` need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse `atoll backup STATE FILE` as `atoll backup make STATE FILE`."""
        is_named = not args or args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if is_named else [MAKE, *args])


app = typer.Typer(
    cls=_Backup,
    no_args_is_help=True,
    help="Back up a coordinator's state directory (`atoll backup STATE FILE`), or verify a backup.",
)

From = Annotated[Path, typer.Argument(metavar="STATE", help="The coordinator's state directory; it may be in use.")]
Out = Annotated[
    Path, typer.Argument(metavar="FILE.tar | DIR", help="The backup to write: a new folder, or a .tar file.")
]
Source = Annotated[Path, typer.Argument(metavar="FILE.tar | DIR", help="The backup to read.")]
To = Annotated[Path, typer.Argument(metavar="STATE", help="The state directory to make: new, or empty.")]
Database = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        help="The URL of a journal in PostgreSQL, if the URL that the state directory names is no longer right.",
    ),
]
NewDatabase = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="URL",
        help="Put the journal into this PostgreSQL database, whose schema must be empty; by default it becomes a file.",
    ),
]
WithoutKeys = Annotated[
    bool, typer.Option("--without-keys", help="Leave out the authority, all certificates, and the audit log's key.")
]

NAMED = 5
"""The number of files left out that are listed by name."""


@app.command(MAKE)
def backup(
    state: From, out: Out, without_keys: WithoutKeys = False, database: Database = "", json: options.Json = False
) -> None:
    """Back up a state directory, also while its coordinator runs; `atoll backup STATE FILE` is the same.

    A backup is a snapshot of the journal, also of one in PostgreSQL, with every file that it refers to. Without
    --without-keys it contains the coordinator's private keys: protect it as you protect them.
    """
    from atoll.operations.local_audit import recorded
    from atoll.operations.temporary import size_of, writing_to
    from atoll.server.audit.actions import Action
    from atoll.server.backup.backup import back_up
    from atoll.server.backup.contents import BackupFailed

    copying = waiting_for(f"the backup of {state}", "its files are copied and checked")
    writing = writing_to("FILE.tar | DIR", out, size_of(state), spared=(BackupFailed,))
    with recorded(state, Action.STATE_BACKUP, str(out.absolute())), copying as wait, writing:
        made = back_up(state, out, keys=not without_keys, database=database, on_bytes=wait.advance)
    if json:
        as_json({"backup": out, **_contents(made), "left_out": made.strangers})
        return
    say(f"{out} holds {state} as of {clock(made.made_at)} ({printable_size(made.num_bytes)})")
    _list_runs(made)
    if made.strangers:
        note(f"left out, because they are not the coordinator's: {some_of(made.strangers, NAMED)}")


@app.command()
def verify(source: Source, json: options.Json = False) -> None:
    """Check a backup: every file against its digest, and the journal with the files that it relies on.

    A .tar file is unpacked for that into a temporary folder (TMPDIR), which needs room for it. Nothing is started.
    """
    from atoll.operations.temporary import size_of, writing_to
    from atoll.server.backup.contents import BackupFailed
    from atoll.server.backup.restore import verify as verify_backup

    copying = waiting_for(f"the files of {source}", "they are unpacked and checked")
    with copying as wait, writing_to("TMPDIR", Path(gettempdir()), size_of(source), spared=(BackupFailed,)):
        made = verify_backup(source, on_bytes=wait.advance)
    if json:
        as_json({"backup": source, **_contents(made)})
        return
    say(f"{source} is whole, as of {clock(made.made_at)} ({printable_size(made.num_bytes)})")
    _list_runs(made)


def restore(source: Source, state: To, database: NewDatabase = "", json: options.Json = False) -> None:
    """Make a state directory from a backup, after checking every file against its digest and the journal.

    Everything after the backup is lost: updates and rounds, and also invitations and revocations, which you must
    repeat. Never use both the old directory and the restored one.
    """
    from atoll.operations.local_audit import record_local_action
    from atoll.operations.temporary import size_of, writing_to
    from atoll.server.audit.actions import Action
    from atoll.server.backup.contents import BackupFailed
    from atoll.server.backup.restore import restore as restore_from

    copying = waiting_for(f"the files of {source}", "they are copied and checked")
    with copying as wait, writing_to("STATE", state, size_of(source), spared=(BackupFailed,)):
        made = restore_from(source, state, database=database, on_bytes=wait.advance)
    record_local_action(state, Action.STATE_RESTORE, str(source.absolute()))
    if json:
        as_json({"state": state, **_contents(made)})
        return
    say(f"{state} is as of {clock(made.made_at)}")
    _list_runs(made)
    note("everything later is lost, revocations too: repeat `atoll client revoke` for each member revoked since")
    if made.database and not database:
        note(
            f"the journal was in {made.database}, and is in {state / 'state.db'} now; --database puts it into a server"
        )
    if not made.has_keys:
        note("the backup has no keys: put identity/ in place, or every client must enrol again")
        note(f"also put audit/key.pem in place, or move {state}/audit away to begin a new log (docs/backup.md)")


def _contents(made: "Backup") -> dict[str, Any]:
    runs = [{"run": n.run_id, "state": n.state, "version": n.version, "next_round": n.next_round} for n in made.needs]
    return {"made_at": made.made_at, "has_keys": made.has_keys, "num_bytes": made.num_bytes, "runs": runs}


def _list_runs(made: "Backup") -> None:
    for need in made.needs:
        say(f"{need.run_id} is {need.state}, at version {need.version}, before round {need.next_round}")
