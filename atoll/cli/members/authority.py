"""`atoll authority ...`: the key that signs everybody's certificates, on a machine of its own."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.faults import CommandError, Commands
from atoll.cli.printing import as_json, note, say
from atoll.protocol.identity.names import Role

if TYPE_CHECKING:
    from atoll.protocol.identity.names import Identity
    from atoll.server.identity.authority import Authority

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="The key that signs everybody's certificates, on a machine of its own.",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The authority's directory.")]
Days = Annotated[
    float,
    typer.Option("--days", metavar="N", callback=options.between(0.001, 3650), help="How long a certificate holds."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose certificate it becomes; `main` for the coordinator.")]
As = Annotated[Role, typer.Option("--role", help="What the name is.", show_choices=False)]
Request = Annotated[
    Path | None, typer.Option("--request", metavar="FILE", help="What `atoll authority request` has written there.")
]
Out = Annotated[Path, typer.Option("--out", metavar="PATH", help="Where the answer goes; without a request a folder.")]
RequestOut = Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the request goes.")]
Answer = Annotated[Path, typer.Argument(metavar="ANSWER", help="What `atoll authority issue` has written.")]
Credential = Annotated[Path, typer.Argument(metavar="FOLDER", help="Of the credential: its key stays there.")]

Admin = Annotated[
    str | None,
    typer.Option("--admin", metavar="HOST:PORT", help="Where the coordinator answers owners, operators and auditors."),
]


@app.command("init")
def init(folder: Folder, name: Annotated[str, typer.Option("--name", help="For people to read.")] = "Atoll") -> None:
    """Make an authority. Its key is needed only to enrol and to renew; whoever has it can be anybody."""
    from atoll.server.identity.authority import Authority

    _print(Authority.create(folder, name), folder, json=False)


@app.command("show")
def show(folder: Folder, json: options.Json = False) -> None:
    """Show an authority: its fingerprint, which join codes carry, and until when it holds."""
    _print(_open(folder), folder, json=json)


@app.command("request")
def request(folder: Credential, out: RequestOut) -> None:
    """Make a key in a folder here, and a request for its certificate to carry to the authority. No secret is in it."""
    from atoll.protocol.identity.certificates import make_request
    from atoll.protocol.identity.enrolling import key_in

    out.write_bytes(make_request(key_in(folder)))
    note(f"sign {out} with: atoll authority issue DIR NAME --role ROLE --request {out.name} --out ANSWER")
    note(f"then put the answer in place with: atoll authority install {folder} ANSWER")


@app.command("issue")
def issue(
    folder: Folder, name: Name, out: Out, role: As = Role.CLIENT, request: Request = None, days: Days = 30.0
) -> None:
    """Sign a request, or make a key and its certificate here: what enrolment does, by hand.

    So become members: the coordinator itself when the authority is elsewhere, and owners, operators and auditors then.
    """
    from atoll.protocol.identity.certificates import (
        CertificateError,
        key_to_pem,
        make_request,
        new_key,
    )
    from atoll.protocol.identity.credential import Credential
    from atoll.server.identity.authority_server import AuthorityServer

    authority = _open(folder, days)
    identity, server = _identity(role, name), AuthorityServer(authority, folder)
    if request is None:
        _spare_others(out, identity)
    try:
        if request is not None:
            answer = server.issue(request.read_bytes(), identity, "by hand")
            out.write_bytes(answer + authority.ca_pem)
        else:
            key = new_key()
            answer = server.issue(make_request(key), identity, "by hand")
            Credential(key_to_pem(key), answer, authority.ca_pem).store(out)
    except (CertificateError, ValueError) as error:
        raise CommandError(str(error)) from error
    note(f"{identity}: {out}")


@app.command("install")
def install(folder: Credential, answer: Answer, admin: Admin = None) -> None:
    """Put the authority's answer to a request in place: the folder holds a whole credential afterwards.

    Owners, operators and auditors name the coordinator's port for them; sites tell it to their agent.
    """
    from atoll.protocol.identity.certificates import CertificateError, key_to_pem, read_certificates, to_pem
    from atoll.protocol.identity.credential import Credential
    from atoll.protocol.identity.enrolling import ENROLLING, Place, key_in
    from atoll.protocol.identity.join_code import is_address

    if admin is not None and not is_address(admin):
        raise CommandError(f"--admin {admin!r} is no address; allowed: HOST:PORT")
    try:
        leaf, *authorities = read_certificates(answer.read_bytes())
    except CertificateError as error:
        raise CommandError(f"{answer}: {error}") from error
    if not authorities or not (folder / ENROLLING).exists():
        raise CommandError(f"{answer} is no answer to a request of {folder}: begin with `atoll authority request`")
    credential = Credential(key_to_pem(key_in(folder)), to_pem(leaf), to_pem(*authorities))
    _spare_others(folder, credential.identity)
    credential.store(folder)
    (folder / ENROLLING).unlink()
    if admin is not None:
        Place(address="", admin_address=admin, invitation="").store(folder)
    note(f"{folder} holds the credential of {credential.identity}")


@app.command("serve")
def serve(
    folder: Folder,
    coordinator: Annotated[str, typer.Option("--coordinator", metavar="HOST:PORT", help="Where clients dial it.")],
    days: Days = 30.0,
) -> None:
    """Sign what a coordinator asks for, until a signal comes. It only dials out, also over HTTPS_PROXY.

    For clients and aggregation ranks it signs by itself, and renews a certificate on its older key's word; the first
    one of an owner, operator or auditor takes `atoll authority issue`.
    """
    import asyncio
    import os
    import signal

    from atoll.cli import log
    from atoll.protocol.identity.join_code import is_address
    from atoll.protocol.identity.proxy import HttpProxy
    from atoll.server.identity.authority_server import AuthorityServer

    if not is_address(coordinator):
        raise CommandError(f"--coordinator {coordinator!r}; allowed: host:port, with a port in 1..65535")
    server = AuthorityServer(_open(folder, days), folder, HttpProxy.of(os.environ))
    log.configure()

    async def until_stopped() -> None:
        serving = asyncio.current_task()
        assert serving is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        await server.serve(coordinator)

    try:
        asyncio.run(until_stopped())
    except asyncio.CancelledError:
        note("the authority ends")


def _open(folder: Path, days: float = 30.0) -> "Authority":
    from atoll.server.identity.authority import Authority

    return Authority.open(folder, days * 86400)


def _identity(role: Role, name: str) -> "Identity":
    from atoll.protocol.identity.names import Identity

    try:
        return Identity(role, name)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _spare_others(folder: Path, identity: "Identity") -> None:
    """Refuse to put a credential where an authority lies, or somebody else's that still holds: its key is lost then."""
    from atoll.protocol.identity.credential import Credential, CredentialError, spare_authority

    spare_authority(folder)
    with suppress(CredentialError):
        held = Credential.load(folder)
        if held.identity != identity and not held.is_expired(time.time()):
            raise CommandError(f"{folder} holds the credential of {held.identity}: name another folder")


def _print(authority: "Authority", folder: Path, *, json: bool) -> None:
    from atoll.protocol.identity.certificates import fingerprint, read_certificates

    [certificate] = read_certificates(authority.ca_pem)
    until = certificate.not_valid_after_utc
    what = {"directory": str(folder), "fingerprint": fingerprint(certificate).hex(), "expires_at": until.timestamp()}
    if json:
        as_json(what)
        return
    say(f"authority    {folder}")
    say(f"fingerprint  {what['fingerprint']}")
    say(f"holds until  {until:%Y-%m-%d}")
