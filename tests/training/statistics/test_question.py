"""The layout of statistics in a secure sum: numbers at fixed places whose sums are those of the pooled rows."""

import json
import random
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from atoll.client.policy.small_cells import StatisticsTerms, guarded
from atoll.ground.strict_json import ManifestError
from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.task.deadline import Deadline
from atoll.task.task import Task
from atoll.training.statistics.of_data import of_task
from atoll.training.statistics.parts import Histogram, Moments, Numbers, SiteStatistics
from atoll.training.statistics.question import (
    EXPONENT_MAX,
    NUMBER_BITS,
    OtherLayout,
    Question,
    asked_parts,
    faults_of,
    numbers_of,
    read_question,
    summed_parts,
)

AGES = (0.0, 40.0, 60.0, 120.0)
QUESTION = Question(("train",), (("target", 3),), (), (("age", AGES), ("pressure", (50.0, 250.0))), seed=7)


class Rows(TensorDataset):
    feature_names = ("age", "pressure")


def rows_of(seed: int, size: int = 200) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    inputs = draws.normal([55, 120], [25, 40], size=(size, 2))
    inputs[draws.random((size, 2)) < 0.1] = np.nan
    inputs[draws.random((size, 2)) < 0.01] = np.inf
    return inputs, draws.integers(0, 5, size)


def site(inputs: np.ndarray, labels: np.ndarray, question: Question | None = QUESTION) -> SiteStatistics:
    task = Task(model=lambda: nn.Linear(2, 3), data=lambda site, split: None, loss=nn.functional.cross_entropy)
    data = Rows(torch.from_numpy(inputs), torch.from_numpy(labels))
    return of_task(task, {"train": data, "test": None}, Deadline.never(), question)


def numbers(statistics: SiteStatistics, question: Question = QUESTION) -> list[int]:
    return numbers_of(asked_parts(statistics, question).parts, question)


def added(*sites: list[int]) -> list[int]:
    return [sum(each) for each in zip(*sites, strict=True)]


def test_the_sum_is_that_of_the_pooled_rows() -> None:
    each = [rows_of(seed, size) for seed, size in ((1, 200), (2, 57), (3, 1), (4, 0))]
    found = summed_parts(added(*(numbers(site(*rows)) for rows in each)), QUESTION, 4)
    inputs, labels = (np.concatenate([rows[k] for rows in each]) for k in (0, 1))
    assert found["train", "examples", ""] == (Numbers("count", (), (Fraction(258),)), 4)
    counts, given = found["train", "labels", "target"]
    assert isinstance(counts, Histogram)
    assert counts.cells == {**{str(k): int((labels == k).sum()) for k in range(3)}, "other": int((labels > 2).sum())}
    assert given == 3, "a site without rows has no labels"
    for place, column, (low, high) in (("age", inputs[:, 0], (0, 120)), ("pressure", inputs[:, 1], (50, 250))):
        moments, _ = found["train", "features", place]
        assert isinstance(moments, Moments)
        within = column[(column >= low) & (column <= high)]
        exact = [Fraction(float(value)) for value in within]
        missing = int(np.isnan(column).sum())
        assert (moments.count, moments.missing) == (len(within), missing)
        assert moments.infinite == len(column) - len(within) - missing, "outside of the range"
        assert moments.mean == float(sum(exact) / len(exact))
        assert moments.variance == pytest.approx(within.var(), rel=1e-12)
        assert moments.least is None
    bins, _ = found["train", "feature_bins", "age"]
    assert isinstance(bins, Histogram)
    assert [*bins.cells] == ["[0, 40)", "[40, 60)", "[60, 120]"]
    known = inputs[:, 0][np.isfinite(inputs[:, 0])]
    assert [*bins.cells.values()] == np.histogram(known, AGES)[0].tolist()


@given(st.lists(st.floats(-120, 120), min_size=1, max_size=20), st.integers(1, 5))
def test_each_division_of_the_rows_among_sites_gives_the_same_sum_within_a_step(values: list[float], num: int) -> None:
    question = Question(("train",), features=(("age", (-120.0, 120.0)),))
    parts = []
    for k in range(num):
        mine = [Fraction(value) for value in values[k::num]]
        moments = Moments(len(mine), 0, 0, sum(mine, Fraction()), sum((v * v for v in mine), Fraction()))
        examples = Numbers("count", (), (Fraction(len(mine)),))
        parts.append(
            numbers(
                SiteStatistics({("train", "examples", ""): examples, ("train", "features", "age"): moments}), question
            )
        )
    found, _ = summed_parts(added(*parts), question, num)["train", "features", "age"]
    assert isinstance(found, Moments)
    assert found.count == len(values)
    assert abs(found.total - sum(map(Fraction, values), Fraction())) <= num * Fraction(1, 2**67)
    assert abs(found.squares - sum((Fraction(v) ** 2 for v in values), Fraction())) <= num * Fraction(1, 2**60)


def test_what_the_policy_leaves_out_of_one_site_is_0_in_the_sum_and_never_a_small_count() -> None:
    terms = StatisticsTerms(Disclosure(MetricsLeave.MERGED), min_count=10)
    small, large = rows_of(5, 12), rows_of(6, 400)
    for rows in (small, large):
        rows[1][:] = np.arange(len(rows[1])) % 2
    small[1][:3] = 2
    small[0][0, 0] = np.nan
    each = []
    for rows in (small, large):
        kept = guarded(asked_parts(site(*rows), QUESTION), terms)
        mine = numbers_of(kept.parts, QUESTION)
        counts = summed_parts(mine, QUESTION, 1)
        for part, _ in counts.values():
            cells = part.cells.values() if isinstance(part, Histogram) else ()
            assert all(cell == 0 or cell >= 10 for cell in cells)
        each.append(mine)
    found = summed_parts(added(*each), QUESTION, 2)
    assert ("train", "features", "pressure") in found
    for place in (("train", "features", "age"), ("train", "feature_bins", "age")):
        assert found[place][1] == 1, "one value is missing at the small site"


def test_bins_of_a_column_that_is_left_out_are_left_out_too() -> None:
    inputs, labels = rows_of(8)
    parts = dict(asked_parts(site(inputs, labels), QUESTION).parts)
    del parts["train", "features", "age"]
    found = summed_parts(numbers_of(parts, QUESTION), QUESTION, 1)
    assert ("train", "feature_bins", "age") not in found
    assert ("train", "feature_bins", "pressure") in found


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (replace(QUESTION, features=(("weight", (0.0, 1.0)),)), "this site's train data has no feature 'weight'"),
        (replace(QUESTION, labels=(("stage", 3),)), "this site's train data has no label 'stage'"),
        (replace(QUESTION, targets=(("target", (0.0, 1.0)),)), "this site's train data has no target 'target'"),
    ],
)
def test_a_site_with_another_layout_declines_by_the_part_alone(question: Question, said: str) -> None:
    with pytest.raises(OtherLayout, match=said):
        asked_parts(site(*rows_of(9), question), question)


def test_nothing_that_is_declined_depends_on_values() -> None:
    for seed in range(5):
        inputs, labels = rows_of(seed, 30)
        assert len(numbers(site(inputs * 10.0**seed, labels * 1000 - 7))) == QUESTION.num_numbers


def test_a_site_without_the_split_or_without_rows_adds_zeros() -> None:
    assert set(numbers(SiteStatistics({}))) == {0}
    empty = numbers(site(*rows_of(1, 0)))
    assert empty[0] == 1, "its number of examples, 0, is known"
    assert set(empty[1:]) == {0}


def test_numbers_that_could_overflow_are_refused_at_the_site() -> None:
    examples = Numbers("count", (), (Fraction(2**41),))
    with pytest.raises(OtherLayout, match=r"more than 2\^40 rows"):
        asked_parts(SiteStatistics({("train", "examples", ""): examples}), Question(("train",)))
    beyond = Moments(1, 0, 0, Fraction(2**60), Fraction(2**120))
    with pytest.raises(OtherLayout, match=r"beyond 2\^114 steps"):
        numbers_of({("train", "features", "age"): beyond}, Question(("train",), features=(("age", (0.0, 1.0)),)))


def test_the_largest_numbers_of_64_sites_fit() -> None:
    question = Question(("train",), features=(("x", (-(2.0**EXPONENT_MAX), 2.0**EXPONENT_MAX)),))
    assert not [*faults_of(question)]
    most = Moments(2**40, 0, 0, Fraction(2 ** (40 + EXPONENT_MAX)), Fraction(2 ** (40 + 2 * EXPONENT_MAX)))
    mine = numbers_of({("train", "features", "x"): most}, question)
    assert max(mine) == 1 << NUMBER_BITS


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (Question(()), "splits: got []: allowed is train, test, or both"),
        (Question(("train", "train")), "splits: got ['train', 'train']"),
        (Question(("train",), features=(("x", (1.0,)),)), "features.x: got [1.0]: allowed are 2 to 1001 edges"),
        (Question(("train",), features=(("x", (1.0, 1.0)),)), "each above the one before"),
        (Question(("train",), targets=(("y", (0.0, 1e12)),)), "targets.y: got an edge 1e+12, and the sum of squares"),
        (Question(("train",), labels=(("a", 2), ("a", 2))), "labels: got a name twice"),
        (Question(("train",), labels=tuple((f"y{k}", 1000) for k in range(10))), "allowed are at most 10000"),
    ],
)
def test_a_layout_that_sites_cannot_add_is_refused(question: Question, said: str) -> None:
    assert said in " ".join(faults_of(question))
    with pytest.raises(ManifestError):
        read_question(question.text.encode())


def test_a_layout_is_read_as_it_was_written_and_in_one_form_alone() -> None:
    text = QUESTION.text
    assert read_question(text.encode()) == QUESTION
    assert read_question(text.encode()).digest == QUESTION.digest
    plain = json.loads(text)
    for change in ({"seed": -1}, {"seed": 1.0}, {"more": 1}, {"splits": ["all"]}, {"features": [["age", [0, 1]]]}):
        with pytest.raises(ManifestError):
            read_question(json.dumps(plain | change, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(ManifestError):
        read_question(json.dumps(plain).encode())


@pytest.mark.parametrize("seed", range(20))
def test_changed_bytes_of_a_layout_are_refused_or_are_another_layout(seed: int) -> None:
    draw, data = random.Random(seed), bytearray(QUESTION.text.encode())
    for _ in range(draw.randint(1, 3)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    with suppress(ManifestError):
        assert read_question(bytes(data)).text.encode() == bytes(data)


def test_a_sum_that_no_sites_can_have_made_is_refused() -> None:
    right = numbers(site(*rows_of(3)))
    summed_parts(right, QUESTION, 1)
    changes: list[tuple[int, Any]] = [(0, 2), (0, -1), (1, -1)]
    for at, wrong in changes:
        with pytest.raises(ValueError, match="train"):
            summed_parts([*right[:at], wrong, *right[at + 1 :]], QUESTION, 1)


def test_a_phrase_names_what_is_asked() -> None:
    said = "train: examples, labels of target (3), age within 0 to 120 (3 bins), pressure within 50 to 250 (1 bin)"
    assert QUESTION.in_words() == said
