"""The check of a codec's contract: sizes, shapes, seeds, refusals and the contraction of a biased codec.

The check encodes random values of several lengths and magnitudes. It finds the common mistakes and proves nothing: that
`is_biased = False` is right, and equal results on other machines, cannot be seen from one machine's samples.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

from atoll.ground.printable import count_of
from atoll.tensors.codecs.codec import CHUNK_ELEMENTS, Codec, CodecBroken, Values
from atoll.tensors.codecs.custom_codec import CustomCodec
from atoll.tensors.codecs.installed import CODEC

LENGTHS = (1, 2, 3, 7, 64, 511, 512, 513, 1000, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS)
"""The lengths [elements] of the chunks that the check encodes."""

SCALES = (1.0, 1e-3, 100.0)
"""The magnitudes of the values that the check encodes, typical of updates."""

SEEDS = 8
"""Number of encodings of which the error is averaged."""


def codec_faults(codec: Any) -> list[str]:
    """Return the ways in which a codec breaks its contract; empty if no fault is found.

    Args:
        codec: an object with `is_biased`, `num_bytes`, `encode` and `decode`.
    """
    try:
        is_guarded = isinstance(codec, CustomCodec)
        guarded = codec if is_guarded else CustomCodec(getattr(codec, "name", "codec"), CODEC.checked(codec))
        return list(dict.fromkeys(_faults(guarded)))
    except (ValueError, CodecBroken) as fault:
        return [str(fault)]


def faults_without_options(found: Any) -> list[str]:
    """Return the faults of an entry point's object; empty for a class or function that needs arguments."""
    if not CODEC.is_object(found):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError):
            return []
    try:
        return codec_faults(CODEC.made(found, {}))
    except ValueError as fault:
        return [str(fault)]


def _faults(codec: Codec) -> Iterator[str]:
    for n in LENGTHS:
        values = _normal(n, seed=n)
        yield from _faults_of_chunk(codec, values, f"{count_of(n, 'element')}")
        yield from _faults_of_chunk(codec, np.zeros(n, np.float32), f"{count_of(n, 'zero')}")
    yield from _faults_of_refusals(codec)
    if codec.is_biased:
        yield from _faults_of_contraction(codec)


def _faults_of_chunk(codec: Codec, values: Values, what: str) -> Iterator[str]:
    before = values.copy()
    first, again = (codec.encode(values, np.random.default_rng(5)) for _ in range(2))
    if first != again:
        yield f"{codec.name}: encode: {what} are other bytes when they are encoded again with the same seed"
    decoded = codec.decode(first, values.size)
    if decoded.tobytes() != codec.decode(first, values.size).tobytes():
        yield f"{codec.name}: decode: {what} are other values when they are decoded again"
    if not before.any() and decoded.any():
        yield f"{codec.name}: decode: {what} do not come back as zeros"


def _faults_of_refusals(codec: Codec) -> Iterator[str]:
    """Yield the faults of decoding foreign bytes: they must be refused, or give finite values."""
    for n in (1, 64, 1000):
        size = codec.num_bytes(n)
        for data in (bytes(size), b"\xff" * size, np.random.default_rng(n).bytes(size)):
            try:
                codec.decode(data, n)
            except ValueError as fault:
                if fault.__cause__ is not None and type(fault.__cause__) is not ValueError:
                    yield f"{fault}: of bytes that no encoder writes it must raise ValueError"


def _faults_of_contraction(codec: Codec) -> Iterator[str]:
    """Yield the lengths and magnitudes at which the mean of ||C(x) - x||^2 is not below ||x||^2."""
    for n in LENGTHS[3:]:
        for scale in SCALES:
            errors, norms = 0.0, 0.0
            for seed in range(SEEDS):
                values = _normal(n, seed) * np.float32(scale)
                decoded = codec.decode(codec.encode(values, np.random.default_rng(seed)), n)
                errors += float(np.square(decoded.astype(np.float64) - values).sum())
                norms += float(np.square(values.astype(np.float64)).sum())
            if not errors < norms:
                yield (
                    f"{codec.name}: is_biased, and no contraction: for {count_of(n, 'element')} of about {scale:g} the "
                    f"mean of ||C(x) - x||^2 is {errors / norms:.3g} ||x||^2; allowed: below 1"
                )
                return


def _normal(n: int, seed: int) -> Values:
    return np.random.default_rng([seed, n]).standard_normal(n).astype(np.float32)
