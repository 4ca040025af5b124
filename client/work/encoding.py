"""The encoding of a secure sum that a member's terms ask for."""

from atoll.protocol.secure.terms import Terms
from atoll.tensors.layout import Layout
from atoll.tensors.secure.masked_layout import exponents_of
from atoll.tensors.secure.plan import Encoding


def encoding_of(terms: Terms, ranges: tuple[int, ...], layout: Layout) -> Encoding:
    """Return the encoding of a sum.

    Args:
        terms: of the sum.
        ranges: the exponents in its invitation; empty: all are 0.
        layout: of the base version's tensors that travel.

    Raises:
        ValueError: the terms are no encoding; the message lists all faults.
    """
    return Encoding(
        bits=terms.bits,
        clip_norm=terms.clip_norm,
        exponents=exponents_of(ranges, layout),
        examples_max=terms.examples_max,
        metrics=terms.metrics,
        is_private=bool(terms.privacy),
    )
