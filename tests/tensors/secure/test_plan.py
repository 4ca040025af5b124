"""The encoding that another party has told: every number out of its range is refused before anything is encoded."""

import math

import pytest

from atoll.tensors.layout import Tensor
from atoll.tensors.secure.plan import Encoding, Vector

GOOD = {"bits": 32, "clip_norm": 1.0, "exponents": (0, -24), "examples_max": 10, "metrics": (("a", 2), ("loss", 2))}


def test_what_is_in_range_is_accepted():
    assert Encoding(**GOOD).ranges == (1.0, 2.0**-24)
    assert Encoding(**{**GOOD, "clip_norm": 1e-300}).ranges[0] == 1e-300


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 16}, "bits 16 are not 32 or 64"),
        ({"clip_norm": 0.0}, "clip_norm 0.0 is not a finite number above 0"),
        ({"clip_norm": -1.0}, "clip_norm -1.0 is not"),
        ({"clip_norm": math.nan}, "clip_norm nan is not"),
        ({"clip_norm": math.inf}, "clip_norm inf is not"),
        ({"examples_max": -1}, "examples_max -1 is not"),
        ({"examples_max": math.nan}, "examples_max nan is not"),
        ({"exponents": (0, 1)}, r"the exponent 1 of a range is not in -24\.\.0"),
        ({"exponents": (-2000, 0)}, "the exponent -2000 of a range is not in"),
        ({"metrics": (("loss", 2), ("a", 2))}, "the metrics are not in the order of their names"),
        ({"metrics": (("a", 10_001),)}, "1 metric of 10001 sums"),
        ({"bits": 8, "clip_norm": 0.0}, "bits 8 are not 32 or 64; clip_norm 0.0 is not"),
    ],
)
def test_what_is_out_of_range_is_refused(changes, words):
    """flower#7633: a clip range of 0 or less was accepted."""
    with pytest.raises(ValueError, match=words):
        Encoding(**{**GOOD, **changes})


def test_a_vector_needs_a_range_for_each_float_tensor():
    layout = (Tensor("w", "F32", (2,)), Tensor("v", "F32", ()), Tensor("n", "I64", ()))
    assert list(Vector(layout, Encoding(**GOOD)).ranges) == ["v", "w"]
    with pytest.raises(ValueError, match="2 ranges for 1 float tensor"):
        Vector(layout[1:], Encoding(**GOOD))
