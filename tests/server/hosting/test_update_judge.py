"""The judge of masked updates: another layout than the sum's is refused, whatever an attacker sends."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.server.config.aggregation import AggregationConfig
from atoll.server.config.secure import SecureConfig
from atoll.server.hosting.update_judge import UpdateJudge
from atoll.tensors.layout import Piece, Tensor, pieces_in_order
from atoll.tensors.secure.masked_layout import masked_layout

LAYOUT = (Tensor("n", "I64", (2,)), Tensor("v", "F32", ()), Tensor("w", "F32", (4, 3)))
MASKED = masked_layout(LAYOUT, 32, (("loss", 2),))
SHA = "ab" * 32


def pieces_of(layout):
    return [Piece(t.name, t.dtype, (0,) * len(t.shape), t.shape, SHA) for t in layout]


def faults(pieces, *, is_part=False, secure=SecureConfig(clip_norm=1.0)):  # noqa: B008 - a value
    """Return the faults that the judge finds in pieces."""
    pieces = pieces_in_order(pieces)
    part = PartManifest(0, pieces) if is_part else None
    manifest = UpdateManifest(
        run_id=RunId("run-1"),
        round_id=RoundId(1),
        client_id=ClientId("a"),
        base_version=Version(0),
        base_digest=Digest("0" * 64),
        num_examples=1,
        work=1.0,
        pieces=() if is_part else pieces,
        parts=(part.listed,) if part is not None else (),
    )
    run = SimpleNamespace(
        config=SimpleNamespace(
            secure=secure,
            secure_rules=None if secure is None else secure.rules(),
            privacy=None,
            aggregation=AggregationConfig(),
        )
    )
    judge = UpdateJudge.of(run, manifest, pb.UploadOpen(manifest=manifest.encode()), part)
    return judge._faults_of_pieces(judge._expected(LAYOUT))


def test_a_masked_update_is_accepted_whole_and_in_boxes_and_a_plain_one_in_a_plain_run():
    whole = pieces_of(MASKED)
    assert faults(whole) == []
    rows = [Piece("w", "I32", (row, 0), (1, 3), SHA) for row in range(4)]
    assert faults([piece for piece in whole if piece.tensor != "w"] + rows) == []
    assert faults(rows[:2], is_part=True) == []
    assert faults(pieces_of(LAYOUT), secure=None) == []


CHANGES = {
    "a plain update": (lambda pieces: pieces_of(LAYOUT), "'F32', allowed in this sum: I32"),
    "words that do not add": (
        lambda pieces: [replace(p, dtype="I64") if p.tensor == "w" else p for p in pieces],
        "tensor 'w' has dtype 'I64', allowed in this sum: I32",
    ),
    "no exact words": (lambda pieces: pieces[:-1], "tensor 'secure/exact' is missing"),
    "more exact words": (
        lambda pieces: [*pieces[:-1], replace(pieces[-1], lengths=(pieces[-1].lengths[0] + 1,))],
        "tensor 'secure/exact' is not inside",
    ),
    "integers beside": (lambda pieces: [*pieces, Piece("n", "I64", (0,), (2,), SHA)], "tensor 'n' is not one of"),
    "a control variate": (
        lambda pieces: [*pieces, Piece("control/w", "I32", (0, 0), (4, 3), SHA)],
        "tensor 'control/w' is not one of",
    ),
    "a tensor twice": (lambda pieces: [*pieces, replace(pieces[1], sha256="cd" * 32)], "overlapping pair"),
    "a tensor less": (lambda pieces: pieces[1:], "tensor 'v' is missing"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_is_refused(change):
    changed, words = CHANGES[change]
    found = faults(changed(pieces_of(MASKED)))
    assert words in "; ".join(found)


@pytest.mark.parametrize("change", ["a plain update", "words that do not add", "integers beside", "a control variate"])
def test_another_layout_of_a_part_is_refused(change):
    changed, words = CHANGES[change]
    assert words in "; ".join(faults(changed(pieces_of(MASKED)), is_part=True))


def test_masked_words_in_a_plain_run_are_refused():
    assert "tensor 'secure/exact' is not one of" in "; ".join(faults(pieces_of(MASKED), secure=None))
