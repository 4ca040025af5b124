"""`atoll site fingerprint | trust | distrust | peers | fingerprints ...` and `accept-rollback --new-key`."""

from pathlib import Path
from typing import Any

import pytest

from atoll.client.site.peers import PeersFile
from atoll.client.site.security import SiteSecurity
from atoll.protocol.secure.site_key import shown as grouped
from atoll.server.sessions.session import Fail
from tests.cli.invoking import invoke, ran, refused, shown
from tests.client.policy.test_gate import written
from tests.client.site.sites import Site, mode_of, session, sites_of

OTHER = "0123456789abcdef" * 2


@pytest.fixture
def north(tmp_path: Path) -> Site:
    return Site(tmp_path, "north")


def pinned(site: Site) -> dict[str, str]:
    return dict(PeersFile(site.folder).read().pinned)


def test_the_fingerprint_is_printed_in_groups_to_be_read_out(north: Site) -> None:
    digits = north.security.fingerprint
    assert invoke("site", "fingerprint", "--state", north.folder).stdout == f"north  {grouped(digits)}\n"
    assert len(grouped(digits).split()) == 8
    assert shown("site", "fingerprint", "--state", north.folder, "--json") == {"site": "north", "fingerprint": digits}


@pytest.mark.parametrize(
    "written_as",
    [
        [OTHER],
        [OTHER.upper()],
        grouped(OTHER).split(),
        [grouped(OTHER)],
        ["0123 4567", "89AB cdef", "0123456789abcdef"],
        [f"  {OTHER[:7]}", OTHER[7:]],
    ],
)
def test_a_fingerprint_is_taken_as_people_write_it(north: Site, written_as: list[str]) -> None:
    said = ran("site", "trust", "east", *written_as, "--state", north.folder).stdout
    assert said == f"east is trusted under the fingerprint {grouped(OTHER)}\n"
    assert pinned(north) == {"east": OTHER}


@pytest.mark.parametrize(
    ("name", "fingerprint", "faults"),
    [
        ("east", [OTHER[:-1]], ["has 31 characters"]),
        ("east", [OTHER, "0"], ["has 33 characters"]),
        ("east", ["g" * 32], ["hexadecimal digits"]),
        ("east", [""], ["has 0 characters"]),
        ("ea/st", ["x"], ["name 'ea/st'", "has 1 character "]),
        ("north", [OTHER], ["north is this site itself"]),
    ],
)
def test_what_is_no_name_or_fingerprint_is_refused_all_at_once(
    north: Site, name: str, fingerprint: list[str], faults: list[str]
) -> None:
    found = refused("site", "trust", name, *fingerprint, "--state", north.folder)
    assert len(found) == len(faults)
    assert all(fault in sentence for fault, sentence in zip(faults, found, strict=True))
    assert not (north.folder / "peers.json").exists()


def test_two_names_with_one_fingerprint_are_refused(north: Site) -> None:
    ran("site", "trust", "east", OTHER, "--state", north.folder)
    (fault,) = refused("site", "trust", "sybil", OTHER, "--state", north.folder)
    assert "east and sybil have one fingerprint" in fault
    assert pinned(north) == {"east": OTHER}


def test_trust_and_distrust_are_listed_and_in_the_log_of_decisions(north: Site) -> None:
    ran("site", "trust", "east", OTHER, "--state", north.folder)
    ran("site", "distrust", "west", "--state", north.folder)
    peers = shown("site", "peers", "--state", north.folder, "--json")
    assert [(row["site"], row["standing"], row["fingerprint"]) for row in peers] == [
        ("east", "pinned", OTHER),
        ("west", "distrusted", None),
    ]
    table = invoke("site", "peers", "--state", north.folder).stdout
    assert f"east  pinned      {grouped(OTHER)}  -" in table
    ran("site", "distrust", "east", "--state", north.folder)
    replaced = ran("site", "trust", "west", OTHER, "--state", north.folder)
    assert pinned(north) == {"west": OTHER}
    assert "before" not in replaced.stderr
    changed = ran("site", "trust", "west", OTHER[::-1], "--state", north.folder)
    assert f"before, it was {grouped(OTHER)}" in changed.stderr
    of_people = [line for line in written(north.folder) if line["role"] == "local"]
    assert [(line["action"], line["object"]) for line in of_people] == [
        ("site.trusted", "east"),
        ("site.distrusted", "west"),
        ("site.distrusted", "east"),
        ("site.trusted", "west"),
        ("site.trusted", "west"),
    ]


def test_a_running_agent_follows_at_once(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3)
    ran("site", "distrust", "site-1", "--state", sites[0].folder)
    assert isinstance(session(sites).outcome, Fail)
    ran("site", "trust", "site-1", sites[1].security.fingerprint, "--state", sites[0].folder)
    assert not isinstance(session(sites, attempt=2).outcome, Fail)


def test_a_damaged_file_of_peers_is_neither_read_nor_replaced(north: Site) -> None:
    path = north.folder / "peers.json"
    path.write_text('{"pinned": {"east": "12"}, "distrusted": []}')
    for command in (("trust", "east", OTHER), ("distrust", "east"), ("peers",)):
        (fault,) = refused("site", *command, "--state", north.folder)
        assert "pinned.east" in fault
        assert "32 lower-case hexadecimal digits" in fault
        assert "atoll site trust" in fault
    assert '"12"' in path.read_text()


# ------------------------------------------------------------ lists


def test_a_federation_exchanges_one_list_and_every_site_finds_it_right(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3)
    out = tmp_path / "list"
    exported = shown("site", "fingerprints", "export", out, "--state", sites[0].folder, "--json")
    assert exported["sites"] == {site.name: site.security.fingerprint for site in sites}
    for site in sites:
        assert shown("site", "fingerprints", "check", out, "--state", site.folder, "--json") == exported
    said = ran("site", "fingerprints", "check", out, "--state", sites[1].folder).stdout
    assert said.endswith(f"fingerprint of the list: {grouped(exported['fingerprint'])}\n")
    assert "exists already" in refused("site", "fingerprints", "export", out, "--state", sites[1].folder)[0]


def test_a_new_site_imports_the_list(tmp_path: Path) -> None:
    sites, new = sites_of(tmp_path / "old", 3), Site(tmp_path, "new")
    ran("site", "fingerprints", "export", tmp_path / "list", "--state", sites[0].folder)
    missing = refused("site", "fingerprints", "check", tmp_path / "list", "--state", new.folder)
    assert [fault.split()[0] for fault in missing] == ["site-0", "site-1", "site-2", "new"]
    imported = shown("site", "fingerprints", "import", tmp_path / "list", "--state", new.folder, "--json")
    assert imported["new"] == ["site-0", "site-1", "site-2"]
    assert pinned(new) == {site.name: site.security.fingerprint for site in sites}
    again = shown("site", "fingerprints", "import", tmp_path / "list", "--state", new.folder, "--json")
    assert again["new"] == []


def test_a_list_that_differs_anywhere_is_refused_as_a_whole(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 4)
    ran("site", "distrust", "site-3", "--state", sites[0].folder)
    prints = {site.name: site.security.fingerprint for site in sites}
    listed = prints | {"site-0": OTHER, "site-1": OTHER[::-1], "sybil": prints["site-2"], "novel": "0" * 32}
    del listed["site-2"]
    (tmp_path / "list").write_text("".join(f"{name} {digits}\n" for name, digits in listed.items()))
    found = refused("site", "fingerprints", "import", tmp_path / "list", "--state", sites[0].folder)
    assert [fault.split()[0] for fault in found] == ["site-0", "site-1", "site-3", "sybil"]
    assert "site-3 is distrusted here" in found[2]
    assert "has the fingerprint of site-2" in found[3]
    assert pinned(sites[0]) == {name: prints[name] for name in ("site-1", "site-2")}


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["0 sites"]),
        ("# only a comment\n\n", ["0 sites"]),
        ("east\n", ["line 1: fingerprint ''"]),
        (f"east {OTHER}\n\neast {OTHER}\n", ["line 3: east has a line before"]),
        (f"east {OTHER}\nwest {OTHER} # same\n", ["line 2: west has the fingerprint of east"]),
        (f"../x {OTHER}\neast 12\n", ["line 1: name '../x'", "line 2: fingerprint '12'"]),
    ],
)
def test_a_list_that_is_none_is_refused_with_every_line(
    north: Site, tmp_path: Path, text: str, faults: list[str]
) -> None:
    (tmp_path / "list").write_text(text)
    found = refused("site", "fingerprints", "check", tmp_path / "list", "--state", north.folder)
    assert all(fault in sentence for fault, sentence in zip(faults, found, strict=True))


# ------------------------------------------------------------ a new key


def test_a_site_that_was_put_back_gets_a_new_key_which_its_peers_pin_again(tmp_path: Path) -> None:
    sites = sites_of(tmp_path / "sites", 3)
    backup = sites[0].copy(tmp_path / "backup")
    session(sites)
    sites[0].restore(backup)
    sites[0].start()
    assert isinstance(session(sites, run="another").outcome, Fail)
    sites[1].security.remember_peers()
    (row,) = [row for row in peers_of(sites[1]) if row["site"] == "site-0"]
    assert row["forked"]
    assert "two histories" in invoke("site", "peers", "--state", sites[1].folder).stdout

    sites[0].stop()
    before = sites[0].security.fingerprint
    made = shown("site", "accept-rollback", "--new-key", "--state", sites[0].folder, "--json")
    assert (made["site"], made["before"]) == ("site-0", before)
    assert mode_of(sites[0].folder / "identity" / "site.pem") == 0o600
    sites[0].start()
    assert sites[0].security.fingerprint == made["fingerprint"] != before
    assert isinstance(session(sites, run="a-third").outcome, Fail), "not pinned yet"
    for site in sites[1:]:
        ran("site", "trust", "site-0", made["fingerprint"], "--state", site.folder)
    assert not isinstance(session(sites, run="a-fourth").outcome, Fail)
    assert [line["action"] for line in written(sites[0].folder) if line["role"] == "local"] == ["site.new_key"]


def peers_of(site: Site) -> Any:
    return shown("site", "peers", "--state", site.folder, "--json")


def test_promises_bind_under_the_new_key(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3)
    session(sites)
    site = sites[0]
    site.stop()
    ran("site", "accept-rollback", "--new-key", "--state", site.folder)
    site.start()
    assert "signed the survivors of round 1" in site.security.fault(session(sites).terms, "digits-1")  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["key", "missing", "chain"])
def test_what_a_start_refuses_a_new_key_repairs(tmp_path: Path, damage: str) -> None:
    sites = sites_of(tmp_path, 3)
    session(sites)
    site, path = sites[0], sites[0].folder / "identity" / "site.pem"
    match damage:
        case "key":
            path.write_text("damaged")
        case "missing":
            path.unlink()
        case "chain":
            site.gate._history.database.execute("DELETE FROM promises WHERE number = 1")
    with pytest.raises(ValueError, match="--new-key"):
        site.start()
    site.stop()
    ran("site", "accept-rollback", "--new-key", "--state", site.folder)
    site.start()
    assert site.security.joins
    terms = session(sites, round=1, attempt=1).terms
    assert site.security.fault(terms, "digits-1"), "what can be read still binds"  # type: ignore[arg-type]


def test_the_new_key_needs_the_agents_end_and_one_of_two_words(tmp_path: Path, north: Site) -> None:
    from contextlib import closing

    from atoll.client.disk.state_directory import StateDirectory

    with closing(StateDirectory(north.folder)):
        (fault,) = refused("site", "accept-rollback", "--new-key", "--state", north.folder)
    assert "in use by another agent" in fault
    for words in ((), ("digits-1", "--new-key")):
        (fault,) = refused("site", "accept-rollback", *words, "--state", north.folder)
        assert "either a RUN" in fault
    assert SiteSecurity("north", north.folder, north.gate, north.keeper).fingerprint == north.security.fingerprint
