"""The ids of spans, and the spans of a round's record."""

import hashlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.trace_ids import span_id, trace_id
from atoll.telemetry.spans import SPANS, spans_of


def client(**values: Any) -> dict[str, Any]:
    row = {"invited_at": 11.0, "fate": "reported", "fate_at": 20.0, "reason": "", "num_bytes": 7}
    return row | {"upload_begun_at": 19.0, "train_seconds": 5.0, "download_seconds": 2.0} | values


def record(**values: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"round_id": 3, "base_version": 2, "version": 3, "phase": "committed", "opened_at": 10.0}
    found |= {"drawn_at": 11.0, "closed_at": 21.0, "ended_at": 22.0, "abandon_reason": None, "close_reason": "enough"}
    return found | {"clients": {"north": client()}} | values


def test_an_id_is_the_head_of_a_digest_that_anybody_can_compute() -> None:
    digest = hashlib.sha256(b"atoll\x005\0digits-1\x003").digest()
    assert trace_id(5, "digits-1", 3).to_bytes(16, "big") == digest[:16]
    digest = hashlib.sha256(b"atoll\x005\0digits-1\x003\0train\0north").digest()
    assert span_id(5, "digits-1", 3, "train", "north").to_bytes(8, "big") == digest[:8]


def test_instants_are_those_of_the_record() -> None:
    found = {span.name: (span.begin, span.end) for span in spans_of("digits-1", 5, record())}
    assert found == {
        "round": (10.0, 22.0),
        "selection": (10.0, 11.0),
        "invitation": (11.0, 20.0),
        "download": (12.0, 14.0),
        "train": (14.0, 19.0),
        "upload": (19.0, 20.0),
        "aggregation": (21.0, 22.0),
    }
    assert set(found) == {name for name, _ in SPANS}


def test_each_span_has_its_parent_and_the_trace_of_its_round() -> None:
    rows = {name: client() for name in ("north", "south")}
    found = list(spans_of("digits-1", 5, record(clients=rows)))
    ids = {span.id: span for span in found}
    assert len(ids) == len(found) == 3 + 2 * 4
    assert {span.trace for span in found} == {trace_id(5, "digits-1", 3)}
    assert [span.name for span in found if not span.parent] == ["round"]
    for span in found:
        if span.name in ("download", "train", "upload"):
            around = ids[span.parent]
            assert (around.name, around.attributes["atoll.client.name"]) == (
                "invitation",
                span.attributes["atoll.client.name"],
            )
        elif span.parent:
            assert ids[span.parent].name == "round"


def test_faults_are_errors() -> None:
    rows = {"north": client(fate="failed", reason="worker_crashed", upload_begun_at=None, train_seconds=0.0)}
    found = {
        span.name: span
        for span in spans_of(
            "digits-1", 5, record(phase="abandoned", version=None, abandon_reason="quorum_missed", clients=rows)
        )
    }
    assert (found["round"].error, found["invitation"].error) == ("quorum_missed", "worker_crashed")
    assert found["selection"].error is None
    assert "aggregation" not in found
    assert "upload" not in found


times = st.one_of(st.none(), st.floats(0, 100))


@given(times, times, st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), times)
def test_no_span_ends_before_it_begins_or_leaves_its_invitation(
    drawn: float | None, closed: float | None, fate: float, train: float, download: float, upload: float | None
) -> None:
    """Clocks jump, and durations are what a client says."""
    row = client(fate_at=fate, train_seconds=train, download_seconds=download, upload_begun_at=upload)
    found = list(spans_of("r-1", 5, record(drawn_at=drawn, closed_at=closed, clients={"n": row})))
    (around,) = [span for span in found if span.name == "invitation"]
    for span in found:
        assert span.begin <= span.end
        if span.parent == around.id:
            assert around.begin <= span.begin <= span.end <= around.end
