import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors.box_reader import BoxReader
from atoll.tensors.layout import Piece
from atoll.tensors.pieces import cut_layout
from atoll.tensors.safetensors_file import parse_header, write

SHAPES = {"a": (3, 4, 5), "b": (7,), "c": (), "d": (2, 6), "none": (0, 4), "nothing": (0,), "thin": (3, 0)}


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    path = tmp_path_factory.mktemp("boxes") / "v.safetensors"
    write(path, arrays)
    return arrays, path, *parse_header(path)


@st.composite
def boxes(draw):
    name = draw(st.sampled_from(sorted(SHAPES)))
    offsets, lengths = [], []
    for size in SHAPES[name]:
        offset = draw(st.integers(0, max(size - 1, 0)))
        offsets.append(offset)
        lengths.append(draw(st.integers(min(1, size), size - offset)))
    return Piece(name, "F32", tuple(offsets), tuple(lengths), "")


@settings(max_examples=200, deadline=None)
@given(wanted=st.lists(boxes(), min_size=1, max_size=4), data=st.data())
def test_any_range_of_any_boxes_equals_numpys_slices(version, wanted, data):
    arrays, path, layout, data_start = version
    expected = b"".join(
        arrays[box.tensor][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))].tobytes()
        for box in wanted
    )
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    with BoxReader(path, layout, data_start, wanted) as reader:
        assert reader.read(start, stop) == expected[start:stop]


@pytest.mark.parametrize("empty", ["none", "nothing", "thin"])
def test_an_empty_tensor_between_others_has_no_bytes(version, empty):
    arrays, path, layout, data_start = version
    whole = {piece.tensor: piece for piece in cut_layout(layout, 1 << 22)}
    with BoxReader(path, layout, data_start, [whole[name] for name in ("b", empty, "c")]) as reader:
        assert reader.read(0, 32) == arrays["b"].tobytes() + arrays["c"].tobytes()


def test_reader_names_the_file_that_is_too_short(version, tmp_path):
    _, path, layout, data_start = version
    whole = list(cut_layout(layout, 1 << 22))
    short = tmp_path / "short"
    short.write_bytes(path.read_bytes()[:-4])
    with BoxReader(short, layout, data_start, whole) as reader, pytest.raises(OSError, match="missing"):
        reader.read(0, sum(piece.num_bytes for piece in whole))
