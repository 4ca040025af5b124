"""The statistics that leave a site: no small count, no cell that the others tell, no extremes."""

from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.client.policy.small_cells import StatisticsTerms, guarded
from atoll.training.statistics.parts import Histogram, Moments, Numbers, Part, Place, SiteStatistics, count

ALL = ("train", "examples", "")
AGE, LABELS, GROUPS = ("train", "features", "age"), ("train", "labels", "target"), ("train", "own", "groups")


def answer(num_examples: int = 100, **parts: Part) -> SiteStatistics:
    places: dict[str, Place] = {"age": AGE, "labels": LABELS, "groups": GROUPS}
    return SiteStatistics({ALL: count(num_examples), **{places[name]: part for name, part in parts.items()}})


def left(statistics: SiteStatistics, least: int = 10, **fields: Any) -> SiteStatistics:
    return guarded(statistics, StatisticsTerms(min_count=least, **fields))


def moments(num: int, missing: int = 0, infinite: int = 0) -> Moments:
    return Moments(num, missing, infinite, Fraction(num), Fraction(num), 1.0, 1.0)


def counts(*values: int) -> Numbers:
    return Numbers("count", (len(values),), tuple(map(Fraction, values)))


def test_a_small_split_stays_as_a_whole() -> None:
    found = left(answer(9, age=moments(9), labels=Histogram({"0": 9})))
    assert found == SiteStatistics({}, {ALL: "fewer than 10 examples"})


def test_a_split_of_unknown_size_stays_unless_every_count_may_leave() -> None:
    alone = SiteStatistics({("test", "own", "x"): Numbers("sum", (), (Fraction(1),))})
    assert left(alone).withheld == {("test", "examples", ""): "the number of examples is not known"}
    assert left(alone, least=1) == alone


def test_a_feature_with_few_values_missing_or_infinite_ones_stays() -> None:
    for part in (moments(9, 91), moments(91, 9), moments(91, 0, 9)):
        assert AGE in left(answer(age=part)).withheld
    for part in (moments(90, 10), moments(100), moments(0, 100)):
        assert AGE in left(answer(age=part)).parts


def test_extremes_stay_unless_they_are_allowed() -> None:
    statistics = SiteStatistics({**answer(age=moments(100)).parts, GROUPS: Numbers("max", (), (Fraction(7),))})
    without = left(statistics)
    part = without.parts[AGE]
    assert isinstance(part, Moments)
    assert (part.least, part.greatest) == (None, None)
    assert without.withheld == {GROUPS: "extremes stay at this site"}
    assert left(statistics, extremes=True) == statistics


def test_a_single_small_cell_takes_the_next_one_along() -> None:
    found = left(answer(labels=Histogram({"0": 60, "1": 37, "2": 3}))).parts[LABELS]
    assert found == Histogram({"0": 60}, 2), "3 is 100 - 60 - 37"
    groups = left(answer(groups=counts(60, 0, 37, 3))).parts[GROUPS]
    assert groups == Numbers("count", (4,), (Fraction(60), Fraction(0), None, None))


def test_two_small_cells_of_few_examples_take_a_third() -> None:
    assert left(answer(labels=Histogram({"0": 60, "1": 36, "2": 3, "3": 1}))).parts[LABELS] == Histogram({"0": 60}, 3)


def test_without_small_cells_all_leave() -> None:
    statistics = answer(labels=Histogram({"0": 90, "1": 10}), groups=counts(90, 10, 0))
    assert left(statistics) == statistics


cells = st.dictionaries(st.integers(0, 20).map(str), st.integers(0, 40), max_size=8)


@given(cells, st.integers(1, 15), st.integers(0, 30), st.integers(0, 30))
def test_every_count_that_leaves_is_none_or_large_enough(
    cells: dict[str, int], least: int, missing: int, infinite: int
) -> None:
    total = sum(cells.values())
    parts: dict[str, Part] = {"labels": Histogram(cells), "age": moments(total, missing, infinite)}
    parts["groups"] = counts(*cells.values())
    found = left(answer(total, **parts), least).parts
    seen = [int(v) for part in found.values() if isinstance(part, Numbers) for v in part.values if v is not None]
    if isinstance(histogram := found.get(LABELS), Histogram):
        seen += histogram.cells.values()
        hidden = total - sum(histogram.cells.values())
        assert hidden == 0 or (hidden >= least and histogram.num_withheld >= 2), "what is hidden follows from the total"
    if isinstance(age := found.get(AGE), Moments):
        seen += [age.count, age.missing, age.infinite]
    assert all(number == 0 or number >= least for number in seen)


@given(cells)
def test_a_least_count_of_one_changes_nothing_but_extremes(cells: dict[str, int]) -> None:
    statistics = answer(sum(cells.values()), labels=Histogram(cells), groups=counts(*cells.values()))
    assert left(statistics, 1, extremes=True) == statistics
