"""Bitmaps of members, and what a member signs."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Agreement, Gone, MaskedWords, MemberKeys, bitmap, positions_of
from tests.server.sessions.small_federation import sites_of, terms_of


@given(st.integers(1, 64).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_a_bitmap_is_read_back(given_set):
    members, positions = given_set
    assert positions_of(bitmap(positions, members), members) == positions


def test_the_first_position_is_the_highest_bit():
    assert bitmap({0, 9}, 10) == b"\x80\x40"
    with pytest.raises(ValueError, match="position 10; allowed: 0 to 9"):
        positions_of(b"\x00\x20", 10)
    with pytest.raises(ValueError, match="3 bytes; allowed: 2"):
        positions_of(bytes(3), 10)


def test_every_field_of_a_members_keys_is_signed():
    [_, send] = sites_of(3)[0].member(terms_of()).start()
    keys = send.message
    others = {
        **{"name": "other", "chain": replace(keys.chain, count=9), "site": replace(keys.site, certificate=b"other")},
        **{name: bytes(32) for name in ("terms", "mask_key", "box_key", "commitment")},
    }
    assert {*others} == {field.name for field in fields(MemberKeys)} - {"signature"}
    statements = {replace(keys, **{name: other}).statement() for name, other in others.items()}
    assert len(statements | {keys.statement()}) == len(others) + 1
    assert replace(keys, signature=b"").statement() == keys.statement()


@pytest.mark.parametrize("name", ["", "a" * 65, "north\nCRITICAL: forged", "north\x1b[2J", "../north", "\u202enorth"])
def test_a_name_that_no_certificate_can_have_is_refused_and_printable(name):
    [_, send] = sites_of(3)[0].member(terms_of()).start()
    message = wire.answer_message(wire.SessionName("digits-1", 1, 1, 0), replace(send.message, name=name))
    with pytest.raises(wire.BadForm) as refused:
        wire.answer_of(message)
    assert str(refused.value).isprintable()
    assert str(refused.value).isascii()


@pytest.mark.parametrize("count", [2**53 + 1, 2**63, 2**64 - 1])
def test_a_chain_of_more_sessions_than_a_peer_can_write_down_is_refused(count):
    [_, send] = sites_of(3)[0].member(terms_of()).start()
    keys = replace(send.message, chain=replace(send.message.chain, count=count))
    with pytest.raises(wire.BadForm, match=r"chain_count: .*; allowed: at most 9007199254740992"):
        wire.answer_of(wire.answer_message(wire.SessionName("digits-1", 1, 1, 0), keys))


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("session_lost: this agent was restarted", "session_lost: this agent was restarted"),
        ("session_refused: terms: changed", "session_refused: terms: changed"),
        ("west is not pinned here: ask its operator", "session_refused: west is not pinned here: ask its operator"),
        ("the names are not sorted", "session_refused: the names are not sorted"),
    ],
)
def test_the_coordinator_reads_the_whole_reason_for_which_a_member_leaves(said, read):
    of = wire.SessionName("digits-1", 1, 1, 0)
    assert wire.answer_of(wire.answer_message(of, Gone(said, ("west",)))) == Gone(read, ("west",))


def test_masked_words_are_read_back_with_the_purpose_of_their_session():
    of = wire.SessionName("digits-1", 3, 2, 1, "evaluation")
    message = wire.answer_message(of, MaskedWords(bytes(range(16))))
    assert wire.answer_of(message) == MaskedWords(bytes(range(16)))
    assert wire.name_of(message) == of
    plain = wire.answer_message(wire.SessionName("digits-1", 3, 2, 1), Agreement(bytes(64)))
    assert (wire.name_of(plain).purpose, plain.secure_agree.of.purpose) == ("update", "")


@pytest.mark.parametrize("size", [7, wire.WORDS_BYTES_MAX + 8])
def test_masked_words_of_another_form_are_refused(size):
    with pytest.raises(wire.BadForm, match=f"words: .*; allowed: a multiple of 8, at most {wire.WORDS_BYTES_MAX}"):
        wire.answer_of(pb.ClientMessage(secure_masked=pb.SecureMasked(words=bytes(size))))


@pytest.mark.parametrize("names", [["a"] * 65, [""], ["a" * 201]])
def test_more_or_longer_names_of_refused_members_than_a_session_has_are_refused(names):
    message = pb.ClientMessage(secure_gone=pb.SecureGone(reason="session_refused", refused=names))
    with pytest.raises(wire.BadForm, match="refused: "):
        wire.answer_of(message)
