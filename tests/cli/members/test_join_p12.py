"""`atoll join --p12`: the file for a browser, of a credential that is here."""

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.serialization import pkcs12

from atoll.protocol.identity.certificates import read_certificates
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.enrolling import Place
from atoll.protocol.identity.names import Identity, Role
from atoll.server.identity.authority import Authority
from tests.cli.invoking import COMMAND, faults_in, refused

PASSPHRASE = "correct horse ü"


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    """The folder of an operator who has joined."""
    folder = tmp_path / "olga"
    Authority.open_or_create(tmp_path / "authority", "test", 1e6).credential(Identity(Role.OPERATOR, "olga")).store(
        folder
    )
    Place("127.0.0.1:1", "127.0.0.1:2", "00").store(folder)
    return folder


def joined(identity: Path, file: Path, answer: str) -> Result:
    given = ["join", "--p12", str(file), "--identity", str(identity)]
    return CliRunner().invoke(COMMAND, given, input=answer)


def test_it_has_key_certificate_and_authority_for_its_owner_alone(identity: Path, tmp_path: Path) -> None:
    file = tmp_path / "olga.p12"
    result = joined(identity, file, f"{PASSPHRASE}\n")
    assert result.exit_code == 0, result.output
    assert "operator olga at 127.0.0.1:2" in result.stdout
    assert PASSPHRASE not in result.output
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []
    stored = Credential.load(identity)
    key, certificate, authorities = pkcs12.load_key_and_certificates(file.read_bytes(), PASSPHRASE.encode())
    assert key is not None
    assert key.private_numbers() == stored.key.private_numbers()  # type: ignore[union-attr]
    assert certificate == read_certificates(stored.certificate_pem)[0]
    assert authorities == list(read_certificates(stored.ca_pem))
    with pytest.raises(ValueError, match="password"):
        pkcs12.load_key_and_certificates(file.read_bytes(), b"another one")
    if shutil.which("openssl"):
        command = ["openssl", "pkcs12", "-in", file, "-nokeys", "-passin", f"pass:{PASSPHRASE}", "-info"]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "operator olga" in told.stdout
        assert "PBES2" in told.stderr, "an old cipher would be weak"
    assert refused("join", "--p12", file, "--identity", identity)[0].startswith(f"--p12: {file} exists already")


@pytest.mark.parametrize(("answer", "why"), [("short\n", "got 5 characters"), ("", "got 0 characters")])
def test_a_short_passphrase_is_refused(identity: Path, tmp_path: Path, answer: str, why: str) -> None:
    result = joined(identity, tmp_path / "x.p12", answer)
    assert result.exit_code == 2
    assert why in faults_in(result.stderr)[0]
    assert not (tmp_path / "x.p12").exists()


def test_mistakes_are_told_before_anything_is_asked(identity: Path, tmp_path: Path) -> None:
    assert "name the join code, or --p12" in refused("join", "--identity", identity)[0]
    both = refused("join", "-", "--p12", tmp_path / "no" / "x.p12", "--identity", identity)
    assert ["standard input" in both[0], "there is no folder" in both[1]] == [True, True]
    (tmp_path / "link.p12").symlink_to(tmp_path / "gone")
    assert "exists already" in refused("join", "--p12", tmp_path / "link.p12", "--identity", identity)[0]
    assert "enrol first" in joined(tmp_path / "none", tmp_path / "x.p12", f"{PASSPHRASE}\n").stderr
