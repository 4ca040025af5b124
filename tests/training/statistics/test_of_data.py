"""Statistics of data sets against numpy on the pooled rows."""

from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Subset, TensorDataset

from atoll.task.array_values import Valued
from atoll.task.deadline import Deadline
from atoll.task.errors import OutOfTime, TaskBroken
from atoll.task.statistic import Statistic
from atoll.task.task import Task
from atoll.training.statistics import of_data
from atoll.training.statistics.of_data import of_split, of_task
from atoll.training.statistics.parts import Histogram, Moments, Numbers, SiteStatistics, merged

NEVER = Deadline.never()
FEATURES = [("train", "features", f"inputs[{k}]") for k in range(3)]


def rows(num: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return features of very different scales, a tenth of them missing, and labels."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(num, 3)) * [1.0, 1e-3, 1e6] + [0.0, 1e9, -5.0]
    inputs[rng.random(inputs.shape) < 0.1] = np.nan
    return inputs, rng.integers(-1, 4, num)


def data(inputs: np.ndarray, labels: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(labels))


def test_moments_and_labels_are_those_of_numpy_on_the_rows() -> None:
    inputs, labels = rows(3000)
    found = of_split(data(inputs, labels), "train", NEVER)
    for place, column in zip(FEATURES, inputs.T, strict=True):
        part = found.parts[place]
        assert isinstance(part, Moments)
        known = column[~np.isnan(column)]
        assert (part.count, part.missing, part.infinite) == (len(known), len(column) - len(known), 0)
        assert part.mean == pytest.approx(known.mean(), rel=1e-14)
        centered = known - known.mean()
        assert part.variance == pytest.approx((centered @ centered) / len(known), rel=1e-9), "numpy rounds, too"
        assert (part.least, part.greatest) == (known.min(), known.max())
    histogram = found.parts["train", "labels", "target"]
    assert isinstance(histogram, Histogram)
    assert histogram.cells == {str(k): int((labels == k).sum()) for k in range(-1, 4)}
    assert found.parts["train", "examples", ""] == Numbers("count", (), (3000,))


@given(st.lists(st.integers(0, 300), max_size=4), st.randoms())
def test_any_division_among_sites_in_any_order_gives_the_same_bits(cuts: list[int], random: Any) -> None:
    inputs, labels = rows(300)
    whole = of_split(data(inputs, labels), "train", NEVER)
    bounds = [0, *sorted(cuts), 300]
    sites = [of_split(data(inputs[a:b], labels[a:b]), "train", NEVER) for a, b in pairwise(bounds) if a < b]
    random.shuffle(sites)
    for place, part in whole.parts.items():
        assert merged([site.parts[place] for site in sites]) == part, place


def test_the_variance_of_values_far_from_zero_loses_nothing() -> None:
    far = torch.tensor([1e15, 1e15 + 1, 1e15 + 2], dtype=torch.float64)
    part = of_split(TensorDataset(far, torch.zeros(3).long()), "train", NEVER).parts["train", "features", "inputs"]
    assert isinstance(part, Moments)
    assert (part.mean, part.variance) == (1e15 + 1, 2 / 3)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = rows(100)
    whole = of_split(data(inputs, labels), "train", NEVER)
    monkeypatch.setattr(of_data, "BLOCK_ROWS", 7)
    assert of_split(data(inputs, labels), "train", NEVER) == whole


class Named(TensorDataset):
    feature_names = ("age", "pressure", "weight")


def test_columns_have_the_names_of_the_data_set_also_in_a_part_of_it() -> None:
    inputs, labels = rows(20)
    dataset = Named(torch.from_numpy(inputs), torch.from_numpy(labels))
    for found in (of_split(dataset, "test", NEVER), of_split(Subset(dataset, [1, 2]), "test", NEVER)):
        assert [name for _, group, name in found.parts if group == "features"] == ["age", "pressure", "weight"]


class Rows:
    """A data set of a list."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def test_each_tensor_of_a_mapping_is_a_feature_of_its_name_and_texts_are_none() -> None:
    dataset = Rows(
        ({"age": 30.0, "image": torch.ones(2, 4, 4), "note": "x"}, torch.tensor([0.5, 1.5])),
        ({"age": float("inf"), "image": torch.zeros(2, 4, 4), "note": "y"}, torch.tensor([2.5, float("nan")])),
    )
    found = of_split(dataset, "train", NEVER).parts
    assert [place[1:] for place in found] == [
        ("examples", ""),
        ("features", "age"),
        ("features", "image"),
        ("targets", "target[0]"),
        ("targets", "target[1]"),
    ]
    assert found["train", "features", "image"] == Moments(64, 0, 0, 32, 32, 0.0, 1.0)  # type: ignore[arg-type]
    age, target = found["train", "features", "age"], found["train", "targets", "target[1]"]
    assert isinstance(age, Moments)
    assert isinstance(target, Moments)
    assert (age.count, age.infinite, age.total, age.greatest) == (1, 1, 30, 30.0)
    assert (target.count, target.missing, target.mean) == (1, 1, 1.5)


def test_a_column_without_any_value_has_no_mean_and_no_extremes() -> None:
    found = of_split(data(np.full((3, 1), np.nan), np.zeros(3, np.int64)), "train", NEVER)
    part = found.parts["train", "features", "inputs[0]"]
    assert isinstance(part, Moments)
    assert (part.count, part.missing, part.mean, part.variance, part.least) == (0, 3, None, None, None)


@pytest.mark.parametrize(
    ("inputs", "targets", "place", "why"),
    [
        (torch.zeros(1002, 1), torch.arange(1002), ("train", "labels", "target"), "more than 1000 different labels"),
        (
            torch.full((2, 1), 2**53),
            torch.zeros(2).long(),
            ("train", "features", "inputs"),
            "whole numbers beyond 2^53",
        ),
    ],
)
def test_what_is_too_much_is_left_out_by_name(inputs: Any, targets: Any, place: Any, why: str) -> None:
    found = of_split(TensorDataset(inputs, targets), "train", NEVER)
    assert found.withheld == {place: why}
    assert not any(kept[:2] == place[:2] for kept in found.parts)


def test_a_wide_tensor_is_one_feature() -> None:
    found = of_split(TensorDataset(torch.ones(2, 1001), torch.zeros(2).long()), "train", NEVER)
    part = found.parts["train", "features", "inputs"]
    assert isinstance(part, Moments)
    assert part.count == 2002


def test_a_data_set_without_rows_has_zero_examples_and_nothing_else() -> None:
    found = of_split(TensorDataset(torch.ones(0, 2), torch.zeros(0).long()), "test", NEVER)
    assert found == SiteStatistics({("test", "examples", ""): Numbers("count", (), (0,))})  # type: ignore[arg-type]


def test_a_deadline_ends_the_reading() -> None:
    over = Deadline(lambda: 1.0)
    over.move(0.5)
    with pytest.raises(OutOfTime, match="after 0 of 5 rows"):
        of_split(TensorDataset(torch.ones(5, 1), torch.zeros(5).long()), "train", over)


def test_two_columns_of_one_name_are_refused_and_not_added_up() -> None:
    row = ({"a": torch.ones(2), "a[0]": 2.0}, 0)
    with pytest.raises(TaskBroken, match=r"two columns of a row are both named 'a\[0\]'"):
        of_split(Rows(row, row), "train", NEVER)
    row = ({"a.b": 1.0, "a": {"b": 2.0}}, 0)  # type: ignore[dict-item]
    with pytest.raises(TaskBroken, match=r"two tensors of a row are both named 'a\.b'"):
        of_split(Rows(row, row), "train", NEVER)


def test_rows_that_are_no_pairs_are_refused() -> None:
    with pytest.raises(TaskBroken, match="a row must be a pair"):
        of_split(Rows((1.0, 2, 3)), "train", NEVER)


# ---------------------------------------------------------------- a task's own


def task_with(statistics: Any) -> Task:
    return Task(
        model=lambda: nn.Linear(1, 1),
        data=lambda site, split: None,
        loss=nn.functional.mse_loss,
        statistics=statistics,
        options={"scale": 2.0},
    )


def own_of(given: Any) -> SiteStatistics:
    dataset = TensorDataset(torch.ones(4, 1), torch.zeros(4).long())
    return of_task(task_with(lambda data, split: given), {"train": dataset, "test": None}, NEVER)


def test_numbers_arrays_and_tensors_of_every_kind_are_taken_exactly() -> None:
    found = own_of(
        {
            "int": 2**70,
            "float": 0.1,
            "bool": Statistic(True, merge="count"),
            "half": torch.tensor([0.5], dtype=torch.bfloat16),
            "matrix": Statistic(np.arange(4).reshape(2, 2), merge="count"),
            "least": Statistic(np.float32(0.1), merge="min"),
            "nan": float("nan"),
        }
    )
    shown = {name: part.shown()["value"] for (_, group, name), part in found.parts.items() if group == "own"}
    assert shown == {
        "int": 2.0**70,
        "float": 0.1,
        "bool": 1,
        "half": [0.5],
        "matrix": [[0, 1], [2, 3]],
        "least": float(np.float32(0.1)),
    }
    assert found.withheld == {("train", "own", "nan"): "NaN or infinite"}


def test_numbers_are_merged_by_their_rule() -> None:
    def site(value: float) -> Any:
        return own_of({"sum": value, "min": Statistic(value, merge="min"), "max": Statistic([value, 1.0], merge="max")})

    sites = [site(value).parts for value in (0.1, 0.2, -0.3)]
    got = {name: merged([s["train", "own", name] for s in sites]).shown()["value"] for name in ("sum", "min", "max")}
    assert got == {
        "sum": float(sum(map(Fraction, (0.1, 0.2, -0.3)))),
        "min": -0.3,
        "max": [0.2, 1.0],
    }


def test_the_function_sees_the_split_and_may_take_the_context() -> None:
    def statistics(data: Any, split: str, context: Any) -> dict[str, Any]:
        return {split: len(data) * context.options["scale"]}

    dataset = TensorDataset(torch.ones(4, 1), torch.zeros(4).long())
    found = of_task(task_with(statistics), {"train": dataset, "test": dataset}, NEVER)
    assert [place for place in found.parts if place[1] == "own"] == [("train", "own", "train"), ("test", "own", "test")]
    assert found.parts["test", "own", "test"].shown()["value"] == 8


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (3, "must return a mapping from names to numbers, got int"),
        ({"a": "text", "b\n": 1}, "'b\\\\n' is not a name .*a: got str, no number|a: got str.*'b"),
        ({"a": Statistic(1, merge="mean")}, "a: merge is 'mean'; allowed: sum, count, min, max"),  # type: ignore[arg-type]
        ({"a": Statistic(-1, merge="count")}, "a: counts must be whole numbers >= 0"),
        ({"a": Statistic(1.5, merge="count")}, "a: counts must be whole numbers >= 0"),
        ({"a": np.zeros(10_001)}, "10001 numbers; allowed: at most 10000"),
        ({str(k): k for k in range(101)}, "101 names; allowed: at most 100"),
        ({"a": [[1], [1, 2]]}, "a: got list, no number"),
        ({"a": 1j}, "a: got complex, no number"),
        ({"a": 2**2000}, "a: a number of more than 1,024 bits"),
        ({"examples": Statistic(7, merge="count")}, "'examples' is the number of rows already"),
    ],
)
def test_what_is_no_statistic_is_refused_with_all_faults(given: Any, fault: str) -> None:
    with pytest.raises(TaskBroken, match=fault):
        own_of(given)


def test_a_field_that_is_no_function_is_refused_when_the_task_is_made() -> None:
    with pytest.raises(ValueError, match="statistics must be callable or None, got 3"):
        task_with(3)


# ---------------------------------------------------------------- without torch


class Arrays:
    """An `ArrayTask` with statistics."""

    options: dict[str, Any] = {"offset": 1.0}  # noqa: RUF012

    def initial(self, seed: int) -> dict[str, Any]:
        return {}

    def train(self, parameters: Any, instructions: Any) -> Any: ...

    def num_examples(self, site: str) -> int:
        return 5

    def statistics(self, site: str, split: str, context: Any) -> dict[str, Any] | None:
        if split == "test":
            return {"examples": 3, "age": 1.5}
        return {"age": 2.0 + context.options["offset"]} if site == "north" else None


def test_an_array_task_gives_its_own_numbers_and_sizes() -> None:
    from atoll.training.statistics.own import of_array_task

    found = of_array_task(Valued(Arrays(), {"offset": 0.5}), "north").parts
    assert {place: part.shown()["value"] for place, part in found.items()} == {
        ("train", "examples", ""): 5,
        ("train", "own", "age"): 2.5,
        ("test", "examples", ""): 3,
        ("test", "own", "age"): 1.5,
    }
    assert [*of_array_task(Valued(Arrays()), "south").parts][:1] == [("train", "examples", "")]


def test_an_array_task_without_any_says_so() -> None:
    from atoll.training.statistics.own import of_array_task

    class Bare:
        def initial(self, seed: int) -> dict[str, Any]:
            return {}

        def train(self, parameters: Any, instructions: Any) -> Any: ...

    with pytest.raises(TaskBroken, match="gives them by `statistics` or `num_examples`"):
        of_array_task(Bare(), "north")
