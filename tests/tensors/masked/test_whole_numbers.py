"""Whole numbers in a secure sum: exact over 64 members, refused beyond their words, never wrapped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.tensors.masked.metrics import mask_metrics
from atoll.tensors.masked.whole_numbers import NUMBER_MAX, encode_numbers, num_bytes_of, opened_numbers
from atoll.tensors.secure.exact import WrongSum

WHOLE = st.integers(-NUMBER_MAX, NUMBER_MAX)


@given(st.integers(0, 4).flatmap(lambda n: st.lists(st.lists(WHOLE, min_size=n, max_size=n), min_size=3, max_size=8)))
def test_the_sum_of_numbers_is_exact(members: list[list[int]]) -> None:
    words = [encode_numbers(numbers) for numbers in members]
    assert {len(each) for each in words} == {num_bytes_of(len(members[0]))}
    assert opened_numbers(words, [], len(members[0])) == [sum(each) for each in zip(*members, strict=True)]


@pytest.mark.parametrize("number", [NUMBER_MAX, -NUMBER_MAX, 0, -1])
def test_the_sum_of_64_members_does_not_wrap(number: int) -> None:
    assert opened_numbers([encode_numbers([number])] * 64, [], 1) == [64 * number]


@pytest.mark.parametrize("number", [NUMBER_MAX + 1, -NUMBER_MAX - 1])
def test_a_number_beyond_its_words_is_refused(number: int) -> None:
    with pytest.raises(OverflowError, match="a number of 115 bits; allowed: at most 115"):
        encode_numbers([number])


def test_streams_are_taken_off_and_a_sum_of_others_is_none() -> None:
    keys = [bytes([k]) * 32 for k in range(3)]
    masked = [mask_metrics(encode_numbers([5, -7]), [(key, 1)]) for key in keys]
    off = [(key, -1) for key in keys]
    assert opened_numbers(masked, off, 2) == [15, -21]
    with pytest.raises(WrongSum):
        opened_numbers(masked[:2], off, 2)
