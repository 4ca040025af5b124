"""The secure sums of rounds by stage."""

from atoll.protocol.vocabulary import ClientId, RoundId, Version
from atoll.server.rounds.record import ClientRecord, MemberRecord, RoundRecord, SumRecord
from atoll.server.views.secure_sums import sums_of


def record() -> RoundRecord:
    """Return a round with an opened session, one that has failed, and a client outside of both."""
    found = RoundRecord(RoundId(3), Version(2), 0.0, 3, 2, 3)
    parts = {
        "a": MemberRecord(0, keys_at=1.0, shares_at=2.0, masked_at=3.0, signed_at=4.0, revealed_at=5.0),
        "b": MemberRecord(0, keys_at=1.0, shares_at=2.0, left="lost: silent"),
        "c": MemberRecord(1, keys_at=1.0),
    }
    found.clients = {ClientId(name): ClientRecord(0.0, sum=part) for name, part in parts.items()}
    found.clients[ClientId("d")] = ClientRecord(0.0)
    found.sums = [
        SumRecord(0, attempt=2, stage="opened", threshold=2, num_members=2, wrong=[ClientId("b")]),
        SumRecord(1, stage="failed", detail="1 member; needed: 3", left_out=[ClientId("e")]),
    ]
    return found


def test_each_session_counts_the_messages_of_its_members() -> None:
    first, second = sums_of([record()])
    assert (first["round"], first["session"], first["attempt"], first["stage"]) == (3, 0, 2, "opened")
    assert first["sent"] == {"keys": 2, "shares": 2, "masked": 1, "signed": 1, "revealed": 1}
    assert (first["members"], first["threshold"], first["left"], first["wrong"]) == (2, 2, 1, ["b"])
    assert (second["members"], second["stage"], second["left_out"]) == (1, "failed", ["e"])
    assert second["detail"] == "1 member; needed: 3"
    assert sums_of([]) == []
