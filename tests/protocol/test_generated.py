"""The generated code that is checked in, against a new run of protoc."""

from pathlib import Path

from atoll.protocol import atoll_pb2
from tests.protocol.generate import GENERATED, ROOT, generate


def test_checked_in_code_is_what_protoc_makes_of_the_proto(tmp_path: Path) -> None:
    fresh = generate(tmp_path)
    stale = [name for name in GENERATED if (ROOT / "protocol" / name).read_bytes() != fresh[name]]
    assert not stale, f"run `make proto`: {stale}"


def test_generated_code_is_importable_as_part_of_the_package() -> None:
    assert atoll_pb2.__name__ == "atoll.protocol.atoll_pb2"
    assert atoll_pb2.DESCRIPTOR.name == "atoll/protocol/atoll.proto"
    assert atoll_pb2.DESCRIPTOR.package == "atoll.v1"


def test_a_message_survives_the_wire() -> None:
    sent = atoll_pb2.ServerMessage(
        invite=atoll_pb2.Invite(run_id="r", round_id=2**63, model_digest="a" * 64, time_left_s=1.5, manifest=b"{}")
    )
    assert atoll_pb2.ServerMessage.FromString(sent.SerializeToString()) == sent
