"""`atoll join`: become an operator, an owner or an auditor of a coordinator elsewhere."""

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError
from atoll.cli.printing import as_json, say

if TYPE_CHECKING:
    from atoll.protocol.identity.join_code import JoinCode
    from atoll.protocol.identity.names import Wanted

VARIABLE = "ATOLL_IDENTITY"

Code = Annotated[str, typer.Argument(metavar="CODE", help="The join code; - reads it from standard input.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--identity",
        metavar="DIR",
        help=f"Where the key and the certificate go; by default ${VARIABLE}, or ~/.config/atoll/identity.",
    ),
]


def identity_of_person() -> Path:
    """Where somebody keeps who they are, on a machine that hosts no coordinator."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".config" / "atoll" / "identity")


def join(code: Code, identity: Folder = None, json: options.Json = False) -> None:
    """Become an owner, operator or auditor with a join code; commands without a coordinator here go to it from then on.

    Sites give their join code to `atoll agent`, and aggregation ranks to `atoll aggregator`.
    """
    from atoll.protocol.identity.credential import Credential
    from atoll.protocol.identity.enrolling import EnrolmentFailed, Place, enrol, is_enrolled

    folder, parsed = identity or identity_of_person(), parsed_code(code)
    if not is_enrolled(folder, parsed, time.time()):
        wanted = _wanted(folder)
        try:
            asyncio.run(enrol(parsed, folder, wanted))
        except EnrolmentFailed as error:
            if wanted.name and f"not for {wanted}" in str(error):
                hint = f"{folder} holds the credential of {wanted}: name another folder with --identity"
                raise CommandError(str(error), hint) from None
            raise
    credential, place = Credential.load(folder), Place.load(folder)
    if json:
        who = credential.identity
        expires_at = credential.leaf.expires_at
        as_json({"role": who.role, "name": who.name, "coordinator": place.admin_address, "expires_at": expires_at})
        return
    say(f"{credential.identity} at {place.admin_address}, in {folder}")


def _wanted(folder: Path) -> "Wanted":
    """One of the roles of people; whoever one is in this folder already, as long as that holds."""
    from atoll.protocol.identity.credential import Credential, CredentialError
    from atoll.protocol.identity.names import Role, Wanted

    with suppress(CredentialError):
        held = Credential.load(folder)
        if not held.is_expired(time.time()):
            return Wanted((held.identity.role,), held.identity.name)
    return Wanted((Role.OWNER, Role.OPERATOR, Role.AUDITOR))


def parsed_code(text: str) -> "JoinCode":
    """A join code that was given, or that standard input has.

    Raises:
        CommandError: it is none.
    """
    from atoll.protocol.identity.join_code import JoinCode, JoinCodeError

    try:
        return JoinCode.parse(given_code(text) or "")
    except JoinCodeError as error:
        raise CommandError(str(error)) from error


def given_code(text: str | None) -> str | None:
    """What was given, or what standard input has in place of "-": so that a code is in no list of processes."""
    from atoll.protocol.identity.join_code import TEXT_MAX

    return sys.stdin.read(TEXT_MAX + 1).strip() if text == "-" else text
