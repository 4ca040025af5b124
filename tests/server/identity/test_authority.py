from pathlib import Path

import pytest

from atoll.protocol.identity.certificates import CertificateError, make_request, new_key, read_leaf
from atoll.protocol.identity.credential import CredentialError
from atoll.protocol.identity.names import Identity, Role
from atoll.server.identity.authority import Authority

MAIN = Identity(Role.COORDINATOR, "main")


def test_an_authority_is_made_once_and_opened_afterwards(tmp_path: Path) -> None:
    made = Authority.open_or_create(tmp_path / "authority", "Atoll")
    opened = Authority.open_or_create(tmp_path / "authority", "Atoll")
    assert opened.ca_pem == made.ca_pem
    assert (tmp_path / "authority" / "key.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CredentialError, match="holds an authority already"):
        Authority.create(tmp_path / "authority", "another")


def test_what_it_signs_belongs_together(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "Atoll", lifetime_s=50)
    credential = authority.credential(MAIN)
    assert credential.identity == MAIN
    assert credential.leaf.expires_at - credential.leaf.issued_at == pytest.approx(50, abs=1)
    key = new_key()
    assert read_leaf(authority.issue(make_request(key), MAIN)).identity == MAIN
    with pytest.raises(CertificateError):
        authority.issue(b"no request", MAIN)


def test_one_that_was_cut_while_it_was_made_is_made_anew(tmp_path: Path) -> None:
    Authority.create(tmp_path, "Atoll")
    (tmp_path / "key.pem").unlink()
    assert Authority.open_or_create(tmp_path, "Atoll").credential(MAIN).identity == MAIN


def test_a_certificate_of_somebody_else_is_never_deleted_to_make_one(tmp_path: Path) -> None:
    theirs = Authority.create(tmp_path / "ca", "Atoll").credential(MAIN).certificate_pem
    (tmp_path / "certificate.pem").write_bytes(theirs)
    with pytest.raises(CredentialError, match=r"certificate\.pem is not an authority's: name another directory"):
        Authority.open_or_create(tmp_path, "Atoll")
    assert (tmp_path / "certificate.pem").read_bytes() == theirs


def test_what_is_wrong_with_its_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialError, match=r"there is no .*key\.pem"):
        Authority.open(tmp_path)
    Authority.create(tmp_path, "Atoll")
    (tmp_path / "key.pem").chmod(0o644)
    with pytest.raises(CredentialError, match="may be read by others"):
        Authority.open(tmp_path)
    (tmp_path / "key.pem").chmod(0o600)
    other = Authority.create(tmp_path / "other", "Atoll")
    (tmp_path / "certificate.pem").write_bytes(other.ca_pem)
    with pytest.raises(CredentialError, match="is not the key of"):
        Authority.open(tmp_path)
    (tmp_path / "certificate.pem").write_bytes(b"nothing")
    with pytest.raises(CredentialError, match="no certificates in PEM"):
        Authority.open(tmp_path)
