"""`atoll site fingerprint | trust | distrust | peers | fingerprints ...`: the sites with which a site joins a sum."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options
from atoll.cli.group import Commands
from atoll.cli.members.site import State
from atoll.cli.printing import as_json, note, say, table
from atoll.ground.printable import count_of
from atoll.operations.faults import CommandError
from atoll.operations.sites import agent_folder, peers_at

if TYPE_CHECKING:
    from atoll.client.site.peers import Change

fingerprints = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Write, check and import a list of the fingerprints of a whole federation.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the other site's client.")]
Digits = Annotated[
    list[str],
    typer.Argument(
        metavar="FINGERPRINT",
        help="Its fingerprint, as its operator reads it out: 32 hexadecimal digits, with or without spaces, in either "
        "case.",
    ),
]
ListFile = Annotated[Path, typer.Argument(metavar="FILE", help="The list: a line with name and fingerprint for each.")]


def fingerprint(state: State = None, json: options.Json = False) -> None:
    """Print this site's fingerprint, to be read out to the operators of the other sites.

    It is that of the key by which other sites know this one in secure sums. The agent makes the key at its first start.
    """
    from atoll.client.site.own_key import fingerprint_in, name_in
    from atoll.protocol.secure.site_key import shown

    folder = agent_folder(state)
    name, digits = name_in(folder), fingerprint_in(folder)
    if json:
        as_json({"site": name, "fingerprint": digits})
        return
    say(f"{name}  {shown(digits)}")


def trust(name: Name, fingerprint: Digits, state: State = None, json: options.Json = False) -> None:
    """Trust another site in secure sums: pin its fingerprint, as its operator has read it out.

    Not as a coordinator has sent it, which could then put a site of its own in the place of that one. It replaces a
    fingerprint that was pinned before, and takes back `atoll site distrust`. A running agent follows at once.
    """
    from atoll.client.site.own_key import name_in
    from atoll.client.site.peers import fingerprint_of
    from atoll.operations.local_audit import record_at_site
    from atoll.protocol.identity.names import NAME_ALLOWED, is_name
    from atoll.protocol.secure.site_key import shown
    from atoll.protocol.settings import short

    folder, faults, digits = agent_folder(state), [], ""
    if not is_name(name):
        faults.append(f"name {short(name)}; allowed: {NAME_ALLOWED}")
    try:
        digits = fingerprint_of(" ".join(fingerprint))
    except ValueError as fault:
        faults.append(str(fault))
    if faults:
        raise CommandError(*faults)
    if name == name_in(folder):
        raise CommandError(f"{name} is this site itself; allowed: the other sites: they trust it with this command")
    with _changing(folder) as change:
        before = change.peers.pinned.get(name, "")
        change.peers = change.peers.trusting({name: digits})
    record_at_site(folder, "site.trusted", name, f"fingerprint {shown(digits)}")
    if json:
        as_json({"site": name, "standing": "pinned", "fingerprint": digits})
        return
    say(f"{name} is trusted under the fingerprint {shown(digits)}")
    if before not in ("", digits):
        note(f"before, it was {shown(before)}: its operator should have told you of a new key")


def distrust(name: Name, state: State = None, json: options.Json = False) -> None:
    """Distrust another site: this one joins no secure sum with it, whatever the policy's `trust` says.

    `atoll site trust` takes it back. A running agent follows at the next sum.
    """
    from atoll.operations.local_audit import record_at_site
    from atoll.protocol.identity.names import NAME_ALLOWED, is_name
    from atoll.protocol.settings import short

    folder = agent_folder(state)
    if not is_name(name):
        raise CommandError(f"name {short(name)}; allowed: {NAME_ALLOWED}")
    with _changing(folder) as change:
        change.peers = change.peers.distrusting(name)
    record_at_site(folder, "site.distrusted", name, "")
    if json:
        as_json({"site": name, "standing": "distrusted", "fingerprint": None})
        return
    say(f"{name} is distrusted: no secure sum with it is joined")


def peers(state: State = None, json: options.Json = False) -> None:
    """List the sites that are pinned or distrusted here, and what this one has seen of their sessions.

    `sessions` is the highest number of sessions that a pinned key has shown to this site; `two histories`:
    it has shown others later, so its state was put back, and it is refused until its operator makes a new key with
    `atoll site accept-rollback --new-key`, which is then pinned.
    """
    rows = peers_at(agent_folder(state))
    if json:
        as_json(rows)
        return
    from atoll.protocol.secure.site_key import shown

    table(
        ["site", "standing", "fingerprint", "sessions"],
        [
            (
                row["site"],
                row["standing"],
                shown(row["fingerprint"] or ""),
                "two histories" if row["forked"] else row["sessions"],
            )
            for row in rows
        ],
        empty="no site is pinned or distrusted here yet: `atoll site trust NAME FINGERPRINT`",
    )


# ---------------------------------------------------------------- lists


@fingerprints.command("export")
def export_list(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The list, a new file.")],
    state: State = None,
    json: options.Json = False,
) -> None:
    """Write the fingerprints of this site and of those that are pinned here into a list.

    The fingerprint of the list is equal for equal lists, so operators compare two lists by reading out one line.
    """
    from atoll.client.site.fingerprint_list import list_text

    known = _all_here(agent_folder(state))
    with out.open("x") as file:
        file.write(list_text(known))
    _say_list(known, f"{out} has {count_of(len(known), 'site')}", json)


@fingerprints.command("check")
def check_list(file: ListFile, state: State = None, json: options.Json = False) -> None:
    """Check a list against this site: each of its fingerprints is pinned here, and each that is pinned is in it.

    It changes nothing; every difference is named. Exit code 2 if there is any.
    """
    listed, here = _read_list(file), _all_here(folder := agent_folder(state))
    faults = [*_differences(listed, here, _distrusted(folder)), *_missing(file, listed, here)]
    if faults:
        raise CommandError(*faults)
    _say_list(listed, f"{file} has the {count_of(len(listed), 'site')} that this site knows, itself among them", json)


@fingerprints.command("import")
def import_list(file: ListFile, state: State = None, json: options.Json = False) -> None:
    """Pin every site of a list that is not pinned here yet.

    Compare the fingerprint of the list with its author first, by telephone. A list that differs from what is pinned, or
    names a distrusted site, is refused as a whole.
    """
    from atoll.operations.local_audit import record_at_site
    from atoll.protocol.secure.site_key import shown

    listed, folder = _read_list(file), agent_folder(state)
    if faults := _differences(listed, here := _all_here(folder), _distrusted(folder)):
        raise CommandError(*faults)
    new = {name: digits for name, digits in listed.items() if name not in here}
    with _changing(folder) as change:
        change.peers = change.peers.trusting(new)
    for name, digits in sorted(new.items()):
        record_at_site(folder, "site.trusted", name, f"fingerprint {shown(digits)}")
    _say_list(listed, f"{count_of(len(new), 'site is', 'sites are')} pinned from {file}", json, new=sorted(new))


def _read_list(file: Path) -> dict[str, str]:
    from atoll.client.site.fingerprint_list import BYTES_MAX, parse_list

    with file.open("rb") as stream:
        return parse_list(stream.read(BYTES_MAX + 1), file)


def _all_here(folder: Path) -> dict[str, str]:
    """Return the fingerprints of this site and of its pinned peers."""
    from atoll.client.site.own_key import fingerprint_in, name_in
    from atoll.client.site.peers import PeersFile

    return {**PeersFile(folder).read().pinned, name_in(folder): fingerprint_in(folder)}


def _distrusted(folder: Path) -> frozenset[str]:
    from atoll.client.site.peers import PeersFile

    return PeersFile(folder).read().distrusted


def _differences(listed: dict[str, str], here: dict[str, str], distrusted: frozenset[str]) -> list[str]:
    """Return a sentence for each site that is another in the list than here."""
    from atoll.protocol.secure.site_key import shown

    owners = {digits: name for name, digits in here.items()}
    faults = []
    for name, digits in sorted(listed.items()):
        if name in distrusted:
            faults.append(f"{name} is distrusted here; allowed: sites that are not: `atoll site trust` takes it back")
        elif here.get(name, digits) != digits:
            faults.append(
                f"{name} is {shown(digits)} in the list and {shown(here[name])} here: ask its operator which is right"
            )
        elif owners.get(digits, name) != name:
            faults.append(f"{name} has the fingerprint of {owners[digits]} in the list; allowed: one site for each")
    return faults


def _missing(file: Path, listed: dict[str, str], here: dict[str, str]) -> list[str]:
    """Return a sentence for each site that only one of list and site has."""
    add = f"compare its fingerprint with its operator, then `atoll site fingerprints import {file}`"
    only_there = [f"{name} is not pinned here: {add}" for name in sorted(listed.keys() - here.keys())]
    only_here = [f"{name} is pinned here and not in {file}" for name in sorted(here.keys() - listed.keys())]
    return only_there + only_here


def _say_list(listed: dict[str, str], what: str, json: bool, **fields: object) -> None:
    from atoll.client.site.fingerprint_list import list_fingerprint
    from atoll.protocol.secure.site_key import shown

    digits = list_fingerprint(listed)
    if json:
        as_json({"sites": listed, "fingerprint": digits, **fields})
        return
    say(f"{what}; fingerprint of the list: {shown(digits)}")


@contextmanager
def _changing(folder: Path) -> "Iterator[Change]":
    from atoll.client.site.peers import PeersFile

    with PeersFile(folder).changing() as change:
        yield change
