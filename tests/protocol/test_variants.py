"""Kinds by name, each with its own options, in one flat table."""

from typing import Literal

import pytest
from pydantic import BaseModel

from atoll.protocol.variants import Choice, Variant


class Circle(Variant):
    shape: Literal["circle"]
    radius: float


class Polygon(Variant):
    shape: Literal["triangle", "square"]
    side: float = 1.0
    turned: float | None = None


CHOICE = Choice[Circle | Polygon](Circle | Polygon, "shape")


def test_a_name_picks_its_variant_with_its_options() -> None:
    assert CHOICE.pick("circle", {"radius": 2.0, "side": None}) == Circle(shape="circle", radius=2.0)
    square = CHOICE.pick("square", {"turned": 45.0})
    assert square == Polygon(shape="square", side=1.0, turned=45.0)
    assert square.options("shape") == {"side": 1.0, "turned": 45.0}


def test_a_name_of_the_users_own_has_no_options() -> None:
    assert CHOICE.pick("mine.py:shape", {"radius": None}) is None
    with pytest.raises(ValueError, match=r"^radius is not an option of mine.py:shape \(allowed: none\)$"):
        CHOICE.pick("mine.py:shape", {"radius": 2.0})


@pytest.mark.parametrize(
    ("name", "given", "fault"),
    [
        ("circle", {}, "circle needs radius"),
        ("circle", {"side": 1.0}, "side is not an option of circle (allowed: radius); circle needs radius"),
        ("triangle", {"radius": 1.0}, "radius is not an option of triangle (allowed: side, turned)"),
    ],
)
def test_all_faults_are_named_at_once(name: str, given: dict[str, float], fault: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole text is compared
        CHOICE.pick(name, given)
    assert str(refused.value) == fault


def test_an_option_beside_those_of_the_kind_is_allowed_and_not_the_variants() -> None:
    assert CHOICE.pick("circle", {"radius": 1.0, "colour": "red"}, also={"colour"}) == Circle(shape="circle", radius=1)
    with pytest.raises(ValueError, match=r"side is not an option of a red circle \(allowed: colour, radius\)"):
        CHOICE.pick("circle", {"radius": 1.0, "side": 1.0}, also={"colour"}, label="a red circle")


def test_a_variant_is_a_model_that_cannot_change() -> None:
    assert issubclass(Variant, BaseModel)
    with pytest.raises(ValueError, match="frozen"):
        Circle(shape="circle", radius=1.0).radius = 2.0
