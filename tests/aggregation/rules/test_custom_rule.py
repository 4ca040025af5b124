"""A user's rule in its run: what it is told, what it may draw, and the refusal of state between calls."""

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.aggregation.rules.combine import combine
from atoll.aggregation.rules.custom_rule import CustomRule, RuleFailed
from atoll.aggregation.rules.geometric import NearestNeighbourMixing
from atoll.plugins.place import Place
from atoll.tensors.layout import Tensor

PLACE = Place(round_id=7, version=5, key="a digest")
TENSOR = Tensor("w", "F32", (300,))
ROWS = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)


class Held:
    """One update as a source."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def carries(self, tensor: str) -> bool:
        return True

    def read(self, tensor: Tensor, start: int, stop: int, out: Any = None) -> Any:
        block = np.empty(stop - start, np.float32) if out is None else out
        block[:] = self.values[start:stop]
        return block


def in_pieces(rule: Any, cuts: list[int]) -> Any:
    guarded = rule if isinstance(rule, NearestNeighbourMixing) else CustomRule(rule)
    borders = [0, *sorted(set(cuts)), 300]
    sources = [Held(row) for row in ROWS]
    return np.concatenate([combine(TENSOR, a, b, sources, guarded, place=PLACE) for a, b in pairwise(borders)])


class Dithered:
    """The mean of two updates that are drawn for the round, with noise for each element."""

    def reduce(self, rows: Any, place: Place) -> Any:
        chosen = place.of_round().permutation(len(rows))[:2]
        return rows[chosen].mean(axis=0, dtype=np.float64) + place.uniform()


@given(st.lists(st.integers(1, 299), max_size=6))
def test_what_a_rule_draws_does_not_depend_on_the_pieces(cuts: list[int]) -> None:
    whole = Dithered().reduce(ROWS.copy(), PLACE.at("w", 0, 300))
    np.testing.assert_allclose(in_pieces(Dithered(), cuts), whole, rtol=1e-12)


def test_a_rule_is_told_round_version_tensor_and_elements() -> None:
    seen = []

    class Telling:
        def reduce(self, rows: Any, place: Place) -> Any:
            seen.append((place.round_id, place.version, place.tensor, rows.shape[1], place.start, place.stop))
            return rows.mean(axis=0, dtype=np.float64)

    in_pieces(Telling(), [100])
    assert {(7, 5, "w", 100, 0, 100), (7, 5, "w", 200, 100, 300)} <= set(seen)
    assert all(stop - start == width for *_, width, start, stop in seen)


def test_other_rounds_versions_and_tensors_draw_otherwise() -> None:
    others = [PLACE, Place(8, 5, "a digest"), Place(7, 5, "another")]
    assert len({place.at("w", 0, 3).of_tensor().random() for place in others}) == 3
    assert PLACE.at("w", 0, 3).of_tensor().random() != PLACE.at("v", 0, 3).of_tensor().random()
    assert PLACE.at("w", 0, 3).of_round().random() == PLACE.at("v", 5, 9).of_round().random()
    np.testing.assert_array_equal(PLACE.at("w", 0, 9).uniform()[4:], PLACE.at("w", 4, 9).uniform())


class Momentum:
    """A rule that adds a part of what it has returned before."""

    def __init__(self) -> None:
        self.last = 0.0

    def reduce(self, rows: Any) -> Any:
        values = rows.mean(axis=0, dtype=np.float64) + 0.9 * self.last
        self.last = float(values[0])
        return values


class Counting:
    """A rule whose rate falls with its calls."""

    calls = 0

    def reduce(self, rows: Any) -> Any:
        self.calls += 1
        return rows.mean(axis=0, dtype=np.float64) / self.calls


class Drawing:
    """A rule that draws from a generator of its own."""

    rng = np.random.default_rng(1)

    def reduce(self, rows: Any) -> Any:
        return rows[self.rng.permutation(len(rows))[0]].astype(np.float64)


class Whole:
    """A rule that looks at the other columns of its piece."""

    def reduce(self, rows: Any) -> Any:
        return rows.mean(axis=0, dtype=np.float64) / np.linalg.norm(rows)


@pytest.mark.parametrize("rule", [Momentum(), Counting(), Drawing(), Whole()])
def test_a_rule_that_is_no_function_of_its_columns_is_refused(rule: Any) -> None:
    with pytest.raises(RuleFailed, match=r"elements of tensor 'w' to other values when it is called again"):
        in_pieces(rule, list(range(10, 300, 10)))  # a draw may repeat itself by chance in some of 30 pieces


class Mixing:
    """A rule that draws its combination for the round."""

    rng = np.random.default_rng(2)

    def reduce(self, rows: Any) -> Any:
        return rows[0].astype(np.float64)

    def mixing(self, gram: Any, place: Place) -> Any:
        return place.of_round().random((1, len(gram)))


class Changing(Mixing):
    """A rule that draws its combination from a generator of its own."""

    def mixing(self, gram: Any) -> Any:  # type: ignore[override]
        return self.rng.random((1, len(gram)))


def test_a_mixing_that_changes_is_refused_and_one_that_draws_from_its_place_is_not() -> None:
    gram = np.eye(3)
    np.testing.assert_array_equal(CustomRule(Mixing()).mixing(gram, PLACE), PLACE.of_round().random((1, 3)))
    with pytest.raises(RuleFailed, match="mixes the same updates in another way"):
        CustomRule(Changing()).mixing(gram, PLACE)


def test_a_rule_after_the_mixing_of_neighbours_gets_its_place_and_is_checked_as_well() -> None:
    np.testing.assert_allclose(
        in_pieces(NearestNeighbourMixing(0, CustomRule(Dithered())), [100]), in_pieces(Dithered(), [100])
    )
    with pytest.raises(RuleFailed, match="to other values when it is called again"):
        in_pieces(NearestNeighbourMixing(0, CustomRule(Counting())), [100])


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), OSError("no file")])
@pytest.mark.parametrize("method", ["check", "mixing", "reduce"])
def test_whatever_a_rule_raises_names_the_rule_and_the_method(method: str, error: BaseException) -> None:
    def raises(*_: Any) -> Any:
        raise error

    rule = CustomRule(type("Mine", (Mixing,), {"check": lambda self, num_updates: None, method: raises})())
    arguments = {"check": 3, "mixing": np.eye(3), "reduce": ROWS.copy()}
    with pytest.raises(
        RuleFailed, match=rf"^rule Mine: {method} raised {type(error).__name__}: {re.escape(str(error))}$"
    ):
        getattr(rule, method)(arguments[method])


def test_a_rule_s_own_refusal_is_told_as_it_is() -> None:
    def check(self: Any, num_updates: int) -> None:
        raise ValueError(f"{num_updates} are too few")

    with pytest.raises(ValueError, match=r"^3 are too few$"):
        CustomRule(type("Mine", (Mixing,), {"check": check})()).check(3)
