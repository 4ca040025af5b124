import os
from pathlib import Path

import pytest

from atoll.protocol.identity.certificates import Issuer, key_to_pem, new_key, to_pem
from atoll.protocol.identity.credential import Credential, CredentialError, alone_with
from atoll.protocol.identity.names import Identity, Role

NOW = 1_900_000_000.0
CA, OTHER_CA = Issuer.create("one", now=NOW), Issuer.create("two", now=NOW)
NORTH = Identity(Role.CLIENT, "north")


def credential(authority: Issuer = CA, lifetime_s: float = 30.0) -> Credential:
    key = new_key()
    certificate = authority.issue(key.public_key(), NORTH, now=NOW, lifetime_s=lifetime_s)
    return Credential(key_to_pem(key), to_pem(certificate), to_pem(authority.certificate))


def test_what_is_stored_is_loaded_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    mine = credential()
    mine.store(tmp_path / "identity")
    assert Credential.load(tmp_path / "identity") == mine
    assert mine.identity == NORTH
    assert (tmp_path / "identity").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "identity" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path / "identity")) == ["ca.pem", "certificate.pem", "key.pem"]
    assert "PRIVATE" not in repr(mine)


@pytest.mark.parametrize("lifetime_s", [3.0, 240.0, 30 * 86400.0])
def test_it_is_renewed_at_two_thirds_of_its_life_or_a_little_before(lifetime_s: float) -> None:
    mine = credential(lifetime_s=lifetime_s)
    assert mine.renew_at(0.0) == pytest.approx(NOW + lifetime_s * 2 / 3)
    assert NOW + lifetime_s * 0.56 < mine.renew_at(1.0) < mine.renew_at(0.5) < mine.renew_at(0.0)
    assert not mine.is_expired(NOW + lifetime_s - 0.01)
    assert mine.is_expired(NOW + lifetime_s)


class PowerCutError(Exception):
    pass


@pytest.mark.parametrize("authority", [CA, OTHER_CA])
@pytest.mark.parametrize("first", range(1, 7))
@pytest.mark.parametrize("second", range(1, 10))
def test_replacing_is_old_or_new_wherever_it_is_cut_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, second: int, authority: Issuer
) -> None:
    renames, left = os.replace, [0]

    def replace(source: Path, target: Path) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise PowerCutError
        renames(source, target)

    monkeypatch.setattr(os, "replace", replace)
    now_there = CREDENTIALS[0]
    now_there.store(tmp_path)
    for cut, following in ((first, CREDENTIALS[1]), (second, CREDENTIALS[2 if authority is CA else 3])):
        left[0] = cut
        try:
            following.store(tmp_path)
            assert Credential.load(tmp_path) == following
        except PowerCutError:
            assert Credential.load(tmp_path) in (now_there, following)
        now_there = Credential.load(tmp_path)
    left[0] = 0
    CREDENTIALS[0].store(tmp_path)
    assert Credential.load(tmp_path) == CREDENTIALS[0]


CREDENTIALS = [credential(), credential(), credential(), credential(OTHER_CA)]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(CredentialError, match=r"there is no .*key\.pem: enrol first"):
        Credential.load(tmp_path)
    CREDENTIALS[0].store(tmp_path)
    (tmp_path / "key.pem").chmod(0o640)
    with pytest.raises(CredentialError, match=r"may be read by others \(mode 640\): chmod 600"):
        Credential.load(tmp_path)
    (tmp_path / "key.pem").chmod(0o600)
    (tmp_path / "certificate.pem").write_bytes(CREDENTIALS[1].certificate_pem)
    with pytest.raises(CredentialError, match="the certificate is for another key"):
        Credential.load(tmp_path)
    (tmp_path / "certificate.pem").unlink()
    with pytest.raises(CredentialError, match=r"there is no .*certificate\.pem"):
        Credential.load(tmp_path)
    (tmp_path / "key.pem").write_bytes(b"no key")
    with pytest.raises(CredentialError, match=r"key\.pem: no private key in PEM"):
        Credential.load(tmp_path)


def test_a_credential_is_not_made_of_parts_that_do_not_belong_together() -> None:
    mine, foreign = CREDENTIALS[0], CREDENTIALS[3]
    with pytest.raises(CredentialError, match="not signed by this authority"):
        Credential(mine.key_pem, mine.certificate_pem, foreign.ca_pem)
    with pytest.raises(CredentialError, match="no certificates in PEM"):
        Credential(mine.key_pem, b"", mine.ca_pem)


def test_only_one_at_a_time_replaces_a_credential(tmp_path: Path) -> None:
    with alone_with(tmp_path) as first, alone_with(tmp_path) as second:
        assert (first, second) == (True, False)
    with alone_with(tmp_path) as third:
        assert third
