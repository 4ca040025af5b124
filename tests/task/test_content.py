"""The content of a message as tensors of bytes: every dtype and shape comes back as it was."""

import numpy as np
import pytest

from atoll.task.content import Content, from_tensors, to_tensors
from atoll.task.errors import TaskBroken

ARRAYS = {
    "float64": np.linspace(0, 1, 5),
    "float16": np.array([[1, 2]], np.float16),
    "bool": np.array([True, False]),
    "uint16": np.array([65535], np.uint16),
    "empty": np.zeros((0, 3), np.float32),
    "zero-dim": np.array(3, np.int64),
    "big-endian": np.arange(3, dtype=">i4"),
    "complex": np.array([1j]),
    "strided": np.arange(10)[::2],
    "nan": np.array([np.nan, np.inf]),
}


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


def test_every_array_comes_back_as_it_was() -> None:
    plain = {"config": [["lr", 0.1], ["names", ["a", "\U0001f600"]]], "none": None}
    tensors = to_tensors(Content(plain, ARRAYS))
    assert {array.dtype for array in tensors.values()} == {np.dtype(np.uint8)}
    back = from_tensors(tensors)
    assert back.plain == plain
    assert list(back.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert back.arrays[name].dtype == array.dtype
        assert back.arrays[name].shape == array.shape
        assert back.arrays[name].tobytes() == array.tobytes()


def test_equal_contents_have_equal_tensors() -> None:
    one, two = to_tensors(Content({"b": 1, "a": 2})), to_tensors(Content({"a": 2, "b": 1}))
    assert one["000000"].tobytes() == two["000000"].tobytes()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (Content(object()), "must be a JSON value"),
        (Content(None, {"o": np.array([object()])}), "dtype object"),
        (Content([{"a": {None: 1}}]), "has the key None"),
        (Content({1: 1}), "has the key 1"),
        (Content(nested(5000)), "must be a JSON value"),
        (Content({"name": "\ud800"}), "lone surrogate"),
        (Content(None, {"\udfff": np.zeros(1)}), "lone surrogate"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(content: Content, says: str) -> None:
    with pytest.raises(TaskBroken, match=says):
        to_tensors(content)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"arrays": [["a", "<f4", [9]]], "plain": 0}',
        b'{"arrays": [["a", "O", [1]]], "plain": 0}',
        b'{"arrays": [], "plain": 0}',
        b'{"arrays": [["a", "<f4", [-1]]], "plain": 0}',
    ],
)
def test_tensors_of_another_form_are_refused(header: bytes) -> None:
    tensors = {"000000": np.frombuffer(header, np.uint8), "000001": np.zeros(8, np.uint8)}
    with pytest.raises(ValueError, match="not the content of a message"):
        from_tensors(tensors)


@pytest.mark.parametrize("row", ['"<f4", [10]', '"<f4", [10000000000000]', '"|V0", [10]', '"f4,(", [0]', '"f4", []'])
def test_an_array_of_other_bytes_than_its_shape_has_is_refused(row: str) -> None:
    header = np.frombuffer(f'{{"arrays": [["a", {row}]], "plain": 0}}'.encode(), np.uint8)
    with pytest.raises(ValueError, match="not the content of a message"):
        from_tensors({"000000": header, "000001": np.zeros(0, np.uint8)})


@pytest.mark.parametrize("names", ['"a", "a"', '"a", 1'])
def test_arrays_need_names_of_their_own(names: str) -> None:
    rows = ", ".join(f'[{name}, "|u1", [1]]' for name in names.split(", "))
    header = np.frombuffer(f'{{"arrays": [{rows}], "plain": 0}}'.encode(), np.uint8)
    with pytest.raises(ValueError, match="the names of its arrays"):
        from_tensors({"000000": header, "000001": np.zeros(1, np.uint8), "000002": np.zeros(1, np.uint8)})
