"""Kinds by name, each with its own options, in one flat table."""

import pytest

from atoll.protocol.variants import Choice, Given, Variant


def turned(given: Given) -> str:
    return "a square is not turned by 90" if given.get("turned") == 90.0 else ""


POLYGON = Variant(others=("side", "turned"), fault=turned)
CHOICE = Choice({"circle": Variant("radius"), "triangle": POLYGON, "square": POLYGON})


def test_a_name_picks_its_variant_with_its_options() -> None:
    assert CHOICE.pick("circle", {"radius": 2.0, "side": None}) == {"radius": 2.0}
    assert CHOICE.pick("square", {"turned": 45.0}) == {"turned": 45.0}
    assert CHOICE.options_of("square") == {"side", "turned"}


def test_a_name_of_the_users_own_has_no_options() -> None:
    assert CHOICE.pick("mine.py:shape", {"radius": None}) == {}
    with pytest.raises(ValueError, match=r"^radius is not an option of mine.py:shape \(allowed: none\)$"):
        CHOICE.pick("mine.py:shape", {"radius": 2.0})


@pytest.mark.parametrize(
    ("name", "given", "faults"),
    [
        ("circle", {}, ["circle needs radius"]),
        ("circle", {"side": 1.0}, ["side is not an option of circle (allowed: radius)", "circle needs radius"]),
        ("triangle", {"radius": 1.0}, ["radius is not an option of triangle (allowed: side, turned)"]),
        (
            "square",
            {"turned": 90.0, "radius": 1.0},
            ["radius is not an option of square (allowed: side, turned)", "a square is not turned by 90"],
        ),
    ],
)
def test_all_faults_are_named_at_once(name: str, given: dict[str, float], faults: list[str]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole text is compared
        CHOICE.pick(name, given)
    assert str(refused.value) == "; ".join(faults)


def test_an_option_beside_those_of_the_kind_is_allowed_and_not_the_variants() -> None:
    assert CHOICE.pick("circle", {"radius": 1.0, "colour": "red"}, also={"colour"}) == {"radius": 1.0}
    with pytest.raises(ValueError, match=r"side is not an option of a red circle \(allowed: colour, radius\)"):
        CHOICE.pick("circle", {"radius": 1.0, "side": 1.0}, also={"colour"}, label="a red circle")
