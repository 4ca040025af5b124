"""The manifests: one content has one sequence of bytes and one identity; all other bytes are refused."""

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.ground.strict_json import ManifestError
from atoll.protocol.manifest import (
    BYTES_MAX,
    FAULTS_MAX,
    MANIFEST_BYTES_MAX,
    PIECES_MAX,
    UpdateManifest,
    VersionManifest,
    check_against,
    digest_of,
    parse_update,
    parse_version,
)
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, Version
from atoll.tensors.layout import Piece, Tensor, in_order, pieces_in_order
from atoll.tensors.pieces import cut_layout, piece_bytes_of

SHA = "0123456789abcdef" * 4
VERSION = VersionManifest.of(
    (
        Piece("steps", "I64", (), (), SHA),
        Piece("bias", "F32", (0,), (3,), SHA),
        Piece("weight", "F32", (0, 0), (2, 3), SHA),
    ),
    model_dtypes=("I64", "F32", "BF16"),
)
UPDATE = UpdateManifest(
    run_id=RunId("mnist-1"),
    round_id=RoundId(7),
    client_id=ClientId("nörd"),
    base_version=Version(6),
    base_digest=Digest(SHA),
    num_examples=120,
    work=0.5,
    pieces=(
        Piece("bias", "F32", (0,), (3,), SHA),
        Piece("weight", "F32", (0, 0), (1, 3), SHA),
        Piece("weight", "F32", (1, 0), (1, 3), SHA),
    ),
)

sizes = st.lists(st.integers(0, 2**9), max_size=4).map(tuple)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
names = st.text(min_size=1, max_size=20).filter(lambda name: name.isprintable() and name != "__metadata__")


@st.composite
def versions(draw: st.DrawFn) -> VersionManifest:
    kinds = st.tuples(st.sampled_from(["F32", "I64", "U8"]), sizes.filter(lambda shape: math.prod(shape) < 2**23))
    tensors = draw(st.dictionaries(names, kinds, max_size=6))
    layout = in_order(Tensor(name, dtype, shape) for name, (dtype, shape) in tensors.items())
    pieces = [replace(piece, sha256=draw(digests)) for piece in cut_layout(layout, piece_bytes_of(layout))]
    model_dtypes = tuple(draw(st.sampled_from(["F32", "F16"])) if t.dtype == "F32" else t.dtype for t in layout)
    return VersionManifest.of(pieces, model_dtypes=model_dtypes)


@st.composite
def updates(draw: st.DrawFn) -> UpdateManifest:
    pieces = []
    for name, dtype in draw(st.dictionaries(names, st.sampled_from(["F32", "BF16", "I8"]), max_size=4)).items():
        lengths = draw(sizes)
        starts = draw(st.sets(st.tuples(*[st.integers(0, 2**20)] * len(lengths)), min_size=1, max_size=3))
        pieces += [Piece(name, dtype, start, lengths, draw(digests)) for start in starts]
    return UpdateManifest(
        run_id=RunId(draw(names)),
        round_id=RoundId(draw(st.integers(0, 2**63 - 1))),
        client_id=ClientId(draw(names)),
        base_version=Version(draw(st.integers(0, 2**63 - 1))),
        base_digest=Digest(draw(digests)),
        num_examples=draw(st.integers(-(2**63), 2**63 - 1) | st.floats(-1e6, 1e6).filter(lambda x: x % 1)),
        work=draw(st.floats(allow_nan=False, allow_infinity=False)),
        pieces=pieces_in_order(pieces),
        attempt=draw(st.integers(0, 2**63 - 1)),
    )


# ---------------------------------------------------------------- identity


@settings(deadline=None)
@given(versions())
def test_a_version_survives_its_bytes(manifest: VersionManifest) -> None:
    assert parse_version(manifest.encode()) == manifest
    assert in_order(manifest.layout) == manifest.layout


@settings(deadline=None)
@given(updates())
def test_an_update_survives_its_bytes(manifest: UpdateManifest) -> None:
    assert parse_update(manifest.encode()) == manifest


def test_the_bytes_of_a_version_are_these_for_ever() -> None:
    assert VERSION.encode() == (
        b'{"format":"atoll/1","kind":"version","piece_bytes":4194304,"tensors":['
        b'{"dtype":"I64","model_dtype":"I64","name":"steps","sha256":["%(sha)s"],"shape":[]},'
        b'{"dtype":"F32","model_dtype":"F32","name":"bias","sha256":["%(sha)s"],"shape":[3]},'
        b'{"dtype":"F32","model_dtype":"BF16","name":"weight","sha256":["%(sha)s"],"shape":[2,3]}]}'
    ) % {b"sha": SHA.encode()}
    assert VERSION.digest == "fae285f70aacd703d4525cd6c112aebb7af6cacf3f8d52507ee6f07ca0fe0000"


def test_the_bytes_of_an_update_are_these_for_ever() -> None:
    assert UPDATE.encode().startswith(
        b'{"base_digest":"%s","base_version":6,"client_id":"n\\u00f6rd","format":"atoll/1","kind":"update",'
        b'"num_examples":120,"pieces":[{"dtype":"F32","lengths":[3],"offsets":[0],"sha256":' % SHA.encode()
    )
    assert (
        UPDATE.digest
        == digest_of(UPDATE.encode())
        == "4156b0b1de1361874ecb983b95179f1cab085c3864b3dfc402778abe71c338af"
    )


def test_only_a_masked_update_names_an_attempt() -> None:
    masked = replace(UPDATE, attempt=2)
    assert b"attempt" not in UPDATE.encode()
    assert parse_update(masked.encode()).attempt == 2
    assert masked.digest != UPDATE.digest
    for wrong in (b"0", b"-1", b"9223372036854775808", b"1.0", b"true", b'"2"'):
        with pytest.raises(ManifestError, match="attempt"):
            parse_update(masked.encode().replace(b'"attempt":2', b'"attempt":' + wrong))


def test_the_model_s_dtypes_are_the_stored_ones_when_left_out() -> None:
    assert VersionManifest.of(VERSION.pieces).model_dtypes == ("I64", "F32", "F32")
    assert VERSION.num_bytes == 8 + 3 * 4 + 6 * 4


# ---------------------------------------------------------------- refusals


def changed(manifest: VersionManifest | UpdateManifest, path: tuple[str | int, ...], value: Any) -> bytes:
    """Return the manifest's bytes with one value replaced, canonical again."""
    document = json.loads(manifest.encode())
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


VERSION_FAULTS = [
    (("format",), "atoll/2", "format: got 'atoll/2'; allowed: 'atoll/1'"),
    (("kind",), "update", "kind: got 'update'"),
    (("tensors",), {}, "tensors: got {}; allowed: a list"),
    (("tensors", 0), [], r"tensors\[0\]: got \[\]; allowed: an object"),
    (("tensors", 0, "name"), "", r"tensors\[0\].name: got ''; allowed: 1 to 1024 printable"),
    (("tensors", 0, "name"), "a\nb", r"tensors\[0\].name"),
    (("tensors", 0, "name"), "\ud800", r"tensors\[0\].name"),
    (("tensors", 0, "name"), "__metadata__", r"tensors\[0\].name"),
    (("tensors", 1, "dtype"), "F64", r"tensors\[1\].dtype: got 'F64'; allowed: F32 \| I16"),
    (("tensors", 1, "dtype"), "BF16", r"tensors\[1\].dtype"),
    (("tensors", 1, "dtype"), ["F32"], r"tensors\[1\].dtype"),
    (("tensors", 1, "model_dtype"), "I32", r"tensors\[1\].model_dtype: got 'I32'; allowed: BF16 \| F16 \| F32 \| F64"),
    (("tensors", 0, "model_dtype"), "F32", r"tensors\[0\].model_dtype"),
    (("tensors", 1, "shape"), [True], r"tensors\[1\].shape\[0\]: got True; allowed: an integer"),
    (("tensors", 1, "shape"), [3.0], r"tensors\[1\].shape\[0\]"),
    (("tensors", 1, "shape"), [-1], r"tensors\[1\].shape\[0\]"),
    (("tensors", 1, "shape"), [1] * 9, r"tensors\[1\].shape: 9 items; allowed: at most 8"),
    (("tensors", 1, "shape"), [2**49], rf"tensors\[1\]: got .* allowed: at most {BYTES_MAX} bytes"),
    (("tensors", 1, "shape"), [0, 2**50, 2**50], rf"tensors\[1\]: got .* allowed: at most {BYTES_MAX} bytes"),
    (("tensors", 1, "sha256"), [], r"tensors\[1\].sha256: got 0; allowed: one for each piece of at most 4194304 bytes"),
    (("tensors", 1, "sha256"), [SHA, SHA], r"tensors\[1\].sha256: got 2; allowed: one for each piece"),
    (("tensors", 1, "shape"), [2**40, 2], r"tensors\[1\].sha256: got 1; allowed: one for each piece"),
    (
        ("tensors", 1, "sha256", 0),
        SHA.upper(),
        r"tensors\[1\].sha256\[0\]: got .*; allowed: 64 lower-case hexadecimal digits",
    ),
    (("tensors", 1, "sha256", 0), SHA[1:], r"tensors\[1\].sha256\[0\]"),
    (("tensors", 1, "sha256"), SHA, r"tensors\[1\].sha256"),
    (("piece_bytes",), 2**22 - 1, r"piece_bytes: got 4194303; allowed: an integer in 4194304"),
    (("tensors", 1, "name"), "zzz", "not in canonical order"),
    (("tensors", 2), json.loads(VERSION.encode())["tensors"][1], r"tensors\[2\]: got 'bias'; allowed: each piece once"),
    (("tensors", 2, "name"), "bias", "one dtype and one number of dimensions"),
    (("extra",), 1, "manifest: got 'extra'; allowed: the keys format, kind, piece_bytes, tensors"),
]


@pytest.mark.parametrize(("path", "value", "message"), VERSION_FAULTS)
def test_a_wrong_version_is_refused_with_its_place(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_version(changed(VERSION, path, value))


UPDATE_FAULTS = [
    (("kind",), "version", "kind"),
    (("run_id",), "", "run_id"),
    (("client_id",), 7, "client_id: got 7; allowed: 1 to 256 printable characters"),
    (("round_id",), -1, "round_id"),
    (("round_id",), True, "round_id: got True"),
    (("base_version",), 2**63, "base_version"),
    (("base_digest",), "", "base_digest"),
    (("num_examples",), 2**63, r"num_examples: got 9223372036854775808; allowed: a number in -9223372036854775808"),
    (("num_examples",), 1.0, "num_examples: got 1.0; allowed: a number in .*, whole ones without a point"),
    (("num_examples",), 1e300, "num_examples"),
    (("num_examples",), "1", "num_examples"),
    (("work",), 1, "work: got 1; allowed: a finite float"),
    (("work",), None, "work"),
    (("pieces", 0, "offsets"), [], r"pieces\[0\].offsets: got \[\]; allowed: as many as lengths \(1\)"),
    (("pieces", 0, "lengths"), {}, r"pieces\[0\].lengths"),
    (("pieces", 0, "tensor"), "__metadata__", r"pieces\[0\].tensor"),
    (("pieces", 2, "dtype"), "BF16", r"pieces\[2\]: got 'weight'; allowed: one dtype"),
    (("pieces", 2, "offsets"), [0, 0], r"pieces\[2\]: got 'weight'; allowed: each piece once"),
]


@pytest.mark.parametrize(("path", "value", "message"), UPDATE_FAULTS)
def test_a_wrong_update_is_refused_with_its_place(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_update(changed(UPDATE, path, value))


@pytest.mark.parametrize("claim", [{"num_examples": 0}, {"num_examples": -5}, {"work": 0.0}, {"work": 7.5}])
def test_what_the_machine_judges_is_let_through(claim: dict[str, Any]) -> None:
    [(name, value)] = claim.items()
    assert getattr(parse_update(changed(UPDATE, (name,), value)), name) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"\xff",
        b"\xef\xbb\xbf" + VERSION.encode(),
        b" " + VERSION.encode(),
        VERSION.encode() + b"\n",
        VERSION.encode().replace(b'"F32"', b'"F\\u00332"'),
        VERSION.encode().replace(b'"tensors":', b'"kind":"version","tensors":'),
        VERSION.encode().replace(b'"shape":[3]', b'"shape":[NaN]'),
        VERSION.encode().replace(b'"shape":[3]', b'"shape":[-Infinity]'),
        VERSION.encode().replace(b'"shape":[3]', b'"shape":[1e999]'),
        VERSION.encode().replace(b'"shape":[3]', b'"shape":[' + b"9" * 5000 + b"]"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"0" * (MANIFEST_BYTES_MAX + 1),
    ],
)
def test_bytes_that_are_no_canonical_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError) as refusal:
        parse_version(data)
    assert len(str(refusal.value)) < 300


def test_a_float_has_one_way_to_be_written() -> None:
    with pytest.raises(ManifestError, match="not canonical from byte"):
        parse_update(UPDATE.encode().replace(b'"work":0.5', b'"work":0.50'))


def test_the_number_of_pieces_and_the_bytes_of_all_together_are_limited() -> None:
    with pytest.raises(ManifestError, match="65537 items; allowed: at most 65536"):
        parse_version(changed(VERSION, ("tensors",), [0] * (PIECES_MAX + 1)))
    halves = [Piece(name, "U8", (0,), (2**49 + 1,), SHA) for name in "ab"]
    with pytest.raises(ManifestError, match="bytes together"):
        parse_version(VersionManifest.of(halves, piece_bytes=2**50).encode())


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Apply a few random edits: flips, cuts, copies of a range to another place, and JSON's own tokens."""
    tokens = [b"0", b"-1", b"1e999", b"NaN", b"true", b"null", b"[]", b"{}", b'""', b'"', b",", b"\\ud800", b"9" * 30]
    mutant = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, other = rng.randrange(len(mutant) + 1), rng.randrange(len(mutant) + 1)
        stretch = rng.randint(0, 12)
        replacement = rng.choice(
            [bytes([rng.randrange(256)]), b"", bytes(mutant[other : other + stretch]), rng.choice(tokens)]
        )
        mutant[at : at + stretch] = replacement
    return bytes(mutant)


@pytest.mark.slow
@pytest.mark.parametrize(("manifest", "parse"), [(VERSION, parse_version), (UPDATE, parse_update)])
def test_mutated_bytes_are_refused_or_are_a_manifest_with_those_bytes(manifest: Any, parse: Any) -> None:
    rng = random.Random(1)
    original, num_refused = manifest.encode(), 0
    for _ in range(20_000):
        mutant = mutated(original, rng)
        try:
            assert parse(mutant).encode() == mutant
        except ManifestError:
            num_refused += 1
    assert num_refused > 18_000


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_update(data)


# ---------------------------------------------------------------- against the expected layout


def test_an_update_of_the_version_s_layout_has_no_faults() -> None:
    assert check_against(VERSION.layout[1:], UPDATE) == []


def test_what_does_not_fit_the_layout_is_named() -> None:
    assert "steps" in check_against(VERSION.layout, UPDATE)[0]
    assert check_against(VERSION.layout, UPDATE, may_omit=True) == []
    assert any("weight" in fault for fault in check_against((Tensor("bias", "F32", (3,)),), UPDATE))
    assert check_against((Tensor("bias", "F32", (3,)), Tensor("weight", "F32", (3, 3))), UPDATE)
    assert check_against((Tensor("bias", "I32", (3,)), Tensor("weight", "F32", (2, 3))), UPDATE)


def test_the_list_of_faults_is_short_however_wrong_the_manifest_is() -> None:
    layout = tuple(Tensor(f"w{index:03}", "F32", (1,)) for index in range(100))
    faults = check_against(layout, VersionManifest.of(()))
    assert len(faults) == FAULTS_MAX + 1
    assert faults[-1] == "and 80 more"


# ---------------------------------------------------------------- encoded pieces


def encoded_piece(**changes: Any) -> bytes:
    """Make an update of one piece of 1,000 elements with topk:0.01 (10 values and indices), changed by `changes`."""
    piece = {
        "codec": "topk:0.01",
        "dtype": "F32",
        "lengths": [1000],
        "num_bytes": 60,
        "offsets": [0],
        "sha256": SHA,
        "tensor": "w",
    }
    document = json.loads(UPDATE.encode()) | {"pieces": [{k: v for k, v in (piece | changes).items() if v is not None}]}
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def test_an_encoded_piece_survives_its_bytes_and_has_its_own_size() -> None:
    manifest = parse_update(encoded_piece())
    assert manifest.encode() == encoded_piece()
    assert manifest.pieces == (Piece("w", "F32", (0,), (1000,), SHA, "topk:0.01", 60),)
    assert (manifest.num_bytes, manifest.plain_bytes, manifest.codecs) == (60, 4000, {"topk:0.01"})
    assert (UPDATE.num_bytes, UPDATE.plain_bytes, UPDATE.codecs) == (36, 36, frozenset())


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"codec": "topk:0.010"}, r"pieces\[0\]\.codec: got 'topk:0.010'; allowed: 'topk:0.01'"),
        ({"codec": "zip"}, r"pieces\[0\]\.codec: got 'zip'; allowed: bf16, fp16, qsgd8, sign, topk:F"),
        ({"codec": ""}, r"pieces\[0\]\.codec: got ''; allowed: 1 to 256 printable"),
        ({"codec": "t" * 257}, r"pieces\[0\]\.codec: got .*; allowed: 1 to 256 printable"),
        ({"codec": 7}, r"pieces\[0\]\.codec: got 7"),
        ({"codec": None}, r"pieces\[0\]: got 'num_bytes'; allowed: the keys"),
        ({"num_bytes": 59}, r"pieces\[0\]\.num_bytes: got 59; allowed: an integer in 60\.\.60"),
        ({"num_bytes": 60.0}, r"pieces\[0\]\.num_bytes: got 60\.0"),
        ({"num_bytes": None}, r"pieces\[0\]: key 'num_bytes' is missing"),
        ({"dtype": "I64"}, r"pieces\[0\]\.dtype: got 'I64'; allowed: 'F32' of an encoded piece"),
        ({"dtype": "BF16"}, r"pieces\[0\]\.dtype: got 'BF16'; allowed: 'F32' of an encoded piece"),
    ],
)
def test_a_malformed_encoded_piece_is_refused_by_name(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ManifestError, match=fault):
        parse_update(encoded_piece(**changes))


OWN = 'rounded@1.2-0123abcd:{"levels":7}'


def test_a_piece_of_an_installed_package_s_codec_is_read_where_the_package_is_not() -> None:
    """Its size is judged by the side that has the codec."""
    for size in (0, 59, 1004, 4000):
        given = encoded_piece(codec=OWN, num_bytes=size)
        manifest = parse_update(given)
        assert (manifest.encode(), manifest.num_bytes, manifest.codecs) == (given, size, {OWN})
    with pytest.raises(ManifestError, match=r"num_bytes: got 4001; allowed: an integer in 0\.\.4000"):
        parse_update(encoded_piece(codec=OWN, num_bytes=4001))
    with pytest.raises(ManifestError, match=r"codec: got 'rounded@1.2-0123abc'; allowed: bf16"):
        parse_update(encoded_piece(codec=OWN[:19]))


def test_few_bytes_that_claim_too_many_values_are_refused() -> None:
    huge = encoded_piece(codec="topk:0.000001", lengths=[2**50, 4], offsets=[0, 0])
    with pytest.raises(ManifestError, match="bytes"):
        parse_update(huge)


def test_encoded_pieces_are_ordered_as_bytes() -> None:
    plain, small = Piece("z", "F32", (0,), (3,), SHA), Piece("i", "I8", (0,), (3,), SHA)
    encoded = Piece("a", "F32", (0,), (1000,), SHA, "sign", 129)
    assert pieces_in_order([encoded, small, plain]) == (plain, encoded, small)
