"""Exact sums of floats as dyadic rationals: no rounding before the end, so no order and no partition matters. Pure.

Every finite float64 is m * 2^e with whole numbers m and e, and so are sums and products of them.
"""

from fractions import Fraction

BITS_MAX = 4400
"""Largest size of a numerator or denominator: the square of any float64, times 2^64, stays below it."""

LETTERS_MAX = BITS_MAX // 4 + 10


def text_of(number: Fraction) -> str:
    """Return a dyadic rational as `MpE` for M * 2^E: M in hexadecimal and odd, or 0p0; each number has one text.

    Raises:
        ValueError: the denominator is no power of two, or the number is too long.
    """
    numerator, denominator = number.numerator, number.denominator
    if denominator & (denominator - 1) or max(numerator.bit_length(), denominator.bit_length()) > BITS_MAX:
        raise ValueError("no dyadic rational of at most 4,400 bits")
    if not numerator:
        return "0p0"
    zeros = (numerator & -numerator).bit_length() - 1
    return f"{numerator >> zeros:x}p{zeros - denominator.bit_length() + 1}"


def number_of(text: str) -> Fraction:
    """Parse the text that `text_of` made of a number.

    Raises:
        ValueError: the text is not what `text_of` returns for a number.
    """
    mantissa, p, exponent = text.partition("p")
    if not p or len(text) > LETTERS_MAX or len(exponent) > 6:
        raise ValueError("allowed: MpE for M * 2^E, M in hexadecimal")
    number = Fraction(int(mantissa, 16)) * Fraction(2) ** int(exponent) if abs(int(exponent)) <= BITS_MAX else None
    if number is None or text_of(number) != text:
        raise ValueError("allowed: MpE for M * 2^E, M in hexadecimal and odd, or 0p0")
    return number


def rounded(number: Fraction) -> float | None:
    """Return the nearest float64 (ties to even); None: the number is out of float64's range."""
    try:
        return number.numerator / number.denominator  # of whole numbers: correctly rounded
    except OverflowError:
        return None
