"""`atoll authority ...`: make the authority that signs all certificates, and run it on a separate machine."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.command import if_stopped
from atoll.cli.group import Commands
from atoll.cli.printing import as_json, clock, note, say
from atoll.ground.printable import shortened
from atoll.operations.faults import CommandError
from atoll.protocol.identity.names import Role

if TYPE_CHECKING:
    from atoll.protocol.identity.names import Identity
    from atoll.server.identity.authority import Authority

AUTHORITY_BYTES = 20_000
"""Room for an authority's key, certificate and log [bytes]."""

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Make, show and run the authority that signs all certificates, on a separate machine.",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The authority's directory.")]
Days = Annotated[
    float,
    typer.Option(
        "--days", metavar="N", callback=options.between(0.001, 3650), help="Days for which a certificate is valid."
    ),
]
NAME_BYTES_MAX = 64
"""Longest name of an authority in its certificate (RFC 5280, ub-common-name)."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name in the certificate; `main` for the coordinator.")]
As = Annotated[
    Role,
    typer.Option(
        "--role",
        metavar="ROLE",
        help="Role of the name: client, operator, owner, auditor, aggregator or coordinator.",
        show_choices=False,
    ),
]
Request = Annotated[
    Path | None, typer.Option("--request", metavar="FILE", help="The request, written by `atoll authority request`.")
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", metavar="PATH", help="The file of the answer; without --request, the folder of the new credential."
    ),
]
RequestOut = Annotated[Path, typer.Option("--out", metavar="FILE", help="The file of the request.")]
Answer = Annotated[Path, typer.Argument(metavar="ANSWER", help="The answer, written by `atoll authority issue`.")]
Credential = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="The folder of the credential; its key never leaves it.")
]

Admin = Annotated[
    str | None,
    typer.Option(
        "--admin",
        metavar="HOST:PORT",
        help="The coordinator's address for owners, operators and auditors, stored in the folder.",
    ),
]


@app.command("init")
def init(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the authority, for people.")] = "Atoll",
    json: options.Json = False,
) -> None:
    """Make an authority. Its key is needed only to enrol and to renew; a holder of the key can make any certificate."""
    from atoll.operations.temporary import writing_to
    from atoll.server.identity.authority import Authority

    with writing_to("DIR", folder, AUTHORITY_BYTES):
        authority = Authority.create(folder, _checked(name))
    _print(authority, folder, json=json)


@app.command("show")
def show(folder: Folder, json: options.Json = False) -> None:
    """Show an authority: its fingerprint, which join codes contain, and the date on which it expires."""
    _print(_open(folder), folder, json=json)


@app.command("replace")
def replace(
    folder: Folder,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the next authority, for people.")] = "",
    json: options.Json = False,
) -> None:
    """Make the authority that replaces this one. No member enrols again.

    The present one vouches for it. From the next start of the coordinator (or of `atoll authority serve`) on, members
    learn to trust both with their renewals; after the life of a certificate the next one signs, and after another one
    it is the only authority, and the key of this one is removed. `atoll authority show` has the dates.
    """
    from atoll.operations.temporary import writing_to

    authority = _open(folder)
    with writing_to("DIR", folder, AUTHORITY_BYTES):
        authority.prepare_next(folder, _checked(name or f"Atoll, begun {time.strftime('%Y-%m-%d')}"))
    _print(_open(folder), folder, json=json)
    note("restart the coordinator, or `atoll authority serve`: then it begins")


@app.command("request")
def request(folder: Credential, out: RequestOut, json: options.Json = False) -> None:
    """Make a key in a folder, and a request for a certificate to carry to the authority. The request has no secret."""
    from atoll.protocol.identity.certificates import make_request
    from atoll.protocol.identity.enrolling import key_in

    out.write_bytes(make_request(key_in(folder)))
    if json:
        as_json({"folder": folder, "request": out})
        return
    note(f"sign {out} with: atoll authority issue DIR NAME --role ROLE --request {out.name} --out ANSWER")
    note(f"then install the answer with: atoll authority install {folder} ANSWER")


@app.command("issue")
def issue(
    folder: Folder,
    name: Name,
    out: Out,
    role: As = Role.CLIENT,
    request: Request = None,
    days: Days = 30.0,
    json: options.Json = False,
) -> None:
    """Sign a request, or make a key with its certificate: enrolment by hand.

    Where the authority is on another machine, the coordinator, owners, operators and auditors get their first
    certificate in this way.
    """
    from atoll.protocol.identity.certificates import (
        CertificateError,
        key_to_pem,
        make_request,
        new_key,
        read_leaf,
    )
    from atoll.protocol.identity.credential import Credential
    from atoll.server.identity.authority_server import BY_HAND, AuthorityServer

    authority = _open(folder, days)
    identity, server = _identity(role, name), AuthorityServer(authority, folder)
    if request is None:
        _spare_others(out, identity)
    try:
        if request is not None:
            answer = server.issue(request.read_bytes(), identity, BY_HAND)
            out.write_bytes(answer + authority.ca_pem)
        else:
            key = new_key()
            answer = server.issue(make_request(key), identity, BY_HAND)
            Credential(key_to_pem(key), answer, authority.ca_pem).store(out)
    except (CertificateError, ValueError) as error:
        raise CommandError(f"{request}: {error}" if request is not None else str(error)) from error
    if json:
        expires_at = read_leaf(answer).expires_at
        as_json({"role": identity.role, "name": identity.name, "out": out, "expires_at": expires_at})
        return
    note(f"{identity}: {out}")


@app.command("install")
def install(folder: Credential, answer: Answer, admin: Admin = None, json: options.Json = False) -> None:
    """Install the authority's answer to a request, which completes the credential in the folder.

    Owners, operators and auditors add --admin; a site passes the coordinator's address to its agent.
    """
    from atoll.protocol.identity.certificates import CertificateError, key_to_pem, read_certificates, to_pem
    from atoll.protocol.identity.credential import Credential
    from atoll.protocol.identity.enrolling import ENROLLING, Place, key_in
    from atoll.protocol.identity.join_code import is_address

    faults = []
    if admin is not None and not is_address(admin):
        faults.append(f"--admin {admin!r} is not an address; allowed: HOST:PORT")
    try:
        leaf, *authorities = read_certificates(answer.read_bytes())
        if not authorities or not (folder / ENROLLING).exists():
            faults.append(f"{answer} is not the answer to a request of {folder}: begin with `atoll authority request`")
    except CertificateError as error:
        faults.append(f"{answer}: {error}")
    if faults:
        raise CommandError(*faults)
    credential = Credential(key_to_pem(key_in(folder)), to_pem(leaf), to_pem(*authorities))
    _spare_others(folder, credential.identity)
    credential.store(folder)
    (folder / ENROLLING).unlink()
    if admin is not None:
        Place(address="", admin_address=admin, invitation="").store(folder)
    if json:
        member, expires_at = credential.identity, credential.leaf.expires_at
        as_json(
            {"role": member.role, "name": member.name, "folder": folder, "coordinator": admin, "expires_at": expires_at}
        )
        return
    note(f"{folder} holds the credential of {credential.identity}")


@app.command("serve")
def serve(
    folder: Folder,
    coordinator: Annotated[
        str, typer.Option("--coordinator", metavar="HOST:PORT", help="The coordinator's address for clients.")
    ],
    days: Days = 30.0,
    log_form: options.Log = "text",
) -> None:
    """Run the authority: sign the requests of a coordinator until a signal comes.

    Needs outbound connections only, also through HTTPS_PROXY.

    It signs for clients and aggregation ranks, and renews a certificate of any role whose older key has signed the
    request. The first certificate of an owner, operator or auditor takes `atoll authority issue`.
    """
    if_stopped("before it dialled")
    import asyncio
    import os

    from atoll.cli import log
    from atoll.protocol import service_manager
    from atoll.protocol.build import software
    from atoll.protocol.identity.join_code import is_address
    from atoll.protocol.identity.proxy import HttpProxy
    from atoll.protocol.signals import call_at_end
    from atoll.server.identity.authority import Authority
    from atoll.server.identity.authority_server import AuthorityServer

    if not is_address(coordinator):
        raise CommandError(f"--coordinator {coordinator!r} is not an address; allowed: HOST:PORT, port 1..65535")
    authority = Authority.open(folder, days * 86400, begins=True)
    server = AuthorityServer(authority, folder, HttpProxy.of(os.environ))
    log.configure("authority", form=log_form)
    note(f"{software()}: the authority in {folder} starts; dialling the coordinator at {coordinator}")

    async def until_stopped() -> None:
        serving = asyncio.current_task()
        assert serving is not None
        service_manager.tell(service_manager.READY, f"dialling {coordinator}")
        call_at_end(serving.cancel, "stopped by %s: the authority ends")
        await server.serve(coordinator)

    with suppress(asyncio.CancelledError):
        asyncio.run(until_stopped())


def _open(folder: Path, days: float = 30.0) -> "Authority":
    from atoll.server.identity.authority import Authority

    return Authority.open(folder, days * 86400)


def _checked(name: str) -> str:
    """Check that a certificate can have this name of an authority, and return it."""
    if not name.isprintable() or not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        raise CommandError(
            f"--name: got {shortened(repr(name))}: allowed: 1 to {NAME_BYTES_MAX} bytes of UTF-8 that print"
        )
    return name


def _identity(role: Role, name: str) -> "Identity":
    from atoll.protocol.identity.names import Identity

    try:
        return Identity(role, name)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _spare_others(folder: Path, identity: "Identity") -> None:
    """Refuse a folder whose key would be lost: an authority's, or an unexpired key of another identity."""
    from atoll.protocol.identity.credential import Credential, CredentialError, spare_authority

    spare_authority(folder)
    with suppress(CredentialError):
        present = Credential.load(folder)
        if present.identity != identity and not present.is_expired(time.time()):
            raise CommandError(f"{folder} holds the credential of {present.identity}: name another folder")


def _print(authority: "Authority", folder: Path, *, json: bool) -> None:
    from atoll.protocol.identity.certificates import fingerprint, read_certificates

    certificate, *_ = read_certificates(authority.ca_pem)
    until = certificate.not_valid_after_utc
    shown: dict[str, object] = {
        "directory": str(folder),
        "fingerprint": fingerprint(certificate).hex(),
        "expires_at": until.timestamp(),
        "next": _next(authority, folder),
    }
    if json:
        as_json(shown)
        return
    say(f"authority    {folder}")
    say(f"fingerprint  {shown['fingerprint']}")
    say(f"valid until  {until:%Y-%m-%d}")
    if (following := shown["next"]) is not None:
        assert isinstance(following, dict)
        say(f"next         {following['fingerprint']}")
        begun = following["begun_at"]
        signs = "after the next start" if begun is None else clock(following["signs_from"])
        say(f"             trusted {'after the next start' if begun is None else f'since {clock(begun)}'}")
        say(f"             signs {signs if begun is None else f'from {signs} on'}")
        if begun is not None:
            say(f"             alone from {clock(following['alone_from'])} on")


def _next(authority: "Authority", folder: Path) -> dict[str, object] | None:
    """Return the authority that will replace this one, with the times at which it takes effect; None: there is none."""
    from atoll.protocol.identity.certificates import fingerprint, read_certificates
    from atoll.protocol.identity.credential import CERTIFICATE
    from atoll.server.identity.succession import NEXT

    place, succession = folder / NEXT / CERTIFICATE, authority.succession
    if not place.exists():
        return None
    return {
        "fingerprint": fingerprint(read_certificates(place.read_bytes())[0]).hex(),
        "begun_at": None if succession is None else succession.begun_at,
        "signs_from": None if succession is None else succession.signs_from,
        "alone_from": None if succession is None else succession.ends_at,
    }
