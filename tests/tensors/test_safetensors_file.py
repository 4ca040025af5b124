import hashlib
import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor, in_order
from atoll.tensors.safetensors_file import TensorFileCorrupted, TensorFileWriter
from atoll.tensors.safetensors_header import HEADER_BYTES_MAX, header_bytes

NUMPY = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
layouts = st.dictionaries(names, st.tuples(st.sampled_from(sorted(NUMPY)), shapes), max_size=6)


def framed(header: object, *, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@settings(max_examples=60, deadline=None)
@given(layout=layouts, metadata=st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=4)))
def test_file_reads_alike_in_the_safetensors_library(tmp_path_factory, layout, metadata):
    path = tmp_path_factory.mktemp("f") / "model.safetensors"
    rng = np.random.default_rng(0)
    arrays = {
        name: np.frombuffer(rng.bytes(64 * 8), dtype=NUMPY[dtype])[: int(np.prod(shape))].reshape(shape)
        for name, (dtype, shape) in layout.items()
    }
    pieces = safetensors_file.write(path, arrays, metadata=metadata)
    theirs, ours = safetensors.numpy.load_file(path), safetensors_file.read(path)
    assert theirs.keys() == ours.keys() == arrays.keys()
    for piece in pieces:
        raw = arrays[piece.tensor].tobytes()
        assert theirs[piece.tensor].tobytes() == ours[piece.tensor].tobytes() == raw
        assert theirs[piece.tensor].shape == ours[piece.tensor].shape == piece.lengths
        assert piece.sha256 == hashlib.sha256(raw).hexdigest()
    with safetensors.safe_open(path, "np") as file:
        assert (file.metadata() or {}) == metadata == safetensors_file.read_metadata(path)
    mapped = safetensors_file.mapped(path)
    assert mapped.keys() == ours.keys()
    for name, array in ours.items():
        assert (mapped[name].dtype, mapped[name].shape) == (array.dtype, array.shape)
        assert mapped[name].tobytes() == array.tobytes()
        assert mapped[name].flags.aligned


def test_file_of_the_safetensors_library_reads_alike_here(tmp_path):
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(3, dtype=np.int64), "s": np.float16(2)}
    safetensors.numpy.save_file({name: np.asarray(a) for name, a in arrays.items()}, tmp_path / "m", {"format": "np"})
    layout, data_start = safetensors_file.parse_header(tmp_path / "m")
    assert layout == (Tensor("a", "I64", (3,)), Tensor("b", "F32", (2, 3)), Tensor("s", "F16", ()))
    assert data_start % 8 == 0
    read = safetensors_file.read(tmp_path / "m")
    assert all(np.array_equal(read[name], arrays[name]) for name in arrays)


def test_bfloat16_keeps_its_bits_through_safetensors_torch(tmp_path):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    raw = bits.numpy().view(np.uint16)
    safetensors_file.write(tmp_path / "ours", {"w": raw}, dtypes={"w": "BF16"})
    safetensors.torch.save_file({"w": values}, tmp_path / "theirs")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "ours")["w"].view(torch.int16), bits)
    assert np.array_equal(safetensors_file.read(tmp_path / "theirs")["w"], raw)
    wide = safetensors_file.to_float32(raw, "BF16")
    assert np.array_equal(wide, values.to(torch.float32).numpy(), equal_nan=True)


def test_float16_widens_to_the_values_of_torch():
    raw = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    theirs = torch.from_numpy(raw.copy()).to(torch.float32).numpy()
    assert np.array_equal(safetensors_file.to_float32(raw, "F16"), theirs, equal_nan=True)


def test_header_aligns_data_and_orders_tensors_canonically():
    layout = (Tensor("z", "F16", (3,)), Tensor("b", "F32", (1,)), Tensor("a", "F32", (2,)), Tensor("n", "I64", ()))
    raw = header_bytes(in_order(layout))
    entries = json.loads(raw[8:])
    assert len(raw) % 8 == 0
    assert len(raw) == 8 + int.from_bytes(raw[:8], "little")
    assert [(name, e["data_offsets"]) for name, e in entries.items()] == [
        ("n", [0, 8]),
        ("a", [8, 16]),
        ("b", [16, 20]),
        ("z", [20, 26]),
    ]


def test_header_of_five_thousand_tensors_fits(tmp_path):
    layout = [
        Tensor(f"model.layers.{i}.self_attention.query_projection.weight" * 3, "F32", (0, 7)) for i in range(5000)
    ]
    (tmp_path / "m").write_bytes(header_bytes(in_order(layout)))
    parsed, _ = safetensors_file.parse_header(tmp_path / "m")
    assert parsed == in_order(layout)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ([Tensor("a", "F32", (1,)), Tensor("a", "I8", (1,))], "'a' is taken"),
        ([Tensor("__metadata__", "F32", (1,))], "'__metadata__' is taken"),
        ([Tensor("a", "F64", (1,))], "'F64' of tensor 'a' is not one of"),
        ([Tensor("a", "F32", (-1,))], "negative length"),
        ([Tensor("a" * HEADER_BYTES_MAX, "F32", (1,))], "is longer than"),
    ],
)
def test_header_refuses_what_no_reader_would_take(layout, fault):
    with pytest.raises(ValueError, match=fault):
        header_bytes(layout)


CORRUPTIONS = {
    "empty file": (b"", "header of 0 bytes in a file of 0"),
    "short length": (b"\x02\x00", "in a file of 2"),
    "length beyond file": (struct.pack("<Q", 3) + b"{}", "header of 3 bytes"),
    "huge length": (struct.pack("<Q", 1 << 63) + b"{}", "header of 9223372036854775808 bytes"),
    "no json": (framed(b"{]"), "Expecting property name"),
    "no table": (framed(b"[]"), "does not begin with {"),
    "leading space": (framed(b" {}"), "does not begin with {"),
    "no utf-8": (framed(b'{"\xff":1}'), "utf-8"),
    "deep": (framed(b'{"a":' + b"[" * 200_000), "nested too deeply"),
    "long number": (framed(b'{"a":' + b"9" * 5000 + b"}"), "integer string conversion"),
    "twice": (framed(b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":1}', data=bytes(4)), "a key twice"),
    "field twice": (framed(b'{"a":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,0]}}'), "a key twice"),
    "other field": (framed({"a": entry(stride=[1])}, data=bytes(8)), "other fields"),
    "missing field": (framed({"a": {"dtype": "F32", "shape": [2]}}, data=bytes(8)), "other fields"),
    "no entry": (framed({"a": 1}), "other fields"),
    "metadata": (framed({"__metadata__": {"a": 1}}), "not a table of strings"),
    "metadata list": (framed({"__metadata__": []}), "not a table of strings"),
    "unknown dtype": (framed({"a": entry(dtype="F64")}, data=bytes(8)), "dtype 'F64' of tensor 'a' is not one of F32"),
    "dtype no text": (framed({"a": entry(dtype=[])}, data=bytes(8)), r"dtype \[\]"),
    "negative": (framed({"a": entry(shape=[-2])}, data=bytes(8)), "shape of tensor 'a'"),
    "fraction": (framed({"a": entry(shape=[2.0])}, data=bytes(8)), "shape of tensor 'a'"),
    "boolean": (framed({"a": entry(shape=[True, 2])}, data=bytes(8)), "shape of tensor 'a'"),
    "too many axes": (framed({"a": entry(shape=[1] * 64 + [2])}, data=bytes(8)), "at most 64"),
    "three offsets": (framed({"a": entry(data_offsets=[0, 4, 8])}, data=bytes(8)), "a begin and an end"),
    "backwards": (framed({"a": entry(data_offsets=[8, 0])}, data=bytes(8)), r"\[8, 0\]"),
    "gap": (framed({"a": entry(data_offsets=[8, 16])}, data=bytes(16)), r"are not \[0, 8\]"),
    "overlap": (framed({"a": entry(), "b": entry(data_offsets=[4, 12])}, data=bytes(12)), r"are not \[8, 16\]"),
    "wrong size": (framed({"a": entry(shape=[3])}, data=bytes(8)), r"are not \[0, 12\]"),
    "huge shape": (framed({"a": entry(shape=[1 << 62] * 64)}, data=bytes(8)), "data_offsets"),
    "truncated": (framed({"a": entry()}, data=bytes(7)), "tensors have 8 bytes, the file has 7"),
    "trailing": (framed({"a": entry()}, data=bytes(9)), "tensors have 8 bytes, the file has 9"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_header_is_refused_with_path_and_fault_when_corrupted(tmp_path, kind):
    raw, fault = CORRUPTIONS[kind]
    path = tmp_path / "model"
    path.write_bytes(raw)
    with pytest.raises(TensorFileCorrupted, match=fault) as caught:
        safetensors_file.parse_header(path)
    assert str(path) in str(caught.value)


def test_header_of_the_corruption_table_is_accepted_when_sound(tmp_path):
    (tmp_path / "m").write_bytes(framed({"a": entry()}, data=bytes(8)))
    assert safetensors_file.parse_header(tmp_path / "m")[0] == (Tensor("a", "F32", (2,)),)


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3), st.integers(0, 3)), min_size=1, max_size=4))
@example(edits=[(0, b"\xff", 1)])
def test_mutated_file_reads_soundly_or_is_corrupted_and_nothing_else(tmp_path_factory, edits):
    path = tmp_path_factory.getbasetemp() / "mutated"
    safetensors_file.write(path, {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.int8)}, metadata={"k": "v"})
    raw = path.read_bytes()
    for at, new, skipped in edits:
        raw = raw[:at] + new + raw[at + skipped :]
    path.write_bytes(raw)
    try:
        layout, data_start = safetensors_file.parse_header(path)
    except TensorFileCorrupted:
        return
    assert data_start + sum(tensor.num_bytes for tensor in layout) == len(raw)
    assert {
        tensor.name: array.shape for tensor, array in zip(layout, safetensors_file.read(path).values(), strict=True)
    } == {tensor.name: tensor.shape for tensor in layout}


def test_writer_gives_one_file_whatever_the_blocks(tmp_path):
    layout = (Tensor("w", "F32", (5, 2)), Tensor("none", "F32", (0, 2)), Tensor("n", "I64", ()))
    values, count = np.arange(10, dtype=np.float32), np.array([7], np.int64)
    files = []
    for size in (1, 3, 10):
        with TensorFileWriter(tmp_path / "m", layout) as writer:
            writer.append(count)
            for begin in range(0, 10, size):
                writer.append(values[begin : begin + size])
            pieces = writer.finish()
        files.append((pieces, (tmp_path / "m").read_bytes()))
    assert files[0] == files[1] == files[2]
    digests = [hashlib.sha256(raw).hexdigest() for raw in (count.tobytes(), b"", values.tobytes())]
    assert pieces == (
        Piece("n", "I64", (), (), digests[0]),
        Piece("none", "F32", (0, 0), (0, 2), digests[1]),
        Piece("w", "F32", (0, 0), (5, 2), digests[2]),
    )


def test_writer_leaves_the_old_file_and_no_part_when_it_does_not_finish(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"old")
    with TensorFileWriter(path, (Tensor("w", "F32", (2,)),)) as writer:
        writer.append(np.zeros(1, np.float32))
        assert sorted(tmp_path.iterdir()) == [path, tmp_path / "m.part"]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writer_syncs_the_file_before_it_appears_and_the_folder_after(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(fd):
        steps.append(os.readlink(f"/proc/self/fd/{fd}"))
        steps.append(os.fstat(fd).st_size)
        fsync(fd)

    def recorded_replace(source, target):
        steps.append((source, target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    path, part = tmp_path / "m", tmp_path / "m.part"
    safetensors_file.write(path, {"w": np.ones(3, np.float32)})
    assert steps[:3] == [str(part), path.stat().st_size, (part, path)]
    assert steps[3] == str(tmp_path)


def test_writer_overwrites_the_part_of_a_crash(tmp_path):
    (tmp_path / "m.part").write_bytes(b"x" * 1000)
    safetensors_file.write(tmp_path / "m", {"w": np.ones(2, np.float32)})
    assert np.array_equal(safetensors_file.read(tmp_path / "m")["w"], np.ones(2, np.float32))
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


def test_writer_refuses_blocks_that_do_not_fit(tmp_path):
    with TensorFileWriter(tmp_path / "m", (Tensor("w", "F32", (2,)),)) as writer:
        with pytest.raises(ValueError, match="does not fit tensor 'w'"):
            writer.append(np.zeros(3, np.float32))
        with pytest.raises(ValueError, match="does not fit tensor 'w'"):
            writer.append(np.zeros(1, np.float64))
        with pytest.raises(ValueError, match="'w' is not complete"):
            writer.finish()
        writer.append(np.zeros(2, np.float32))
        with pytest.raises(ValueError, match="follows the last tensor"):
            writer.append(np.zeros(1, np.float32))
        writer.finish()


def test_write_takes_strided_arrays_and_refuses_dtypes_that_may_not_travel(tmp_path):
    strided = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    safetensors_file.write(tmp_path / "m", {"w": strided})
    assert np.array_equal(safetensors_file.read(tmp_path / "m")["w"], strided)
    for array in (np.zeros(2), np.zeros(2, np.uint16), np.zeros(2, ">f4"), np.zeros(2, bool)):
        with pytest.raises(ValueError, match="of tensor 'w' is not one of F32"):
            safetensors_file.write(tmp_path / "n", {"w": array})
    with pytest.raises(ValueError, match="does not fit"):
        safetensors_file.write(tmp_path / "n", {"w": strided}, dtypes={"w": "BF16"})
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


def test_reading_names_the_path_when_the_file_ends_too_early(tmp_path: Path):
    (tmp_path / "m").write_bytes(bytes(10))
    with (tmp_path / "m").open("rb") as file, pytest.raises(TensorFileCorrupted, match=r"m: ends at byte 10, 2 bytes"):
        safetensors_file.read_into(np.empty(2, np.float32), file.fileno(), 4, path=tmp_path / "m")


def test_what_is_written_into_a_mapped_file_never_gets_there(tmp_path):
    path = tmp_path / "m"
    safetensors_file.write(
        path, {"a": np.arange(5000, dtype=np.float32), "b": np.zeros(3, np.uint8), "c": np.float32([1])}
    )
    before, arrays, others = path.read_bytes(), safetensors_file.mapped(path), safetensors_file.mapped(path)
    for array in arrays.values():
        array += 1
    assert path.read_bytes() == before
    assert {name: float(array.sum()) for name, array in others.items()} == {"a": 12_497_500, "b": 0, "c": 1}
    path.unlink()
    assert {name: float(array.sum()) for name, array in arrays.items()} == {"a": 12_502_500, "b": 3, "c": 2}


def test_a_tensor_that_does_not_lie_at_a_multiple_of_its_items_is_copied(tmp_path):
    header = {"u": entry(dtype="U8", shape=[1], data_offsets=[0, 1]), "w": entry(data_offsets=[1, 9])}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    (tmp_path / "m").write_bytes(framed(raw, data=b"\7" + np.float32([1.5, -2]).tobytes()))
    arrays = safetensors_file.mapped(tmp_path / "m")
    assert arrays["w"].flags.aligned
    assert (arrays["u"].tolist(), arrays["w"].tolist()) == ([7], [1.5, -2])


def test_a_mapped_file_is_refused_like_one_that_is_read(tmp_path):
    (tmp_path / "m").write_bytes(framed({"w": entry()}, data=bytes(7)))
    with pytest.raises(TensorFileCorrupted, match=re.escape(str(tmp_path / "m"))):
        safetensors_file.mapped(tmp_path / "m")
    (tmp_path / "m").write_bytes(b"")
    with pytest.raises(TensorFileCorrupted, match=re.escape(str(tmp_path / "m"))):
        safetensors_file.mapped(tmp_path / "m")


def test_a_model_tells_its_buffers(tmp_path):
    array = np.ones(2, np.float32)
    safetensors_file.write(tmp_path / "m", {"w": array}, metadata={safetensors_file.BUFFERS: '["mean", "var"]'})
    assert safetensors_file.read_buffers(tmp_path / "m") == {"mean", "var"}
    safetensors_file.write(tmp_path / "m", {"w": array})
    assert safetensors_file.read_buffers(tmp_path / "m") == frozenset()


@pytest.mark.parametrize("note", ["", "{}", '"var"', "[1]", "nonsense"])
def test_a_note_of_buffers_that_is_no_list_of_names_is_refused(tmp_path, note):
    safetensors_file.write(tmp_path / "m", {"w": np.ones(2, np.float32)}, metadata={safetensors_file.BUFFERS: note})
    with pytest.raises(TensorFileCorrupted, match="the header's entry 'buffers' is no"):
        safetensors_file.read_buffers(tmp_path / "m")


def test_a_version_s_large_tensor_is_written_in_pieces(tmp_path):
    array = np.arange(3_000_000, dtype=np.float32).reshape(1000, 3000)
    pieces = safetensors_file.write(tmp_path / "m", {"w": array, "steps": np.array(3)}, piece_bytes=1 << 22)
    assert [(p.tensor, p.offsets, p.lengths) for p in pieces] == [
        ("steps", (), ()),
        *(("w", (row, 0), (min(349, 1000 - row), 3000)) for row in range(0, 1000, 349)),
    ]
    for piece in pieces[1:]:
        rows = array[piece.offsets[0] : piece.offsets[0] + piece.lengths[0]]
        assert piece.sha256 == hashlib.sha256(rows.tobytes()).hexdigest()
    with TensorFileWriter(tmp_path / "n", (Tensor("w", "F32", array.shape),), piece_bytes=1 << 22) as writer:
        for start in range(0, array.size, 70_001):  # blocks need not end where pieces do
            writer.append(array.reshape(-1)[start : start + 70_001])
        assert writer.finish() == pieces[1:]


@given(layout=layouts, piece_bytes=st.integers(8, 200))
def test_pieces_of_arrays_in_memory_are_those_that_their_file_would_have(tmp_path_factory, layout, piece_bytes):
    tensors = in_order(Tensor(name, dtype, shape) for name, (dtype, shape) in layout.items())
    random = np.random.default_rng(0)
    arrays = {t.name: np.frombuffer(random.bytes(t.num_bytes), NUMPY[t.dtype]).reshape(t.shape) for t in tensors}
    path = tmp_path_factory.mktemp("pieces") / "m"
    written = safetensors_file.write(path, arrays, piece_bytes=piece_bytes)
    assert safetensors_file.pieces_of(tensors, arrays, piece_bytes) == written
