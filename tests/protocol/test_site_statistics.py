"""The statistics of a site as they travel: every sound answer is read back, every other one is refused by its path."""

import copy
import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.ground.strict_json import ManifestError
from atoll.protocol.site_statistics import BYTES_MAX, decode, encode
from atoll.training.statistics.parts import Histogram, Moments, Numbers, SiteStatistics, count

floats = st.floats(allow_nan=False, allow_infinity=False)
exact = floats.map(Fraction)
counts = st.integers(0, 2**40)
names = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=20)
numbers = st.builds(
    lambda merge, values: Numbers(merge, (len(values),), tuple(values)),
    st.sampled_from(["sum", "min", "max"]),
    st.lists(exact),
)
own_counts = st.lists(st.none() | counts.map(Fraction)).map(lambda v: Numbers("count", (len(v),), tuple(v)))
histograms = st.builds(Histogram, st.dictionaries(names, counts, max_size=5), st.integers(0, 9))


def of_values(values: list[float], missing: int) -> Moments:
    exact = [Fraction(value) for value in values]
    squares = sum((value**2 for value in exact), Fraction())
    extremes = (float(min(values)), float(max(values))) if values else (None, None)
    return Moments(len(values), missing, 0, sum(exact, Fraction()), squares, *extremes)


moments = st.builds(of_values, st.lists(floats, max_size=5), counts)
answers = st.builds(
    lambda parts, withheld: SiteStatistics(dict(parts), withheld),
    st.lists(
        st.tuples(st.tuples(st.just("train"), st.just("own"), names), numbers | own_counts)
        | st.tuples(st.tuples(st.just("test"), st.just("labels"), names), histograms)
        | st.tuples(st.tuples(st.just("train"), st.just("features"), names), moments)
        | st.tuples(st.just(("train", "examples", "")), counts.map(count)),
        max_size=6,
    ),
    st.dictionaries(st.tuples(st.just("test"), st.just("features"), names), names, max_size=2),
)


@given(answers)
def test_an_answer_is_read_back_as_it_is(answer: SiteStatistics) -> None:
    assert decode(encode(answer)) == answer


SOUND = SiteStatistics(
    {
        ("train", "examples", ""): count(3),
        ("train", "labels", "target"): Histogram({"0": 3}),
        ("train", "features", "age"): of_values([1.0, 2.0, 4.5], 0),
        ("train", "own", "x"): Numbers("sum", (2,), (Fraction(1), Fraction(2))),
    }
)


def changed(number: int, **fields: Any) -> dict[str, Any]:
    document = copy.deepcopy(SOUND.plain())
    document["parts"][number][3] |= fields
    return document


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ([], "statistics: got"),
        ({"parts": []}, "key 'withheld' is missing"),
        (SOUND.plain() | {"parts": [["train", "own", "x"]]}, r"allowed: \[split, group, name, value\]"),
        (SOUND.plain() | {"parts": SOUND.plain()["parts"] * 2}, "allowed: each place once"),
        (SOUND.plain() | {"parts": [["dev", *SOUND.plain()["parts"][0][1:]]]}, "allowed: test | train"),
        (SOUND.plain() | {"withheld": [["train", "own", "x", "why\n"]]}, "printable"),
        (changed(0, values=["-3p0"]), "whole numbers >= 0"),
        (changed(0, shape=[2], values=["1p0", "1p0"]), "one whole number >= 0 of examples"),
        (changed(0, values=[None]), "one whole number >= 0 of examples"),
        (changed(3, values=[None, "1p0"]), "allowed: numbers"),
        (changed(1, kind="moments"), "parts.1.kind"),
        (changed(1, cells={"0": -1}), "an integer in 0"),
        (changed(1, cells={"0": 1.5}), "an integer in 0"),
        (changed(1, cells={str(k): 1 for k in range(1001)}), "at most 1000 labels"),
        (changed(2, sum="1/3"), "MpE"),
        (changed(2, sum=1.5), "printable character"),
        (changed(2, squares="1p0"), r"count \* squares >= sum\^2"),
        (changed(2, min="x"), "a finite float, or null"),
        (changed(2, count=True), "an integer in 0"),
        (changed(3, merge="mean"), "count | max | min | sum"),
        (changed(3, shape=[3]), "allowed: '?3 numbers"),
        (changed(3, shape=[1] * 9), "at most 8"),
        (changed(3, more=1), "the keys"),
    ],
)
def test_every_other_answer_is_refused_by_its_path(document: Any, fault: str) -> None:
    with pytest.raises(ManifestError, match=fault):
        decode(json.dumps(document).encode())


def test_what_is_no_json_or_too_long_is_refused() -> None:
    for data in (b"{", b'{"parts": NaN}', b"[" * 10_000, b" " * (BYTES_MAX + 1)):
        with pytest.raises(ManifestError):
            decode(data)
