"""`atoll join`: enrol this person as an owner, operator or auditor of a coordinator on another machine."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, clock, note, say
from atoll.cli.waiting import waiting_for
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.place import IDENTITY_VARIABLE, identity_folder

if TYPE_CHECKING:
    from atoll.protocol.identity.credential import Credential
    from atoll.protocol.identity.join_code import JoinCode
    from atoll.protocol.identity.names import Wanted

Code = Annotated[
    str | None,
    typer.Argument(
        metavar="[CODE]",
        help="The join code; - reads it from standard input, @FILE from a file. With --p12 it may be left out: the "
        "credential of an earlier join counts.",
        show_default=False,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--identity",
        metavar="DIR",
        help="The folder for the key and the certificate; "
        f"by default ${IDENTITY_VARIABLE}, or ~/.config/atoll/identity.",
    ),
]
P12 = Annotated[
    Path | None,
    typer.Option(
        "--p12",
        metavar="FILE",
        help="Also write key and certificate to a new file (PKCS #12) for browsers, which only you can read; "
        "asks for a passphrase of at least 8 characters, or reads a line from standard input that is no terminal.",
    ),
]

PASSPHRASE_MIN = 8
"""The fewest characters of a passphrase."""


def join(code: Code = None, identity: Folder = None, p12: P12 = None, json: options.Json = False) -> None:
    """Become an owner, operator or auditor with a join code.

    From then on, commands on a machine without a state directory go to that coordinator.

    A site passes its join code to `atoll agent`, an aggregation rank to `atoll aggregator`.
    """
    from atoll.protocol.identity.credential import Credential
    from atoll.protocol.identity.enrolling import Place

    _check(code, p12)
    folder = identity or identity_folder()
    passphrase = b"" if p12 is None else _passphrase()
    if code is not None:
        _enrol(folder, _parsed(code))
    credential, place = Credential.load(folder), Place.load(folder)
    member = credential.identity
    if p12 is not None:
        _write_p12(credential, p12, passphrase)
    if json:
        expires_at = credential.leaf.expires_at
        as_json(
            {"role": member.role, "name": member.name, "coordinator": place.admin_address, "expires_at": expires_at}
        )
        return
    say(f"{member} at {place.admin_address}, in {folder}")


def _check(code: str | None, p12: Path | None) -> None:
    """Check the arguments; raises CommandError with all faults."""
    faults = list[str]()
    if code is None and p12 is None:
        faults.append("name the join code, or --p12 FILE for a file of the credential that is here already")
    if code == "-" and p12 is not None and not sys.stdin.isatty():
        faults.append("--p12: standard input has the join code: pass it as @FILE, and the passphrase there")
    if p12 is not None and os.path.lexists(p12):
        faults.append(f"--p12: {p12} exists already: remove it, or name another file")
    elif p12 is not None and not p12.absolute().parent.is_dir():
        faults.append(f"--p12: there is no folder {p12.absolute().parent}")
    if faults:
        raise CommandError(*faults)


def _passphrase() -> bytes:
    """Ask for the passphrase of a file; raises CommandError."""
    if sys.stdin.isatty():
        found = str(typer.prompt("passphrase of the file", hide_input=True, confirmation_prompt=True, err=True))
    else:
        with waiting_for("the passphrase on standard input", "one line"):
            found = sys.stdin.readline().rstrip("\r\n")
    if len(found) < PASSPHRASE_MIN:
        got = count_of(len(found), "character")
        raise CommandError(f"passphrase: got {got}; allowed: at least {PASSPHRASE_MIN}")
    return found.encode()


def _write_p12(credential: "Credential", path: Path, passphrase: bytes) -> None:
    """Write the credential as a file for a browser; raises CommandError."""
    from atoll.ground.durable import write_private

    if credential.is_expired(time.time()):
        raise CommandError("the certificate has expired: join again, with a new join code")
    write_private(path, credential.to_pkcs12(passphrase))
    note(f"{path} has key and certificate, until {clock(credential.leaf.expires_at)}: import it into a browser")


def _enrol(folder: Path, parsed: "JoinCode") -> None:
    """Become a member in a folder, unless this join code was used there already."""
    import asyncio

    from atoll.protocol.identity.enrolling import EnrolmentFailed, enrol, is_enrolled

    if not is_enrolled(folder, parsed, time.time()):
        wanted = _wanted(folder)
        try:
            with waiting_for(f"the coordinator at {' or '.join(parsed.addresses)}", "up to 30 s for each address"):
                asyncio.run(enrol(parsed, folder, wanted))
        except EnrolmentFailed as error:
            if wanted.name and f"not for {wanted}" in str(error):
                hint = f"{folder} holds the credential of {wanted}: name another folder with --identity"
                raise CommandError(str(error), hint) from None
            raise


def _wanted(folder: Path) -> "Wanted":
    """Return the identity of an unexpired credential in the folder, or else any role of a person."""
    from atoll.protocol.identity.credential import Credential, CredentialError
    from atoll.protocol.identity.names import Role, Wanted

    with suppress(CredentialError):
        present = Credential.load(folder)
        if not present.is_expired(time.time()):
            return Wanted((present.identity.role,), present.identity.name)
    return Wanted((Role.OWNER, Role.OPERATOR, Role.AUDITOR))


def _parsed(text: str) -> "JoinCode":
    """Parse the join code that was given, or that standard input has.

    Raises:
        CommandError: the text is no join code.
    """
    from atoll.protocol.identity.join_code import JoinCode, JoinCodeError

    try:
        return JoinCode.parse(options.read_join_code(text) or "")
    except JoinCodeError as error:
        raise CommandError(str(error)) from error
