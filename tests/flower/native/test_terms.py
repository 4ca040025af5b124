"""The terms of a run of an app, as they travel in `[local]`."""

import pytest

from atoll.flower.native.terms import Terms, by_name, order_to_send
from atoll.task.given import Given

FULL = Terms(
    {"lr": 0.1, "layers": [1, 2]}, {"batch": 64}, ("w", "b"), {"w": "float64"}, "weights", "settings", "num_examples"
)


@pytest.mark.parametrize("terms", [Terms(), FULL, Terms(train={"a.b": "c"})], ids=["none", "all", "dots"])
def test_terms_come_back_as_they_were(terms):
    assert Terms.read(Given.read(terms.table)) == terms


def test_defaults_do_not_travel():
    assert Terms().table == {}


def test_numbers_are_in_the_order_of_their_values():
    assert by_name(["10", "2", "b", "a", "0"]) == ["0", "2", "10", "a", "b"]
    assert order_to_send(["0", "1", "2", "10"]) == ()
    assert order_to_send(["w", "b"]) == ("w", "b")
    assert Terms().ordered({"10": 0, "9": 0}) == ["9", "10"]
    assert FULL.ordered({"b": 0, "w": 0}) == ["w", "b"]


def test_other_keys_are_refused_together():
    with pytest.raises(ValueError, match=r"local\.lr: unknown key.*; local\.flower\.x: unknown"):
        Terms.read(Given.read({"lr": 0.1, "flower.x": 1, "train.lr": 0.2}))
