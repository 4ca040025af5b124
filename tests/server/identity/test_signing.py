"""The publisher's key on disk, and the signatures it makes."""

import os
import stat
import time

import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import key_to_pem, new_key
from atoll.protocol.identity.statement import check_publisher, check_signature
from atoll.server.errors import StoreCorrupted
from atoll.server.identity.signing import KEY, Signer, publisher_key
from tests.server.identity.secure import MAIN, Member

OWN = Member(MAIN).credential


def raw(key):
    return key.public_key().public_bytes_raw()


def test_the_key_is_made_once_and_only_its_owner_reads_it(tmp_path):
    folder = tmp_path / "identity"
    first = publisher_key(folder)
    assert stat.S_IMODE((folder / KEY).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert raw(publisher_key(folder)) == raw(first)
    (folder / KEY).unlink()
    assert raw(publisher_key(folder)) != raw(first)


@pytest.mark.parametrize("content", [b"", b"nonsense", key_to_pem(new_key())])
def test_a_damaged_key_is_said_to_be(tmp_path, content):
    (tmp_path / KEY).touch(0o600)
    (tmp_path / KEY).write_bytes(content)
    with pytest.raises(StoreCorrupted, match=str(tmp_path / KEY)):
        publisher_key(tmp_path)


def test_a_key_that_others_may_read_is_not_used(tmp_path):
    publisher_key(tmp_path)
    os.chmod(tmp_path / KEY, 0o640)
    with pytest.raises(StoreCorrupted, match="0600"):
        publisher_key(tmp_path)


def message():
    return pb.ServerMessage(release=pb.Release(run_id="r-1"))


def test_every_message_has_a_later_instant_whatever_the_clock_shows(tmp_path):
    key, now = publisher_key(tmp_path), [100.0]
    signer = Signer(key, lambda: OWN, lambda: now[0], not_before=100.5)
    issued = []
    for now[0] in (100.0, 100.0, 100.25, 101.0, 101.0, 102.0):
        signed = signer.sign(message(), "north")
        check_signature(signed, "north", key.public_key())
        issued.append(signed.signature.issued_us)
    assert issued == [100_500_001, 100_500_002, 100_500_003, 101_000_000, 101_000_001, 102_000_000]


def test_after_a_long_step_back_of_the_clock_signatures_follow_it_at_once_and_after_a_short_one_they_count_on(tmp_path):
    key, now = publisher_key(tmp_path), [10_000.0]
    signer = Signer(key, lambda: OWN, lambda: now[0])
    issued = []
    for now[0] in (10_000.0, 9_800.0, 10_001.0, 6_400.0, 6_400.0, 6_401.0):
        issued.append(signer.sign(message(), "north").signature.issued_us)
    assert issued == [10**10, 10**10 + 1, 10_001 * 10**6, 6_400 * 10**6, 6_400 * 10**6 + 1, 6_401 * 10**6]
    assert signer.last == 6_401.0


def test_the_publisher_is_certified_anew_once_the_clock_was_set_back(tmp_path):
    key, now = publisher_key(tmp_path), [time.time() + 600]
    signer = Signer(key, lambda: OWN, lambda: now[0])
    signer.sign(pb.ServerMessage(welcome=pb.Welcome(lease_s=1.0)), "north")
    now[0] -= 600
    signed = signer.sign(pb.ServerMessage(welcome=pb.Welcome(lease_s=1.0)), "north")
    assert check_publisher(signed.welcome.publisher, OWN.ca_pem, now[0]) == key.public_key()


def test_a_message_that_is_signed_again_is_signed_anew(tmp_path):
    key = publisher_key(tmp_path)
    signer = Signer(key, lambda: OWN, time.time)
    signed = signer.sign(signer.sign(message(), "north"), "south")
    check_signature(signed, "south", key.public_key())


def test_each_welcome_is_certified_by_the_certificate_of_the_moment(tmp_path):
    key, credentials = publisher_key(tmp_path), [OWN]
    signer = Signer(key, lambda: credentials[0], time.time)
    for credentials[0] in (OWN, Member(MAIN).credential):
        signed = signer.sign(pb.ServerMessage(welcome=pb.Welcome(lease_s=1.0)), "north")
        assert signed.welcome.publisher.certificate == credentials[0].certificate_pem
        assert check_publisher(signed.welcome.publisher, OWN.ca_pem, time.time()) == key.public_key()
        check_signature(signed, "north", key.public_key())
