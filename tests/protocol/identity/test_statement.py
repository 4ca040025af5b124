"""The signed statements: they cover all content that is pushed to a client, and every change of it is detected."""

import time
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import Issuer
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.identity.statement import (
    LEFT_OUT,
    NotTrusted,
    check_publisher,
    check_signature,
    statement,
)
from atoll.server.identity.signing import certify
from tests.server.identity.secure import AUTHORITY, MAIN, Member

NOW = time.time()
KEY = Ed25519PrivateKey.generate()

SAMPLES = {
    FieldDescriptor.CPPTYPE_STRING: ["a", "b"],
    FieldDescriptor.CPPTYPE_DOUBLE: [1.5, 1.5000000000000002],
    FieldDescriptor.CPPTYPE_UINT32: [1, 2],
    FieldDescriptor.CPPTYPE_INT32: [-1, 2],
    FieldDescriptor.CPPTYPE_UINT64: [1, 2**63],
    FieldDescriptor.CPPTYPE_BOOL: [True, False],
}


def fill(message):
    """Set every field of a message and of the messages in it."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            inner = getattr(message, field.name)
            fill(inner.add() if field.is_repeated else inner)
        elif field.is_repeated:
            first = b"a" if field.type == field.TYPE_BYTES else SAMPLES[field.cpp_type][0]
            getattr(message, field.name).append(first)
        else:
            first = b"a" if field.type == field.TYPE_BYTES else SAMPLES[field.cpp_type][0]
            setattr(message, field.name, first)


def pushed():
    """Return each kind of message to a client, with every field set."""
    for field in pb.ServerMessage.DESCRIPTOR.oneofs_by_name["message"].fields:
        message = pb.ServerMessage()
        fill(getattr(message, field.name))
        yield pytest.param(message, id=field.name)


def member_of(message, name):
    """Return the value of a field; of repeated messages the first one."""
    field, found = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    return found[0] if field.is_repeated and field.message_type is not None else found


def changes(message, path=()):
    """Yield a message with each field changed in turn, and the field's name in the form of `LEFT_OUT`."""
    for field in message.DESCRIPTOR.fields:
        inner = member_of(message, field.name)
        if field.message_type is not None:
            yield from changes(inner, (*path, field.name))
        else:
            yield f"{message.DESCRIPTOR.name}.{field.name}", (*path, field.name)


def changed(message, path):
    copy = type(message)()
    copy.CopyFrom(message)
    *way, last = path
    inner = copy
    for name in way:
        inner = member_of(inner, name)
    field = inner.DESCRIPTOR.fields_by_name[last]
    if field.is_repeated:
        getattr(inner, last).append(SAMPLES[field.cpp_type][1])
    else:
        setattr(inner, last, b"b" if field.type == field.TYPE_BYTES else SAMPLES[field.cpp_type][1])
    return copy


def signed(message, client="north", issued_us=7, key=KEY):
    copy = pb.ServerMessage()
    copy.CopyFrom(message)
    copy.signature.issued_us = issued_us
    copy.signature.ed25519 = key.sign(statement(copy, client, issued_us))
    return copy


@pytest.mark.parametrize("message", list(pushed()))
def test_every_field_is_under_the_signature_but_what_a_digest_commits_to(message):
    sound = signed(message)
    check_signature(sound, "north", KEY.public_key())
    kind = message.WhichOneof("message")
    for name, path in changes(getattr(message, kind)):
        other = changed(sound, (kind, *path))
        if name in LEFT_OUT:
            check_signature(other, "north", KEY.public_key())
            continue
        with pytest.raises(NotTrusted, match="signature"):
            check_signature(other, "north", KEY.public_key())


def test_what_is_left_out_is_what_the_digest_commits_to():
    assert {"ServerMessage.signature", "Invite.manifest", "Invite.data", "Evaluate.manifest"} == LEFT_OUT


def test_a_signature_is_for_one_client_one_instant_and_of_one_key():
    sound = signed(pb.ServerMessage(invite=pb.Invite(run_id="r-1")))
    other = pb.ServerMessage()
    other.CopyFrom(sound)
    other.signature.issued_us += 1
    unsigned = pb.ServerMessage(invite=sound.invite)
    for message, client, key in (
        (sound, "south", KEY),
        (other, "north", KEY),
        (unsigned, "north", KEY),
        (sound, "north", Ed25519PrivateKey.generate()),
    ):
        with pytest.raises(NotTrusted):
            check_signature(message, client, key.public_key())


def test_an_unknown_field_of_a_later_atoll_is_refused_by_who_cannot_see_it():
    later = signed(pb.ServerMessage(release=pb.Release(run_id="r-1", reason="x", submit=True)))
    seen = pb.ServerMessage.FromString(later.SerializeToString())
    seen.release.ClearField("submit")
    with pytest.raises(NotTrusted):
        check_signature(seen, "north", KEY.public_key())


def test_the_statement_is_as_the_protocol_says():
    invite = pb.Invite(run_id="r-1", round_id=3, time_left_s=30.0, manifest=b"{}", seed=2**63, local="{}")
    assert statement(pb.ServerMessage(invite=invite), "north", 1767225600000000) == (
        b'atoll.v1 statement\n{"client":"north","issued_us":1767225600000000,"message":{"invite":{"local":"{}",'
        b'"round_id":3,"run_id":"r-1","seed":9223372036854775808,"time_left_s":"403e000000000000"}}}'
    )


# ---------------------------------------------------------------- the key


def credential(identity=MAIN, issuer=AUTHORITY):
    return Member(identity, issuer).credential


def test_the_coordinators_certificate_says_which_key_is_its_own():
    own = credential()
    now = time.time()  # `NOW` is when the file was imported, minutes ago in a long run
    publisher = certify(KEY, own, now)
    assert check_publisher(publisher, own.ca_pem, now) == KEY.public_key()
    assert check_publisher(publisher, own.ca_pem, own.leaf.expires_at - 1) == KEY.public_key()


@pytest.mark.parametrize("seconds", [-2 * 86400, 31 * 86400])
def test_out_of_its_time_it_does_not_count(seconds):
    own = credential()
    with pytest.raises(NotTrusted, match="not valid now"):
        check_publisher(certify(KEY, own, NOW), own.ca_pem, NOW + seconds)


@pytest.mark.parametrize("role", [Role.CLIENT, Role.OWNER, Role.AGGREGATOR])
def test_nobody_else_says_which_key_is_the_coordinators(role):
    other = credential(Identity(role, "1"))
    with pytest.raises(NotTrusted, match=f"certified by {role} 1; allowed: a coordinator"):
        check_publisher(certify(KEY, other, NOW), other.ca_pem, NOW)


def test_a_coordinator_of_another_authority_does_not_count():
    stranger = credential(issuer=Issuer.create("other", now=NOW))
    with pytest.raises(NotTrusted, match="not signed by this authority"):
        check_publisher(certify(KEY, stranger, NOW), credential().ca_pem, NOW)


@pytest.mark.parametrize("field", ["key", "issued_us", "expires_us", "certificate", "signature"])
def test_nothing_of_it_can_be_changed(field):
    own = credential()
    publisher, other = certify(KEY, own, NOW), certify(Ed25519PrivateKey.generate(), credential(), NOW + 1)
    if field == "expires_us":
        other.expires_us = publisher.expires_us + 1
    setattr(publisher, field, getattr(other, field))
    with pytest.raises(NotTrusted):
        check_publisher(publisher, own.ca_pem, NOW)
    setattr(publisher, field, b"" if isinstance(getattr(publisher, field), bytes) else 0)
    with pytest.raises(NotTrusted):
        check_publisher(publisher, own.ca_pem, NOW)


OWN = credential()
PUBLISHER = certify(KEY, OWN, NOW)


@given(st.data())
def test_whatever_comes_in_a_welcome_is_trusted_or_not(data):
    publisher = pb.Publisher.FromString(PUBLISHER.SerializeToString())
    field = data.draw(st.sampled_from(["key", "certificate", "signature"]))
    spoilt = bytearray(getattr(publisher, field))
    start = data.draw(st.integers(0, len(spoilt) - 1))
    spoilt[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
    setattr(publisher, field, bytes(spoilt))
    with suppress(NotTrusted):
        check_publisher(publisher, OWN.ca_pem, NOW)
