"""A site's part in secure sums: its key, whom it trusts, what it has promised, and that every fault allows nothing."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.client.policy.decide import Rule
from atoll.client.policy.history import NAME
from atoll.client.site.key_file import FILE, read_site_key
from atoll.client.site.own_key import replace_site_key
from atoll.client.site.peers import PeersFile
from atoll.client.work.secure_sums import SecureSums
from atoll.protocol.identity.certificates import Issuer, to_pem
from atoll.protocol.identity.names import Role
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.secure.messages import Chain, MemberKeys
from atoll.protocol.secure.site_key import certify, check_certified, fingerprint
from atoll.protocol.secure.terms import ranges_digest
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import Digest, RunId, Version
from atoll.server.sessions.session import Fail
from tests.client.policy.test_gate import invitation
from tests.client.site.sites import CA, NOW, PINNED, Site, credential, mode_of, session, sites_of
from tests.server.sessions.small_federation import SmallFederation, privacy_of, terms_of

RUN = RunId("digits-1")
FEDERATION = '[secure]\ntrust = "authority"\n'


def reasons(federation: SmallFederation) -> str:
    assert isinstance(federation.outcome, Fail)
    return "\n".join(federation.reasons.values())


def test_the_first_start_makes_a_key_that_only_its_owner_reads_and_a_restart_keeps_it(tmp_path: Path) -> None:
    site = Site(tmp_path, "north")
    path = site.folder / "identity" / FILE
    assert mode_of(path) == 0o600
    first, made = site.security.fingerprint, path.read_bytes()
    site.start()
    assert (site.security.fingerprint, path.read_bytes()) == (first, made)
    assert Site(tmp_path, "east").security.fingerprint != first
    check_certified(site.security.identity, "north", to_pem(CA.certificate), NOW)


def test_a_renewed_certificate_certifies_the_same_key(tmp_path: Path) -> None:
    site = Site(tmp_path, "north")
    before = site.security.identity
    assert site.security.identity is before, "signed once for each certificate"
    assert site.keeper is not None
    site.keeper.replace(renewed := credential("north"))
    after = site.security.identity
    assert (after.key, after.certificate) == (before.key, renewed.certificate_pem)
    check_certified(after, "north", to_pem(CA.certificate), NOW)


@pytest.mark.parametrize("policy", [PINNED, FEDERATION])
def test_sites_that_trust_each_other_open_the_sum_and_have_a_line_for_each_step(tmp_path: Path, policy: str) -> None:
    sites = sites_of(tmp_path, 4, policy)
    federation = session(sites)
    total, survivors = federation.outcome
    assert survivors == [site.name for site in sites]
    assert np.array_equal(total, sum(federation.vectors.values()))
    for site in sites:
        assert [line["action"] for line in site.lines("secure")] == ["secure.joined", "secure.signed"]
        assert {line["object"] for line in site.lines("secure")} == {"round 1, attempt 1, session 0"}


def test_an_insecure_agent_joins_no_session_and_has_no_key(tmp_path: Path) -> None:
    site = Site(tmp_path, "north")
    (site.folder / "identity" / FILE).unlink()
    site.start(keeper=False)
    assert not site.security.joins
    assert not site.security.fingerprint
    assert "--insecure" in site.security.fault(terms_of(), RUN)


# ------------------------------------------------------------ whom a site trusts


def test_a_site_whose_key_is_not_pinned_is_in_no_sum(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3)
    with PeersFile(sites[0].folder).changing() as change:
        change.peers = replace(change.peers, pinned={"site-1": sites[1].security.fingerprint})
    said = reasons(session(sites))
    assert "site-2 is not pinned here" in said
    assert "atoll site trust" in said


def test_another_certified_key_under_a_pinned_name_is_refused(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3)
    with PeersFile(sites[0].folder).changing() as change:
        change.peers = change.peers.trusting({"site-2": "0123456789abcdef" * 2})
    said = reasons(session(sites))
    assert "the site key of site-2 is " in said
    assert "pinned here is 0123 4567 89ab cdef 0123 4567 89ab cdef" in said


def test_by_the_authority_a_pin_still_binds_and_a_distrusted_site_stays_out(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3, FEDERATION)
    peers = PeersFile(sites[0].folder)
    with peers.changing() as change:
        change.peers = change.peers.distrusting("site-2")
    assert "site-2 is distrusted here" in reasons(session(sites))
    with peers.changing() as change:
        change.peers = change.peers.trusting({"site-2": "0123456789abcdef" * 2})
    assert "pinned here is 0123" in reasons(session(sites, round=2))


def keys_of(peer: Site, **changes: Any) -> MemberKeys:
    end = Chain(0, bytes(32))
    return replace(MemberKeys(peer.name, b"", b"", b"", b"", end, peer.security.identity), **changes)


def trust_of(site: Site) -> Any:
    return site.member(terms_of())._trust


def test_a_pinned_key_must_be_certified_too_by_its_client_and_this_authority(tmp_path: Path) -> None:
    north, east, south = sites_of(tmp_path, 3, FEDERATION)
    trust = trust_of(north)
    trust(keys_of(east))
    key = east.security.identity.key
    forged = {
        "of another name": keys_of(south, name=east.name),
        "not signed by the certificate's key": keys_of(
            east, site=replace(east.security.identity, certification=b"none")
        ),
        "of an operator": keys_of(east, site=_certified(key, east.name, Role.OPERATOR)),
        "of another authority": keys_of(east, site=_certified(key, east.name, authority=Issuer.create("x", now=NOW))),
        "expired": keys_of(east, site=_certified(key, east.name, now=NOW - 2e6)),
        "cut": keys_of(east, site=replace(east.security.identity, certificate=b"none")),
    }
    for keys in forged.values():
        with pytest.raises(NotTrusted):
            trust_of(north)(keys)


def _certified(key: bytes, name: str, role: Role = Role.CLIENT, **fields: Any) -> Any:
    made = credential(name, role, **fields)
    return certify(name, key, made.key, made.certificate_pem)


def test_one_site_under_two_names_counts_once(tmp_path: Path) -> None:
    north, east = sites_of(tmp_path, 2, FEDERATION)
    trust = trust_of(north)
    for twice in (keys_of(east), keys_of(east)):
        trust(twice)
    with pytest.raises(NotTrusted, match="site-1 and sybil have one site key"):
        trust(keys_of(east, name="sybil", site=_certified(east.security.identity.key, "sybil")))
    with pytest.raises(NotTrusted, match="site-0 and sybil"):
        trust(keys_of(east, name="sybil", site=_certified(north.security.identity.key, "sybil")))


def test_a_peer_that_is_distrusted_while_the_agent_runs_is_out_at_once(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3)
    assert not isinstance(session(sites).outcome, Fail)
    with PeersFile(sites[1].folder).changing() as change:
        change.peers = change.peers.distrusting("site-0")
    assert "site-0 is distrusted" in reasons(session(sites, round=2))


# ------------------------------------------------------------ which terms it accepts


@pytest.mark.parametrize(
    ("policy", "terms", "said"),
    [
        ("min_others = 5", {"members_max": 5}, "at most 5 sites; this site demands 6, by min_others = 5"),
        ("min_others = 5", {"members_max": 6}, ""),
        ("", {"members_max": 3}, ""),
        ("", {"threshold": "2"}, "threshold '2' fits no size of a sum, 3 to 64"),
        ("colluders_max = 0", {"threshold": "2", "members_max": 3}, ""),
        ("colluders_max = 1", {"threshold": "2", "members_max": 3}, "colluders_max = 1"),
        ("colluders_max = 2", {"threshold": "3", "members_max": 3}, ""),
        ("colluders_max = 3", {"threshold": "3", "members_max": 3}, "colluders_max = 3"),
        ("min_others = 4", {"threshold": "3", "members_max": 9}, "fits no size of a sum, 5 to 9"),
        ("colluders_max = 40", {}, "colluders_max = 40"),
        ("colluders_max = 20", {}, ""),
        (
            "colluders_max = 2",
            {"privacy": privacy_of(3, 1).text()},
            "noise that suffices against 1 colluder; this site demands 2",
        ),
        ("colluders_max = 2", {"privacy": privacy_of(3, 2).text()}, ""),
        ("colluders_max = 1", {"privacy": privacy_of(0, 0, noise_by="coordinator").text()}, ""),
        ("", {"run": "other"}, "terms of run 'other' in an invitation of run 'digits-1'"),
    ],
)
def test_terms_are_accepted_if_a_sum_is_possible_that_the_policy_allows(
    tmp_path: Path, policy: str, terms: dict[str, Any], said: str
) -> None:
    site = Site(tmp_path, "north", f"[secure]\n{policy}\n")
    found = site.security.fault(terms_of(**terms), RUN)
    assert (said in found) if said else not found
    if "run" not in terms:
        asked = site.gate.ask(invitation(secure=terms_of(**terms), local="{}"))
        assert (asked.rule is Rule.SECURE, said in asked.detail) == (bool(said), True)


def test_a_changed_policy_holds_from_the_next_question_on(tmp_path: Path) -> None:
    site = Site(tmp_path, "north", "[secure]\nmin_others = 2\n")
    assert not site.security.fault(terms_of(members_max=3), RUN)
    assert (site.security.required, site.security.tells_examples) == (False, True)
    site.demand("[secure]\nmin_others = 9\nrequired = true\n")
    assert [site.gate.poll(), site.gate.poll()] == [False, True]
    assert "min_others = 9" in site.security.fault(terms_of(members_max=3), RUN)
    assert (site.security.required, site.security.tells_examples) == (True, False)
    site.demand("[secure]\nmin_others = -1\n")
    site.gate.poll(), site.gate.poll()
    assert "policy is not valid now" in site.security.fault(terms_of(), RUN)


# ------------------------------------------------------------ what it has promised


def test_promises_hold_after_a_restart(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3)
    session(sites)
    site = sites[0]
    for _ in range(2):
        assert "signed the survivors of round 1" in site.security.fault(terms_of(attempt=2), RUN)
        assert "this site has signed" not in site.security.policy_fault(terms_of(attempt=2), RUN)
        assert not site.security.fault(terms_of(round=2), RUN)
        site.start()
    session(sites, round=2)
    assert "base_repeats_max = 2" in site.security.fault(terms_of(round=3), RUN)
    site.demand(PINNED + "base_repeats_max = 3\n")
    site.start()
    assert not site.security.fault(terms_of(round=3), RUN)


def test_a_restored_backup_is_refused_by_its_peers_until_they_pin_a_new_key(tmp_path: Path) -> None:
    sites = sites_of(tmp_path / "sites", 3)
    backup = sites[0].copy(tmp_path / "backup")
    assert not isinstance(session(sites).outcome, Fail)
    sites[0].restore(backup)
    sites[0].start()
    said = "the promises of site-0 are others than this site has seen"
    assert said in reasons(session(sites, run="another"))
    assert said in reasons(session(sites, run="a-third")), "its further ends are new to its peers"
    for site in sites[1:]:
        site.security.log(terms_of(), said)
        site.start()
    assert said in reasons(session(sites, run="a-fourth")), "durable at its peers"


def test_a_session_that_failed_at_the_roster_leaves_no_line_that_says_signed(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3)
    with PeersFile(sites[0].folder).changing() as change:
        change.peers = change.peers.distrusting("site-2")
    federation = session(sites)
    sites[0].security.log(terms_of(), federation.reasons["site-0"])
    assert [line["action"] for line in sites[0].lines("secure")] == ["secure.joined", "secure.left"]
    last = sites[0].lines("secure")[-1]
    assert last["outcome"] == "site-2 is distrusted here, by `atoll site distrust`"
    assert last["digests"]["terms"] == terms_of().digest.hex()


# ------------------------------------------------------------ damage


def nothing_is_allowed(site: Site) -> None:
    decision = site.gate.ask(invitation(task="t", local="{}", message="train"))
    assert decision.rule is Rule.STATE
    assert "damaged" in site.security.fault(terms_of(), RUN)


def test_damaged_files_stop_the_start_all_at_once_with_their_ways_out(tmp_path: Path) -> None:
    site = Site(tmp_path, "north")
    (site.folder / "identity" / FILE).write_text("none")
    (site.folder / "peers.json").write_text("none")
    with pytest.raises(ConfigError) as raised:
        site.start()
    key, peers = sorted(raised.value.faults)
    assert FILE in key
    assert "accept-rollback --new-key" in key
    assert "peers.json" in peers
    assert "atoll site trust" in peers


def test_promises_that_are_gone_are_not_begun_anew_beside_their_key(tmp_path: Path) -> None:
    site = Site(tmp_path, "north")
    site.stop()
    (site.folder / NAME).unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"policy\.db is missing; .* accept-rollback --new-key"):
            site.start()
        assert not (site.folder / NAME).exists()
    before, now = replace_site_key(site.folder)
    assert before != now
    site.start()
    assert site.security.fingerprint == now


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "damaged"),
        (b"x" * 5000, "more than 4096 bytes"),
        (credential("n").key_pem, "another kind"),
        (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "damaged"),
        ("mode", "chmod 600"),
        ("missing", "is missing"),
        ("other", "has the key "),
        ("folder", "is a directory"),
    ],
)
def test_a_key_that_cannot_be_used_is_never_replaced(tmp_path: Path, content: bytes | str, said: str) -> None:
    site = Site(tmp_path, "north")
    path = site.folder / "identity" / FILE
    match content:
        case "mode":
            path.chmod(0o640)
        case "missing":
            path.unlink()
        case "other":
            other = Site(tmp_path, "east").folder / "identity" / FILE
            path.write_bytes(other.read_bytes())
        case "folder":
            path.unlink()
            path.mkdir()
        case _:
            path.write_bytes(content)  # type: ignore[arg-type]
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError, match=said) as raised:
        site.start()
    assert len(raised.value.faults) == 1
    assert "PRIVATE" not in str(raised.value)
    assert (path.read_bytes() if path.is_file() else None) == before


@pytest.mark.parametrize("damage", ["DELETE FROM promises WHERE number = 2", "UPDATE promises SET attempt = 9"])
def test_a_broken_chain_of_promises_allows_nothing(tmp_path: Path, damage: str) -> None:
    sites = sites_of(tmp_path, 3)
    for number in (1, 2):
        session(sites, round=number)
    site = sites[0]
    site.gate._history.database.execute(damage)
    with pytest.raises(ConfigError, match=r"missing or has been changed.*--new-key"):
        site.start()
    assert site.gate.ask(invitation(local="{}")).rule is Rule.STATE


def test_peers_that_are_damaged_while_the_agent_runs_allow_nothing_until_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, "north")
    path = site.folder / "peers.json"
    assert not site.gate.poll()
    path.write_text('{"pinned": {}}')
    assert site.gate.poll()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            nothing_is_allowed(site)
    assert [record.getMessage() for record in caplog.records if str(path) in record.getMessage()] != []
    assert len(caplog.records) == 1, "said once"
    path.write_text('{"pinned": {}, "distrusted": []}')
    assert site.gate.poll()
    assert site.gate.ask(invitation()).is_allowed
    assert not site.security.fault(terms_of(), RUN)


def test_a_promise_that_cannot_be_written_is_not_given(tmp_path: Path) -> None:
    site = Site(tmp_path, "north")
    member = site.member(terms_of())
    (promise, _) = member.start()
    site.gate._history.database.execute("PRAGMA query_only = 1")
    with pytest.raises(OSError, match=NAME):
        site.security.keep(promise.promise)
    assert not site.security.fault(terms_of(), RUN), "nothing was promised, and nothing was sent"
    assert site.lines("secure") == []


# ------------------------------------------------------------ secrets


def test_no_file_but_the_key_and_no_line_has_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        sites = sites_of(tmp_path, 3)
        session(sites)
    for site in sites:
        key = read_site_key(site.folder / "identity")
        assert key is not None
        secret = key.private_bytes_raw()
        pem = (site.folder / "identity" / FILE).read_bytes().splitlines()[1]
        for found in site.folder.rglob("*"):
            if found.is_file() and found.name != FILE:
                content = found.read_bytes()
                assert not any(each in content for each in (secret, secret.hex().encode(), pem)), found
        assert secret.hex() not in caplog.text
        assert pem.decode() not in caplog.text
        assert secret.hex() not in repr(vars(site.security))


def test_the_key_is_from_the_operating_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    prints = set()
    for number in range(3):
        random.seed(0)
        np.random.seed(0)
        prints.add(Site(tmp_path, f"site-{number}").security.fingerprint)
    assert len(prints) == 3
    assert all(len(each) == 32 for each in prints)
    assert fingerprint(bytes(32)) == "66687aadf862bd776c8fc18b8e9f8e20", "sha256sum of 32 zero bytes"


def test_a_training_for_a_sum_too_many_is_declined_with_a_line_that_says_the_way_out(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, 3)
    for number in (1, 2):
        session(sites, round=number)
    site = sites[0]
    of = terms_of(round=3, run=str(RUN), ranges=ranges_digest(()))
    request = invitation(3, task=of.task, secure=of, local=of.local)
    request = replace(request, run_id=RUN, model_digest=Digest(of.model), base_version=Version(of.base))
    stores: Any = SimpleNamespace(
        encoded=SimpleNamespace(entries=dict), spool=None, models=None, work=tmp_path, noise_secret=b""
    )
    told: Any = None
    sums = SecureSums(site.name, stores, site.security, runner=None, send=told, spawn=told, on_event=told)
    fault = sums.objection(request)
    assert "start the run from another seed or model.start, or raise it in this site's policy" in fault
    last = site.lines("secure")[-1]
    assert (last["action"], last["outcome"], last["object"]) == (
        "secure.left",
        fault,
        "round 3, attempt 1, session 0",
    )
    stores.encoded.entries = lambda: {request.key: "its update"}
    assert not sums.objection(request)
