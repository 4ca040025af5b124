"""Keys and digests of a session: every part counts."""

import hashlib
import hmac

from atoll.protocol.secure.keys import box_key, mask_key, self_key
from atoll.protocol.secure.transcript import commitment, digest, framed, session_id


def test_parts_cannot_be_moved_between_their_neighbours():
    assert framed("a", b"12", b"3") != framed("a", b"1", b"23") != framed("a", b"123")
    assert framed("a", b"1") != framed("b", b"1")
    assert digest("a", b"1") == hashlib.sha256(b"atoll.v1 secure a\n" + bytes(7) + b"\x01" + b"1").digest()


def test_the_session_depends_on_all_that_members_have_signed():
    members = [(b"one", b"1"), (b"two", b"2")]
    base = session_id(b"terms", 2, members)
    others = [
        session_id(b"other", 2, members),
        session_id(b"terms", 3, members),
        session_id(b"terms", 2, members[::-1]),
        session_id(b"terms", 2, [members[0], (b"two", b"3")]),
        session_id(b"terms", 2, members[:1]),
    ]
    assert len({base, *others}) == 6


def test_keys_are_hkdf_by_purpose_session_and_pair():
    shared, session = b"s" * 32, b"i" * 32
    assert mask_key(shared, session, 1, 4) == mask_key(shared, session, 4, 1)
    assert box_key(shared, session, 1, 4) != box_key(shared, session, 4, 1)
    assert len({mask_key(shared, session, 1, 4), box_key(shared, session, 1, 4), self_key(shared, session)}) == 3
    # RFC 5869: extract with a salt of zeros, then one block of expand
    extracted = hmac.digest(bytes(32), shared, "sha256")
    assert self_key(shared, session) == hmac.digest(extracted, framed("self", session) + b"\x01", "sha256")


def test_a_commitment_is_to_a_name_and_a_seed():
    assert len({commitment("a", b"1"), commitment("b", b"1"), commitment("a", b"2")}) == 3
