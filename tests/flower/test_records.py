"""Flower's records as contents and as arrays: nothing changes on the way; what has no mean is refused by name."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from atoll.flower.records import arrays_of, casts_of, from_content, record_of, to_content
from atoll.task.content import Content, from_tensors, to_tensors
from atoll.task.errors import TaskBroken


def record(**arrays):
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


ODD = RecordDict(
    {
        "several": record(w=np.arange(6, dtype=np.float64).reshape(2, 3), flags=np.array([True, False])),
        "arrays": record(empty=np.zeros((0, 4), np.float32), scalar=np.float16(1.5), big=np.uint64(2**63)),
        "nothing": ArrayRecord(),
        "metrics": MetricRecord({"loss": 0.25, "n": 3, "by_class": [0.5, 1.0], "counts": [1, 2]}),
        "config": ConfigRecord(
            {"b": b"\x00\xff", "bs": [b"", b"x"], "flag": True, "texts": ["ä", ""], "x": 1, "none": [], "f": [0.1]}
        ),
    }
)


def test_every_kind_of_record_comes_back_as_it_was():
    found = from_content(from_tensors(to_tensors(to_content(ODD))))
    assert list(found) == list(ODD)
    assert all(found[name] == ODD[name] and type(found[name]) is type(ODD[name]) for name in ODD)
    assert type(found["config"]["flag"]) is bool
    assert found["arrays"]["scalar"].numpy().shape == ()


@pytest.mark.parametrize("broken", [None, [1], [["w", "arrays", [["w", "<f4", [1], "numpy.ndarray", "0"]]]]], ids=repr)
def test_other_contents_are_refused(broken):
    with pytest.raises(ValueError, match="not records of Flower"):
        from_content(Content(broken))


def test_wide_floats_travel_as_float32_and_come_back_as_they_were():
    given = record(w=np.array([1.5, -2.0]), half=np.zeros((), np.float16), n=np.int64(7))
    arrays, casts = arrays_of(given), casts_of(given)
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "w": "float32", "half": "float32", "n": "int64"
    }  # fmt: skip
    back = record_of(arrays, ["w", "half", "n"], casts)
    assert {name: array.dtype for name, array in back.items()} == {name: a.dtype for name, a in given.items()}
    assert all(np.array_equal(back[name].numpy(), given[name].numpy()) for name in given)
    assert back["half"].numpy().shape == ()


def test_arrays_that_have_no_mean_are_refused_together():
    with pytest.raises(TaskBroken, match=r"flags is bool.*; z is complex128"):
        arrays_of(record(flags=np.array([True]), z=np.array([1j])))
    with pytest.raises(TaskBroken, match="no array in the record"):
        arrays_of(ArrayRecord())


def test_an_app_that_changes_its_arrays_does_not_change_ours():
    arrays = {"w": np.ones(3, np.float32)}
    handed = record_of(arrays, ["w"], {})["w"].numpy()
    handed[:] = 5
    assert arrays["w"].tolist() == [1, 1, 1]
