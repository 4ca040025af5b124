"""Whole numbers of any sign in a secure sum, each of two words: the words of one member, and what opens of their sum.

The words are those of `secure/exact` for one integer tensor with the weight 2^-52: canaries, and of each number P

    P mod 2^58, floor(P / 2^58),    |P| <= 2^114

so that the sum of 64 members stays within both words, and is exact.
"""

from collections.abc import Sequence

import numpy as np

from atoll.ground.printable import count_of
from atoll.tensors.layout import Layout, Tensor
from atoll.tensors.secure.exact import decode_exact, encode_exact
from atoll.tensors.secure.keystream import Stream, Streams
from atoll.tensors.secure.masked_layout import exact_of

WORD = np.dtype("<u8")
_NAME = "numbers"
NUMBER_MAX = 1 << 114
"""Largest magnitude of one member's number."""


def layout_of(count: int) -> Layout:
    """Return the layout of a member's numbers, as of one integer tensor."""
    return (Tensor(_NAME, "I64", (count,)),)


def num_bytes_of(count: int) -> int:
    """Return the size of what a member with `count` numbers adds [bytes]."""
    return exact_of(layout_of(count), ()).size * WORD.itemsize


def encode_numbers(numbers: Sequence[int]) -> bytes:
    """Return the words of one member.

    Raises:
        OverflowError: a number is beyond `NUMBER_MAX`: the words of a sum would wrap.
    """
    if beyond := [number for number in numbers if abs(number) > NUMBER_MAX]:
        length = count_of(beyond[0].bit_length(), "bit")
        raise OverflowError(f"a number of {length}; allowed: at most {NUMBER_MAX.bit_length()}")
    values = np.empty(len(numbers), object)
    values[:] = numbers
    places = exact_of(layout_of(len(numbers)), ())
    words = encode_exact(places, weight=1, is_within=True, fills=(), integers={_NAME: values}, statistics={})
    return words.astype(WORD).tobytes()


def opened_numbers(masked: Sequence[bytes], streams: Sequence[Stream], count: int) -> list[int]:
    """Return the sums of the numbers over the members of a session.

    Args:
        masked: the masked words of each member in the sum.
        streams: to take off the sum, with their signs.
        count: of numbers.

    Raises:
        WrongSum: the words are no sum of these members.
    """
    places = exact_of(layout_of(count), ())
    total = np.zeros(places.size, np.uint64)
    for words in masked:
        total += np.frombuffer(words, WORD)
    Streams(streams).add(total)
    return [int(number) for number in decode_exact(total, places, len(masked)).integers[_NAME].tolist()]
