import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import Metric
from atoll.task import metrics
from atoll.task.metrics import Statistics

whole = st.integers(-(2**40), 2**40).map(float)
finite = st.floats(allow_nan=False, allow_infinity=False)


def pairs(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[list[Statistics]]:
    one: st.SearchStrategy[Any] = st.fixed_dictionaries(
        {"a": st.tuples(numbers, numbers)}, optional={"b": st.tuples(numbers)}
    )
    return st.lists(one, min_size=1, max_size=8)


@given(pairs(finite), st.randoms(use_true_random=False))
def test_merge_does_not_depend_on_the_order(many: list[Statistics], random: object) -> None:
    shuffled = list(many)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert metrics.merge(shuffled) == metrics.merge(many)


@given(pairs(whole), st.data())
def test_merge_of_whole_numbers_does_not_depend_on_the_split(many: list[Statistics], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(many)))
    parts = [metrics.merge(part) for part in (many[:cut], many[cut:]) if part]
    assert metrics.merge(parts) == metrics.merge(many)


@given(st.lists(finite, min_size=1, max_size=6), st.data())
def test_merge_of_any_numbers_depends_on_the_split_by_rounding_alone(numbers: list[float], data: st.DataObject) -> None:
    many: list[Statistics] = [{"a": (x / 8,)} for x in numbers]  # no overflow
    cut = data.draw(st.integers(1, len(many)))
    parts = [metrics.merge(part) for part in (many[:cut], many[cut:]) if part]
    tolerance = 4 * math.ulp(math.fsum(abs(x) / 8 for x in numbers))
    assert abs(metrics.merge(parts)["a"][0] - metrics.merge(many)["a"][0]) <= tolerance


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0.1] * 10, 1.0),
        ([1e308, 1e308, -1e308], 1e308),
        ([1e308, 1e308], math.inf),
        ([-1e308, -1e308], -math.inf),
        ([1e308, 1e308, -math.inf], -math.inf),
        ([math.inf, 1.0], math.inf),
        ([], 0.0),
    ],
)
def test_total_is_the_rounded_sum(numbers: list[float], expected: float) -> None:
    assert metrics.total(numbers) == expected


@pytest.mark.parametrize("numbers", [[math.inf, -math.inf], [math.nan, 1.0], [math.nan, 1e308, 1e308]])
def test_total_without_a_value_is_nan(numbers: list[float]) -> None:
    assert math.isnan(metrics.total(numbers))


def test_value_of_nothing_is_none_and_not_zero() -> None:
    assert metrics.values({}, {"accuracy": (0.0, 0.0)}) == {"accuracy": None}


def test_value_is_the_ratio_unless_the_metric_says_otherwise() -> None:
    root = Metric(statistics=lambda outputs, targets: (), value=lambda sums: math.sqrt(sums[0] / sums[1]))
    sums = {"rmse": (8.0, 2.0), "loss": (8.0, 2.0), "odd": (1.0, 2.0, 3.0)}
    assert metrics.values({"rmse": root}, sums) == {"rmse": 2.0, "loss": 4.0, "odd": None}
    assert metrics.values({"rmse": root}, {"rmse": (0.0, 0.0)}) == {"rmse": None}


def test_a_metric_that_some_leave_out_is_summed_over_the_others() -> None:
    assert metrics.add({"a": (1.0, 2.0)}, {"b": (3.0,)}) == {"a": (1.0, 2.0), "b": (3.0,)}


def test_a_site_with_another_number_of_sums_is_left_out_of_that_metric_alone() -> None:
    sites = [{"a": (1.0,), "loss": (1.0, 2.0)}, {"a": (1.0, 2.0), "loss": (3.0, 4.0)}, {"a": (5.0,)}]
    assert metrics.merge(sites) == {"a": (6.0,), "loss": (4.0, 6.0)}


def test_a_part_of_a_site_with_another_number_of_sums_refuses_the_metric_of_the_site() -> None:
    """The sum of the others would be one of a part of the data."""
    parts = [{"a": (1.0,), "b": (1.0,)}, {"a": (1.0, 2.0), "b": (2.0,)}, {"a": (1.0,), "b": ()}]
    assert metrics.of_parts(parts) == {"a": (), "b": ()}
    assert metrics.add(metrics.add(*parts[:2]), parts[2]) == {"a": (), "b": ()}


@given(st.lists(pairs(st.floats(allow_nan=False, allow_infinity=False)), min_size=1).filter(len))
def test_parts_add_up_in_any_order(many: Any) -> None:
    for parts in many:
        assert metrics.of_parts(parts) == metrics.merge(parts)


def _fails(outputs: Any, targets: Any) -> Any:
    raise KeyError("positives")


ODD: dict[str, tuple[Any, str]] = {
    "three": (lambda o, t: (1.0, 2.0, 3.0), "it returns 3 numbers, and a plain metric returns two"),
    "one": (lambda o, t: [1.0], "it returns 1 number, and a plain metric returns two"),
    "text": (lambda o, t: "ab", "expected a tuple of numbers"),
    "number": (lambda o, t: 0.5, "expected a tuple of numbers"),
    "fails": (_fails, "it raises KeyError: 'positives'"),
    "many": (Metric(lambda o, t: [0.0] * 22_500, len), "it has 22500 sums, and all metrics together may have 10000"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_metric_that_breaks_the_contract_is_left_out_alone_and_named(name: str, caplog: Any) -> None:
    metric, why = ODD[name]
    both = {name: metric, "good": lambda o, t: (1.0, 2.0)}
    metrics._named.clear()
    for _ in range(2):
        assert metrics.sound(both, metrics.of_batch(both, 1, 2)) == {name: (), "good": (1.0, 2.0)}
    (record,) = caplog.records
    assert record.getMessage().startswith(f"metric '{name}' is left out: ")
    assert why in record.getMessage()


def test_a_value_that_fails_is_none_and_named(caplog: Any) -> None:
    metrics._named.clear()
    both = {"last": Metric(lambda o, t: [1.0], lambda sums: sums[3]), "good": Metric(lambda o, t: [1.0], sum)}
    assert metrics.values(both, {"last": (1.0,), "good": (1.0,)}) == {"last": None, "good": 1.0}
    assert "value raises IndexError" in caplog.records[0].getMessage()


def test_what_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"metric accuracy: expected a tuple of numbers, got 0\.5"):
        metrics.as_statistics({"accuracy": 0.5})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201, 7])
def test_a_name_that_does_not_print_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="allowed: 1 to 200 printable characters"):
        metrics.as_statistics({name: (1.0, 2.0)})


@given(pairs(st.floats()))
def test_refused_sums_leave_the_sum_of_the_others_finite(many: list[Statistics]) -> None:
    """The merge is that of the finite ones alone, metric by metric, however the rest was refused."""
    merged = metrics.merge(map(metrics.only_finite, many))
    for name, found in merged.items():
        good = [sums[name] for sums in many if name in sums and all(map(math.isfinite, sums[name]))]
        assert found == tuple(map(metrics.total, zip(*good, strict=True)))


def test_a_metric_whose_sums_were_refused_has_no_value_and_is_named() -> None:
    sums = metrics.only_finite({"f1": (1.0, math.nan), "loss": (math.inf, 3.0), "good": (1.0, 2.0)})
    assert sums == {"f1": (), "loss": (), "good": (1.0, 2.0)}
    of_tasks = {"f1": Metric(lambda *_: (), value=lambda found: found[0])}
    assert metrics.values(of_tasks, sums) == {"f1": None, "loss": None, "good": 0.5}
    assert metrics.names_refused(sums) == ["f1", "loss"]
    assert metrics.why_refused(sums) == "; ".join(
        f"metric '{name}': its sums are NaN, infinite or left out" for name in ("f1", "loss")
    )
