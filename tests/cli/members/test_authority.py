"""The authority's key on a machine of its own, by request and answer files: as the docs tell it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from atoll.protocol.identity.certificates import Issuer, make_request, new_key, to_pem
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.enrolling import Place
from atoll.protocol.identity.names import COORDINATOR, Identity, Role
from atoll.server.identity.authority_server import LOG
from tests.cli.invoking import COMMAND


def atoll(*arguments: object) -> Result:
    return CliRunner().invoke(COMMAND, [str(argument) for argument in arguments])


def test_a_coordinator_elsewhere_gets_a_certificate_and_its_key_never_leaves_it(tmp_path: Path) -> None:
    made = atoll("authority", "init", tmp_path / "ca")
    assert made.exit_code == 0, made.output
    shown = json.loads(atoll("authority", "show", tmp_path / "ca", "--json").stdout)
    assert shown["fingerprint"] in made.output
    mine, request, answer = tmp_path / "mine", tmp_path / "request", tmp_path / "answer"
    assert atoll("authority", "request", mine, "--out", request).exit_code == 0
    how = ("--role", "coordinator", "--request", request, "--out", answer)
    assert atoll("authority", "issue", tmp_path / "ca", "main", *how).exit_code == 0
    for carried in (request, answer):
        assert b"PRIVATE" not in carried.read_bytes()
    assert atoll("authority", "install", mine, answer).exit_code == 0
    assert Credential.load(mine).identity == COORDINATOR
    [entry] = [json.loads(line) for line in (tmp_path / "ca" / LOG).read_text().splitlines()]
    assert (entry["identity"], entry["why"]) == (COORDINATOR.uri, "by hand")


def test_a_person_with_a_certificate_by_hand_says_where_the_coordinator_is(tmp_path: Path) -> None:
    mine, request, answer = tmp_path / "mine", tmp_path / "request", tmp_path / "answer"
    atoll("authority", "init", tmp_path / "ca")
    atoll("authority", "request", mine, "--out", request)
    atoll("authority", "issue", tmp_path / "ca", "olga", "--role", "operator", "--request", request, "--out", answer)
    assert atoll("authority", "install", mine, answer, "--admin", "atoll.example.org:7072").exit_code == 0
    assert Credential.load(mine).identity == Identity(Role.OPERATOR, "olga")
    assert Place.load(mine).admin_address == "atoll.example.org:7072"


def test_a_first_owner_is_made_at_the_authority(tmp_path: Path) -> None:
    atoll("authority", "init", tmp_path / "ca")
    out = tmp_path / "ann"
    assert atoll("authority", "issue", tmp_path / "ca", "ann", "--role", "owner", "--out", out).exit_code == 0
    assert Credential.load(out).identity == Identity(Role.OWNER, "ann")


def test_no_credential_replaces_an_authority_or_that_of_another_identity(tmp_path: Path) -> None:
    ca, joe, request, answer = (tmp_path / name for name in ("ca", "joe", "request", "answer"))
    atoll("authority", "init", ca)
    assert atoll("authority", "issue", ca, "joe", "--out", joe).exit_code == 0
    atoll("authority", "request", joe, "--out", request)
    atoll("authority", "issue", ca, "ann", "--request", request, "--out", answer)
    kept = [(folder / "key.pem").read_bytes() for folder in (ca, joe)]
    signed = (ca / LOG).read_bytes()
    for arguments, says in (
        (("issue", ca, "joe", "--out", ca), f"{ca} holds an authority, whose key would be lost"),
        (("request", ca, "--out", tmp_path / "other"), f"{ca} holds an authority, whose key would be lost"),
        (("issue", ca, "ann", "--out", joe), f"{joe} holds the credential of client joe: name another folder"),
        (("install", joe, answer), f"{joe} holds the credential of client joe: name another folder"),
    ):
        refused = atoll("authority", *arguments)
        assert (refused.exit_code, says in refused.output) == (2, True), refused.output
    assert [(folder / "key.pem").read_bytes() for folder in (ca, joe)] == kept
    assert (ca / LOG).read_bytes() == signed
    assert atoll("authority", "issue", ca, "joe", "--out", joe).exit_code == 0


def test_the_credential_of_a_member_is_no_authority(tmp_path: Path) -> None:
    atoll("authority", "init", tmp_path / "ca")
    atoll("authority", "issue", tmp_path / "ca", "joe", "--out", tmp_path / "joe")
    for command in (("show",), ("issue", "ann", "--out", tmp_path / "ann")):
        refused = atoll("authority", command[0], tmp_path / "joe", *command[1:])
        assert refused.exit_code == 2
        assert "holds no authority, but the credential of a member" in refused.output
    assert not (tmp_path / "ann").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "nowhere"), "holds no authority"),
        (("init", "ca"), "holds an authority already"),
        (("issue", "ca", "no/name", "--out", "x"), "allowed are 1 to 64 letters"),
        (("issue", "ca", "A", "--role", "aggregator", "--out", "x"), "allowed are a-z"),
        (("issue", "ca", "a", "--request", "noise", "--out", "x"), "no certificate request"),
        (("issue", "ca", "a", "--request", "missing", "--out", "x"), "missing"),
        (("install", "mine", "noise"), "no certificates in PEM"),
        (("install", "mine", "alone"), "is not the answer to a request of mine"),
        (("install", "mine", "alone", "--admin", "nowhere"), "'nowhere' is not an address; allowed: HOST:PORT"),
        (("serve", "ca", "--coordinator", "somewhere"), "allowed: HOST:PORT, port"),
    ],
)
def test_an_impossible_request_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    atoll("authority", "init", "ca")
    Path("noise").write_bytes(make_request(new_key())[:-1])
    Path("alone").write_bytes(to_pem(Issuer.create("x", now=1e9).certificate))
    refused = atoll("authority", *arguments)
    assert refused.exit_code == 2, refused.output
    assert says in refused.output
    assert not Path("x").exists()


def test_all_mistakes_of_an_installation_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("noise").write_bytes(b"noise")
    refused = atoll("authority", "install", "mine", "noise", "--admin", "nowhere")
    assert refused.exit_code == 2
    address, certificates = refused.output.splitlines()
    assert "'nowhere' is not an address; allowed: HOST:PORT" in address
    assert "no certificates in PEM" in certificates


@pytest.mark.parametrize("name", ["x" * 65, "\u00fc" * 33, "two\nlines", "\udcff"])
def test_a_name_that_no_certificate_can_have_is_refused(tmp_path: Path, name: str) -> None:
    """It was a traceback."""
    done = atoll("authority", "init", tmp_path / "ca", "--name", name)
    assert (done.exit_code, "allowed: 1 to 64 bytes of UTF-8" in done.stderr) == (2, True)
    assert not (tmp_path / "ca").exists()
    atoll("authority", "init", tmp_path / "ca", "--name", "\u00fc" * 32)
    done = atoll("authority", "replace", tmp_path / "ca", "--name", name)
    assert (done.exit_code, "allowed: 1 to 64 bytes of UTF-8" in done.stderr) == (2, True)
    assert not (tmp_path / "ca" / "next").exists()
