"""The manifests of parts: the root commits to them, and together they must cover the model, each element once."""

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.ground.strict_json import ManifestError
from atoll.protocol.manifest import (
    BYTES_MAX,
    MANIFEST_BYTES_MAX,
    PARTS_MAX,
    Part,
    UpdateManifest,
    check_against,
    digest_of,
    parse_update,
)
from atoll.protocol.part_manifest import (
    PART_BYTES_MAX,
    PartManifest,
    check_part,
    check_parts,
    parse_part,
    part_of,
)
from atoll.tensors.layout import Piece, Tensor, in_order, pieces_in_order
from tests.aggregation.models import random_cuts
from tests.protocol.test_manifest import SHA, UPDATE

LAYOUT = in_order((Tensor("weight", "F32", (4, 6)), Tensor("bias", "BF16", (3,)), Tensor("steps", "I64", ())))


def root_of(*parts: PartManifest) -> UpdateManifest:
    return replace(UPDATE, pieces=(), parts=tuple(part.listed for part in parts))


def part(index: int, *pieces: Piece) -> PartManifest:
    return PartManifest(index, pieces_in_order(pieces))


def box(offsets: tuple[int, ...], lengths: tuple[int, ...], *, tensor: str = "weight", dtype: str = "F32") -> Piece:
    return Piece(tensor, dtype, offsets, lengths, SHA)


REST = (box((0,), (3,), tensor="bias", dtype="BF16"), box((), (), tensor="steps", dtype="I64"))
PARTS = (part(0, box((0, 0), (2, 6)), *REST), part(1, box((2, 0), (2, 6))))
ROOT = root_of(*PARTS)


@st.composite
def divided(draw: st.DrawFn) -> tuple[PartManifest, ...]:
    """The boxes of a random tiling, dealt over parts, some of which have none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    dealt: list[list[Piece]] = [[] for _ in range(draw(st.integers(1, 6)))]
    for tensor in LAYOUT:
        cuts = random_cuts(rng, tensor.shape, depth=int(rng.integers(0, 6))) if tensor.shape else [((), ())]
        for offsets, lengths in cuts:
            dealt[int(rng.integers(len(dealt)))].append(Piece(tensor.name, tensor.dtype, offsets, lengths, SHA))
    return tuple(part(index, *pieces) for index, pieces in enumerate(dealt))


@settings(deadline=None)
@given(divided())
def test_parts_survive_their_bytes_and_cover_the_model(parts: tuple[PartManifest, ...]) -> None:
    root = root_of(*parts)
    assert parse_update(root.encode()) == root
    assert [part_of(root, one.encode()) for one in parts] == list(parts)
    assert all(not check_part(LAYOUT, one) for one in parts)
    assert check_parts(LAYOUT, parts) == []
    assert root.num_bytes == sum(tensor.num_bytes for tensor in LAYOUT) == root.plain_bytes


@settings(deadline=None, max_examples=200)
@given(divided(), st.data())
def test_parts_are_judged_as_one_update_of_all_their_pieces_is(
    parts: tuple[PartManifest, ...], data: st.DataObject
) -> None:
    """The oracle is the check of a plain update, whatever box is dropped, listed twice, or moved."""
    pieces = [list(one.pieces) for one in parts]
    owner = data.draw(st.sampled_from([index for index, held in enumerate(pieces) if held]))
    at = data.draw(st.integers(0, len(pieces[owner]) - 1))
    match data.draw(st.sampled_from(["drop", "twice", "shorter"])):
        case "drop":
            del pieces[owner][at]
        case "twice":
            pieces[data.draw(st.integers(0, len(pieces) - 1))].append(pieces[owner][at])
        case "shorter":
            old = pieces[owner][at]
            pieces[owner][at] = replace(old, lengths=tuple(max(1, length - 1) for length in old.lengths))
    broken = [part(index, *held) for index, held in enumerate(pieces)]
    whole = replace(UPDATE, pieces=tuple(piece for held in broken for piece in held.pieces))
    assert check_parts(LAYOUT, broken) == check_against(LAYOUT, whole)


def test_the_bytes_of_a_root_and_of_a_part_are_these_for_ever() -> None:
    assert PARTS[1].encode() == (
        b'{"format":"atoll/1","index":1,"kind":"part","pieces":[{"dtype":"F32","lengths":[2,6],"offsets":[2,0],'
        b'"sha256":"%s","tensor":"weight"}]}' % SHA.encode()
    )
    assert b'"num_examples":120,"parts":[{"num_bytes":62,"plain_bytes":62,"sha256":"' in ROOT.encode()
    assert b'"pieces"' not in ROOT.encode()
    assert ROOT.digest == digest_of(ROOT.encode())


def changed(path: tuple[str | int, ...], value: Any) -> bytes:
    document = json.loads(ROOT.encode())
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("parts",), [], "parts: got 0; allowed: 1 to 1024"),
        (("parts",), {}, "parts: got {}; allowed: a list"),
        (("parts", 0, "num_bytes"), -1, "parts[0].num_bytes: got -1"),
        (("parts", 0, "plain_bytes"), 1.0, "parts[0].plain_bytes: got 1.0"),
        (("parts", 1, "sha256"), "ab", "parts[1].sha256: got 'ab'"),
        (("parts", 1, "index"), 1, "parts[1]: got 'index'; allowed: the keys num_bytes, plain_bytes, sha256"),
        (("pieces",), [], "manifest: got 'pieces'"),
        (("parts", 0, "num_bytes"), BYTES_MAX, f"together; allowed: at most {BYTES_MAX}"),
    ],
)
def test_a_root_that_cannot_be_is_refused_by_name(path: tuple[str | int, ...], value: Any, fault: str) -> None:
    with pytest.raises(ManifestError) as refused:
        parse_update(changed(path, value))
    assert fault in str(refused.value)


def test_more_parts_than_the_limit_and_one_listed_twice_are_refused() -> None:
    most = [Part(1, 1, f"{index:064x}") for index in range(PARTS_MAX + 1)]
    assert len(parse_update(replace(ROOT, parts=tuple(most[1:])).encode()).parts) == PARTS_MAX
    with pytest.raises(ManifestError, match="1025 items; allowed: at most 1024"):
        parse_update(replace(ROOT, parts=tuple(most)).encode())
    with pytest.raises(ManifestError, match="listed twice; allowed: each once"):
        parse_update(replace(ROOT, parts=(most[0], most[0])).encode())


def test_the_largest_root_fits_beside_the_largest_part_in_one_message() -> None:
    most = tuple(Part(BYTES_MAX // PARTS_MAX, BYTES_MAX // PARTS_MAX, f"{index:064x}") for index in range(PARTS_MAX))
    assert len(replace(ROOT, parts=most).encode()) + PART_BYTES_MAX < MANIFEST_BYTES_MAX


@pytest.mark.parametrize(
    ("root", "data", "fault"),
    [
        (UPDATE, PARTS[0].encode(), "allowed: none, because the manifest lists no parts"),
        (ROOT, b"", "part: none; allowed: one of the parts that the manifest lists"),
        (ROOT, part(0, box((0, 0), (1, 6))).encode(), "with other sizes or another digest"),
        (ROOT, replace(PARTS[1], index=0).encode(), "with other sizes or another digest"),
        (ROOT, replace(PARTS[1], index=2).encode(), "part: number 2"),
        (ROOT, PARTS[1].encode().replace(b":", b": "), "not canonical from byte"),
        (ROOT, PARTS[1].encode().replace(b'"index":1', b'"index":1024'), "index: got 1024; allowed: an integer in 0.."),
        (ROOT, b'{"format":"atoll/1"}', "part: key 'index' is missing"),
        (ROOT, b"\xff" * (PART_BYTES_MAX + 1), "bytes"),
    ],
)
def test_a_part_that_the_root_does_not_list_is_refused(root: UpdateManifest, data: bytes, fault: str) -> None:
    with pytest.raises(ManifestError) as refused:
        part_of(root, data)
    assert fault in str(refused.value)


def test_a_root_may_not_lie_about_the_size_of_a_part() -> None:
    lying = replace(ROOT, parts=(replace(ROOT.parts[0], num_bytes=1), ROOT.parts[1]))
    with pytest.raises(ManifestError, match="with other sizes"):
        part_of(lying, PARTS[0].encode())


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([box((0, 0), (2, 6), tensor="w")], "tensor 'w' is not one of the model's 3"),
        ([box((0, 0), (2, 6), dtype="F16")], "dtype 'F16', allowed: F32"),
        ([box((3, 0), (2, 6))], "is not inside the shape (4, 6)"),
        ([box((0,), (24,))], "has 1 and 1 axes, allowed are 2"),
    ],
)
def test_a_part_is_judged_before_the_others_are_known(pieces: list[Piece], fault: str) -> None:
    [found] = check_part(LAYOUT, part(0, *pieces))
    assert fault in found


def test_a_hostile_number_of_boxes_costs_one_fault() -> None:
    layout = (Tensor("w", "F32", (2**16,)),)
    parts = [
        part(index, *(Piece("w", "F32", (1024 * index + k,), (1,), SHA) for k in range(1024))) for index in range(60)
    ]
    began = time.process_time()
    assert all(not check_part(layout, one) for one in parts)
    assert check_parts(layout, parts) == ["tensor 'w' has 61440 boxes, allowed are 1024"]
    assert time.process_time() - began < 30


def test_equal_bytes_in_two_places_are_two_parts() -> None:
    twice = (part(0, box((0, 0), (2, 6))), part(1, box((0, 0), (2, 6))))
    assert twice[0].digest != twice[1].digest
    assert parse_part(twice[0].encode()).index == 0
    assert any("1 overlapping pair" in fault for fault in check_parts(LAYOUT, twice))
