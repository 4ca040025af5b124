"""`docs/versioning.md` held against the code: each version that it names, and what it promises of unknown fields."""

import re
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from atoll.client.disk.spool import MAGIC
from atoll.client.policy import database
from atoll.parallel.checkpoint import store
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import manifest
from atoll.protocol.identity import join_code
from atoll.protocol.identity.join_code import JoinCode, JoinCodeError
from atoll.protocol.identity.statement import NotTrusted, check_signature, statement
from atoll.protocol.wire.channel import PROTOCOL
from atoll.server.backup import contents
from atoll.server.journal import migrations, schema

PAGE = (Path(__file__).parents[1] / "docs" / "versioning.md").read_text("utf-8")
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)}

VERSIONS = {
    "wire, package `atoll.v1`": PROTOCOL,
    "manifest of a version or an update": f"`{manifest.FORMAT}`",
    "journal and records (`state.db`, PostgreSQL)": schema.SCHEMA_VERSION,
    "an agent's `policy.db`": database.SCHEMA,
    "an agent's spool": f"`{MAGIC.decode().strip()}`",
    "backup": contents.FORMAT,
    "checkpoint of `atoll train`": store.FORMAT,
}


@pytest.mark.parametrize("surface", VERSIONS)
def test_the_version_of_each_format_is_the_code_s(surface: str) -> None:
    version, _ = ROWS[surface]
    assert version.endswith(f": {VERSIONS[surface]}")


def test_every_schema_of_a_journal_that_the_page_names_is_migrated() -> None:
    older = re.search(r"\(SQLite ([\d and]+);", ROWS["journal and records (`state.db`, PostgreSQL)"][1])
    assert older is not None
    assert {int(number) for number in older[1].split(" and ")} == migrations.MIGRATIONS.keys()


def test_a_join_code_of_another_version_is_refused_in_the_page_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(join_code, "_VERSION", 2)
        code = str(JoinCode(("127.0.0.1:7071",), fingerprint=bytes(32), id=bytes(8), secret=bytes(16)))
    with pytest.raises(JoinCodeError) as refused:
        JoinCode.parse(code)
    version, effect = ROWS["join code"]
    assert (version, effect) == ("first byte: 1", f"`{refused.value}`.")


# ---------------------------------------------------------------- a field that a later Atoll sends


def later_message() -> Any:
    """A ServerMessage of a later Atoll, whose invitations have one more field."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    file.name = "later.proto"
    [invite] = [message for message in file.message_type if message.name == "Invite"]
    kinds = descriptor_pb2.FieldDescriptorProto
    invite.field.add(name="later", number=9999, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("atoll.v1.ServerMessage"))()
    message.invite.run_id = "r-1"
    return message


def received(message: Any, key: Ed25519PrivateKey) -> pb.ServerMessage:
    """The message, signed by a later coordinator, as this Atoll reads it."""
    message.signature.issued_us = 1
    message.signature.ed25519 = key.sign(statement(message, "north", 1))
    return pb.ServerMessage.FromString(message.SerializeToString())


def test_a_signed_message_with_an_unknown_field_is_refused_and_without_it_accepted() -> None:
    key, message = Ed25519PrivateKey.generate(), later_message()
    check_signature(received(message, key), "north", key.public_key())
    message.invite.later = "do something else"
    with pytest.raises(NotTrusted):
        check_signature(received(message, key), "north", key.public_key())
