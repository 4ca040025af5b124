"""Members that refuse each other: who loses its place, and how little a liar can do."""

from itertools import combinations, product

import pytest

from atoll.server.sessions.refusals import left_out


@pytest.mark.parametrize(
    ("refusals", "out"),
    [
        ("", ""),
        ("ad bd cd", "d"),  # unpinned at all others
        ("ad", "d"),  # of two, the refused one first,
        ("ad ab", "a"),  # then the one that refuses
        ("ab ac ad", "a"),  # one liar that names everybody
        ("ab ba", "a"),
        ("ad bd cd da db dc", "d"),
        ("ad ae bd be cd ce", "de"),  # two groups without each other's pins: the larger one stays
        ("ax xb yz aa", ""),  # of members that are not there, and of itself
    ],
)
def test_the_member_with_most_conflicts_is_left_out(refusals, out):
    assert left_out([tuple(pair) for pair in refusals.split()], "abcde") == frozenset(out)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_the_others_refuse_nobody_among_themselves_and_a_liar_costs_one_place_at_most(size):
    members = "abcdef"[:size]
    honest = members[1:]
    for named in (c for count in range(size) for c in combinations(honest, count)):
        out = left_out([("a", name) for name in named], members)
        assert len(out) == bool(named)
        assert out == {*named} or len(named) > 1
        if len(named) > 1:
            assert out == {"a"}
    pairs = [(by, of) for by, of in product(members[:3], members) if by != of]
    for refusals in (c for count in range(4) for c in combinations(pairs, count)):
        stay = {*members} - left_out(refusals, members)
        assert not [pair for pair in refusals if {*pair} <= stay]
        assert len(stay) >= size - len(refusals)


def test_a_majority_that_refuses_one_member_keeps_its_places_against_what_this_one_says():
    members = "abcdefg"
    for liar_says in range(7):
        refusals = [(name, "g") for name in "abcd"] + [("g", name) for name in members[:liar_says]]
        assert left_out(refusals, members) == {"g"}
