"""The file of a site's key: made once, private, and any other content is refused, never replaced."""

import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.client.site.key_file import FILE, KeyFault, make_site_key, raw_public, read_site_key


def test_a_key_is_private_and_read_back(tmp_path: Path) -> None:
    assert read_site_key(tmp_path) is None
    before = os.umask(0)
    try:
        key = make_site_key(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    found = read_site_key(tmp_path)
    assert found is not None
    assert raw_public(found) == raw_public(key)
    assert os.listdir(tmp_path) == [FILE], "no part is left"


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o777])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    make_site_key(tmp_path)
    (tmp_path / FILE).chmod(mode)
    with pytest.raises(KeyFault, match=f"mode {mode:03o}.*allowed: 600: chmod 600"):
        read_site_key(tmp_path)


def test_a_key_with_a_passphrase_is_refused(tmp_path: Path) -> None:
    locked = serialization.BestAvailableEncryption(b"secret")
    pem = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked
    )
    (tmp_path / FILE).write_bytes(pem)
    (tmp_path / FILE).chmod(0o600)
    with pytest.raises(KeyFault, match="no passphrase"):
        read_site_key(tmp_path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), at=st.integers(0, 200), cut=st.booleans())
def test_any_other_bytes_are_a_key_or_one_sentence_without_a_secret(
    tmp_path: Path, content: bytes, at: int, cut: bool
) -> None:
    path = tmp_path / FILE
    path.unlink(missing_ok=True)
    make_site_key(tmp_path)
    good = path.read_bytes()
    damaged = good[:at] if cut else good[:at] + content + good[at + len(content) :]
    path.write_bytes(damaged)
    try:
        read_site_key(tmp_path)
    except KeyFault as fault:
        (sentence,) = fault.faults
        assert FILE in sentence
        assert "accept-rollback --new-key" in sentence
        assert good.splitlines()[1].decode() not in sentence
    assert path.read_bytes() == damaged
