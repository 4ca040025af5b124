"""The mean of masked updates: equal to the plain one up to rounding; any ranks and tiles give the same bits."""

import secrets
from contextlib import ExitStack

import numpy as np
import pytest

from atoll.aggregation.fold.masked_mean import MaskedMean
from atoll.tensors.layout import Tensor
from atoll.tensors.secure.keystream import add_stream
from atoll.tensors.secure.vector import decode, encode, step_of
from atoll.tensors.updates.reader import UpdateReader
from tests.aggregation.models import store

SHAPE, START, RANGE = (7, 11), 40, 0.5
COUNT = 77


def masked(tmp_path, bits, weights):
    """Return updates whose words are masked by one stream each, the plain values, and the streams to take off."""
    draw = np.random.default_rng(1)
    updates, plain, streams = [], [], []
    for number, weight in enumerate(weights):
        values = draw.uniform(-RANGE, RANGE, SHAPE).astype(np.float32)
        words, _ = encode(values, weight, bits, RANGE, None)
        key = secrets.token_bytes(32)
        add_stream(words.reshape(-1), key, 1, START)
        streams.append((key, -1))
        plain.append(weight * values.astype(np.float64))
        updates.append(store(tmp_path / f"u{number}", {"w": words.view(f"i{bits // 8}")}))
    return updates, plain, streams


@pytest.mark.parametrize(("bits", "dtype"), [(32, "I32"), (64, "I64")])
def test_the_mean_is_that_of_the_values_and_its_bits_depend_on_neither_tiles_nor_ranks(tmp_path, bits, dtype):
    weights = [0.25, 1.0, 0.5]
    updates, plain, streams = masked(tmp_path, bits, weights)
    with ExitStack() as stack:
        readers = [stack.enter_context(UpdateReader(update)) for update in updates]
        tensor = Tensor("w", dtype, SHAPE)
        options = {"start": START, "value_range": RANGE, "weight": sum(weights)}
        mean = MaskedMean(tensor, readers, streams, **options)
        whole = mean(0, COUNT)
        expected = sum(plain).reshape(-1) / sum(weights)
        assert np.abs(whole - expected).max() <= 3 * 0.5 * step_of(bits, RANGE) / sum(weights) * (1 + 1e-9)
        assert np.array_equal(np.concatenate([mean(0, 13), mean(13, 14), mean(14, COUNT)]), whole)
        ranks = [MaskedMean(tensor, some, [], **options) for some in (readers[:1], readers[1:], [])]
        for start, stop in ((0, 13), (13, COUNT)):
            shares = [rank.share(start, stop).view(np.uint8) for rank in ranks]
            assert shares[2].size == 0
            assert np.array_equal(mean.joined(shares, start, stop), whole[start:stop])


def test_a_sum_whose_streams_are_not_all_taken_off_is_noise(tmp_path):
    updates, plain, streams = masked(tmp_path, 32, [1.0, 1.0])
    with ExitStack() as stack:
        readers = [stack.enter_context(UpdateReader(update)) for update in updates]
        options = {"start": START, "value_range": RANGE, "weight": 1.0}
        noise = MaskedMean(Tensor("w", "I32", SHAPE), readers, streams[:1], **options)(0, COUNT)
    assert np.abs(noise - sum(plain).reshape(-1)).max() > 100 * RANGE
    assert decode(np.zeros(1, np.uint32), 32, RANGE) == 0
