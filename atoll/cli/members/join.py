"""`atoll join`: enrol this person as an owner, operator or auditor of a coordinator on another machine."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.printing import as_json, say
from atoll.cli.waiting import waiting_for
from atoll.operations.faults import CommandError
from atoll.operations.place import IDENTITY_VARIABLE, identity_folder

if TYPE_CHECKING:
    from atoll.protocol.identity.join_code import JoinCode
    from atoll.protocol.identity.names import Wanted

Code = Annotated[
    str, typer.Argument(metavar="CODE", help="The join code; - reads it from standard input, @FILE from a file.")
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


def join(code: Code, identity: Folder = None, json: options.Json = False) -> None:
    """Become an owner, operator or auditor with a join code.

    From then on, commands on a machine without a state directory go to that coordinator.

    A site passes its join code to `atoll agent`, an aggregation rank to `atoll aggregator`.
    """
    import asyncio

    from atoll.protocol.identity.credential import Credential
    from atoll.protocol.identity.enrolling import EnrolmentFailed, Place, enrol, is_enrolled

    folder, parsed = identity or identity_folder(), _parsed(code)
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
    credential, place = Credential.load(folder), Place.load(folder)
    member = credential.identity
    if json:
        expires_at = credential.leaf.expires_at
        as_json(
            {"role": member.role, "name": member.name, "coordinator": place.admin_address, "expires_at": expires_at}
        )
        return
    say(f"{member} at {place.admin_address}, in {folder}")


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
