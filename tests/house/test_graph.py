"""Circles and levels of made-up graphs."""

from itertools import pairwise

import pytest

from tests.house.graph import circles, components, graph_of, levels, shortest_circle


def graph(*pairs: str) -> dict[str, list[str]]:
    return graph_of((pair[0], pair[1]) for pair in pairs)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ((), []),
        (("ab", "bc", "ac"), []),
        (("aa",), []),
        (("ab", "ba"), [["a", "b"]]),
        (("ab", "bc", "ca", "cd"), [["a", "b", "c"]]),
        (("ab", "bc", "ca", "de", "ed", "cd"), [["a", "b", "c"], ["d", "e"]]),
        (("xy", "yx", "ab", "bc", "cb", "ca"), [["a", "b", "c"], ["x", "y"]]),
    ],
)
def test_circles_are_found_largest_first(pairs: tuple[str, ...], expected: list[list[str]]) -> None:
    assert circles(graph(*pairs)) == expected


def test_a_component_comes_after_all_that_it_depends_on() -> None:
    found = components(graph("ab", "bc", "cb", "bd", "ea"))
    assert found == [["d"], ["b", "c"], ["a"], ["e"]]


def test_the_shortest_way_around_is_shown() -> None:
    assert shortest_circle(graph("ab", "bc", "cd", "da", "cb"), ["a", "b", "c", "d"]) == ["b", "c"]
    assert shortest_circle(graph("ab", "bc", "ca"), ["a", "b", "c"]) == ["a", "b", "c"]


def test_there_is_no_way_around_without_a_circle() -> None:
    with pytest.raises(ValueError, match="a is in no circle"):
        shortest_circle(graph("ab"), ["a", "b"])


def test_a_level_is_one_above_the_highest_below() -> None:
    assert levels(graph("ab", "bc", "ac")) == {"a": 3, "b": 2, "c": 1}


def test_a_circle_shares_a_level() -> None:
    assert levels(graph("ab", "bc", "cb", "cd")) == {"a": 3, "b": 2, "c": 2, "d": 1}


def test_a_deep_chain_needs_no_recursion() -> None:
    names = [f"n{number:05}" for number in range(5000)]
    assert levels(graph_of(pairwise(names)))["n00000"] == 5000
