import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from atoll.tensors import safetensors_file
from atoll.tensors.codecs.chunks import decode_range, encode_chunks
from atoll.tensors.codecs.codec import CHUNK_ELEMENTS
from atoll.tensors.codecs.error_feedback import encode_with_feedback, feed
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import Tensor, in_order
from atoll.tensors.safetensors_file import TensorFileWriter

NAMES = ["bf16", "fp16", "qsgd8", "sign", "topk:0.01", "topk:0.25", "topk:1"]
LAYOUT = in_order(
    [
        Tensor("w", "F32", (2, CHUNK_ELEMENTS // 2 + 30)),
        Tensor("n", "I64", ()),
        Tensor("none", "F32", (0, 3)),
        Tensor("b", "F32", (7,)),
    ]
)
FLOAT_TENSORS = [tensor for tensor in LAYOUT if tensor.dtype == "F32"]

codecs = st.sampled_from(NAMES).map(parse_codec)


def normal(n, *, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def model(seed):
    return {tensor.name: normal(tensor.num_elements, seed=seed) for tensor in FLOAT_TENSORS}


def reading(values):
    return lambda tensor, start, stop: values[tensor.name][start:stop]


def joined(parts, name):
    return np.concatenate([np.zeros(0, np.float32), *(part.residual for part in parts if part.tensor.name == name)])


def decoded(codec, parts, tensor):
    data = b"".join(part.data for part in parts if part.tensor == tensor)
    n = tensor.num_elements
    return decode_range(codec, n, 0, n, lambda position, length: data[position : position + length])


@settings(deadline=None)
@given(
    codec=codecs,
    pair=st.integers(1, 700).flatmap(
        lambda n: st.tuples(*[arrays.arrays(np.float32, n, elements=st.floats(-1000, 1000, width=32))] * 2)
    ),
)
def test_what_is_sent_and_what_is_left_is_what_was_owed(codec, pair):
    update, residual = pair
    before = update.copy(), residual.copy()
    data, left = encode_with_feedback(codec, update, residual, np.random.default_rng(0))
    owed = update + residual
    assert data == codec.encode(owed, np.random.default_rng(0))
    assert left.tobytes() == (owed - codec.decode(data, owed.size)).tobytes()
    total = codec.decode(data, owed.size).astype(np.float64) + left
    assert np.abs(total - owed).max() <= 2.0**-23 * max(1e-30, np.abs(owed).sum())
    assert (update.tobytes(), residual.tobytes()) == (before[0].tobytes(), before[1].tobytes())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rounds", [1, 2, 30])
def test_sum_of_what_arrived_is_the_sum_of_updates_less_the_last_residual(name, rounds):
    codec, rng, n = parse_codec(name), np.random.default_rng(1), 1000
    residual, arrived, updates = np.zeros(n, np.float32), np.zeros(n), np.zeros(n)
    for k in range(rounds):
        update = normal(n, seed=k)
        data, residual = encode_with_feedback(codec, update, residual, rng)
        arrived += codec.decode(data, n)
        updates += update
    assert arrived == pytest.approx(updates - residual, abs=1e-5 * rounds)


@pytest.mark.parametrize("name", ["sign", "topk:0.01", "topk:0.25"])
def test_residual_of_a_contraction_stays_bounded(name):
    """||e||^2 <= 4 (1 - delta) / delta^2 max ||u||^2, for delta-contractions: Karimireddy et al. 2019."""
    codec, rng, n = parse_codec(name), np.random.default_rng(1), 500
    residual, largest, least = np.zeros(n, np.float32), 0.0, 1.0
    for k in range(400):
        update = normal(n, seed=k)
        owed = update + residual
        _, residual = encode_with_feedback(codec, update, residual, rng)
        largest = max(largest, float(np.square(update).sum()))
        least = min(least, 1 - float(np.square(residual).sum() / np.square(owed).sum()))
        assert np.square(residual).sum() <= 4 * (1 - least) / least**2 * largest


@pytest.mark.parametrize("name", ["sign", "topk:0.25", "bf16"])
@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=12))
@settings(deadline=None, max_examples=25)
def test_refused_updates_take_nothing_with_them(name, outcomes):
    """The sum of the accepted updates less the residual arrives, whatever is refused or lost."""
    codec, rng, n = parse_codec(name), np.random.default_rng(1), 64
    residual, arrived, accepted = np.zeros(n, np.float32), np.zeros(n), np.zeros(n)
    for k, is_accepted in enumerate(outcomes):
        update = normal(n, seed=k)
        data, left = encode_with_feedback(codec, update, residual, rng)
        if is_accepted:
            residual = left
            arrived += codec.decode(data, n)
            accepted += update
    assert arrived == pytest.approx(accepted - residual, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_update_is_fed_tensor_by_tensor_in_chunks(name):
    codec, update, residual = parse_codec(name), model(1), model(2)
    parts = list(feed(codec, LAYOUT, reading(update), reading(residual), np.random.default_rng(3)))
    assert [part.tensor.name for part in parts] == ["b", "w", "w"]
    assert [part.residual.size for part in parts] == [7, CHUNK_ELEMENTS, 60]
    rng = np.random.default_rng(3)
    for tensor in FLOAT_TENSORS:
        owed = update[tensor.name] + residual[tensor.name]
        data = b"".join(encode_chunks(codec, owed.size, lambda a, b, owed=owed: owed[a:b], rng))
        assert data == b"".join(part.data for part in parts if part.tensor == tensor)
        assert joined(parts, tensor.name).tobytes() == (owed - decoded(codec, parts, tensor)).tobytes()


def test_nothing_is_owed_at_first():
    codec, update = parse_codec("sign"), model(1)
    zeros = {name: np.zeros_like(values) for name, values in update.items()}
    first = list(feed(codec, LAYOUT, reading(update), None, np.random.default_rng(0)))
    same = list(feed(codec, LAYOUT, reading(update), reading(zeros), np.random.default_rng(0)))
    assert [part.data for part in first] == [part.data for part in same]
    assert [part.residual.tobytes() for part in first] == [part.residual.tobytes() for part in same]


def test_residuals_stream_into_a_file_that_the_next_update_reads(tmp_path):
    codec, update, rng = parse_codec("topk:0.01"), model(1), np.random.default_rng(0)
    current, following = tmp_path / "residual", tmp_path / "residual-of-1234"
    with TensorFileWriter(following, FLOAT_TENSORS) as writer:
        parts = []
        for part in feed(codec, LAYOUT, reading(update), None, rng):
            parts.append(part)
            writer.append(part.residual)
        writer.finish()
    following.replace(current)
    stored = safetensors_file.read(current)
    assert stored.keys() == {tensor.name for tensor in FLOAT_TENSORS}
    for name in update:
        assert stored[name].tobytes() == joined(parts, name).tobytes()
    flat = {name: values.reshape(-1) for name, values in stored.items()}
    for part in feed(codec, LAYOUT, reading(model(2)), reading(flat), rng):
        assert np.isfinite(part.residual).all()


@pytest.mark.parametrize(("update", "residual"), [(np.nan, 0), (np.inf, 0), (3e38, 3e38)])
def test_what_cannot_be_coded_is_named(update, residual):
    updates, residuals = model(1), model(2)
    updates["w"][-1], residuals["w"][-1] = update, residual
    chunks = feed(parse_codec("sign"), LAYOUT, reading(updates), reading(residuals), np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"^tensor 'w', elements 65536\.\.65596: sign: values in"):
        list(chunks)
