"""The writer of encoded updates: what travels, what stays plain, what is owed afterwards."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors import safetensors_file
from atoll.tensors.codecs.codec import CHUNK_ELEMENTS
from atoll.tensors.codecs.names import parse_codec
from atoll.tensors.layout import Tensor, pieces_in_order
from atoll.tensors.updates.encoded_writer import REPLACES, Feedback, write_encoded
from atoll.tensors.updates.inspection import inspect
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader
from tests.tensors.encoded_by_hand import NAMES, decoded, encoded

WIDE = 2 * CHUNK_ELEMENTS + 100


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def write(path, update, name, *, seed=1, **options):
    """The update as it is read back: pieces, and values by name."""
    pieces = write_encoded(path, update, parse_codec(name), rng=np.random.default_rng(seed), **options)
    _, data_start = safetensors_file.parse_header(path)
    stored = StoredUpdate(path, pieces, data_start=data_start)
    assert inspect(path, pieces, data_start=data_start).is_sound
    with UpdateReader(stored) as reader:
        values = {p.tensor: reader.read(Tensor(p.tensor, p.dtype, p.lengths), 0, p.num_elements) for p in pieces}
    return {p.tensor: p for p in pieces}, {name: flat.reshape(update[name].shape) for name, flat in values.items()}


MODEL = {
    "w": normal((3, 1000)),
    "b": normal(600, seed=1),
    "running_var": normal(600, seed=2),
    "steps": np.array(7),
    "bytes": np.arange(5, dtype=np.uint8),
    "one": normal(1, seed=3),
    "none": np.zeros((0, 4), np.float32),
}


@pytest.mark.parametrize("name", NAMES)
def test_floats_are_encoded_and_the_rest_is_as_it_was(tmp_path, name):
    pieces, values = write(tmp_path / "u", MODEL, name, plain={"running_var"})
    assert {tensor for tensor, piece in pieces.items() if piece.codec} - {"one"} == {"w", "b"}
    assert tuple(pieces.values()) == pieces_in_order(pieces.values())
    for tensor in ("running_var", "steps", "bytes", "none"):
        assert values[tensor].tobytes() == MODEL[tensor].astype(values[tensor].dtype).tobytes()
    if name != "qsgd8":  # which depends on the random numbers drawn before
        for tensor in ("w", "b"):
            raw = encoded(name, MODEL[tensor])
            assert values[tensor].tobytes() == decoded(name, raw, MODEL[tensor].size).tobytes()
    assert (pieces["w"].dtype, pieces["w"].offsets, pieces["w"].lengths) == ("F32", (0, 0), (3, 1000))


def test_what_a_codec_makes_no_smaller_stays_plain(tmp_path):
    pieces, values = write(tmp_path / "u", {"one": normal(1), "two": normal(2), "ten": normal(10)}, "topk:0.5")
    assert [pieces[name].codec for name in ("one", "two", "ten")] == ["", "topk:0.5", "topk:0.5"]
    assert values["one"] == normal(1)
    pieces, _ = write(tmp_path / "u", {"ten": normal(10)}, "topk:1")
    assert pieces["ten"].codec == ""


@pytest.mark.parametrize("name", NAMES)
def test_file_is_a_safetensors_file_with_the_encoded_tensors_as_bytes(tmp_path, name):
    pieces, _ = write(tmp_path / "u", MODEL, name, plain={"running_var"})
    arrays = safetensors_file.read(tmp_path / "u")
    assert arrays["w"].dtype == np.uint8
    assert arrays["w"].size == pieces["w"].num_bytes < pieces["w"].plain_bytes == MODEL["w"].nbytes
    assert arrays["steps"] == 7


def test_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path):
    files = []
    for number, seed in enumerate((5, 5, 6)):
        write(tmp_path / str(number), MODEL, "qsgd8", seed=seed)
        files.append((tmp_path / str(number)).read_bytes())
    assert files[0] == files[1] != files[2]


def test_value_that_cannot_be_encoded_is_named_and_no_file_appears(tmp_path):
    update = {"w": np.full(10, 70_000, np.float32)}
    with pytest.raises(ValueError, match=r"tensor 'w', elements 0\.\.10: fp16: values in .* are not within 65519"):
        write(tmp_path / "u", update, "fp16")
    feedback = Feedback((), tmp_path / "e")
    with pytest.raises(ValueError, match=r"tensor 'w', elements 0\.\.10: sign: values in"):
        write(tmp_path / "u", {"w": update["w"] * np.inf}, "sign", feedback=feedback)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["sign", "topk:0.05"])
def test_what_was_sent_and_what_is_owed_add_up_over_many_updates(tmp_path, name):
    total, sent, owed = np.zeros(WIDE), np.zeros(WIDE), ()
    for number in range(6):
        update = {"w": normal(WIDE, seed=number), "steps": np.array(1)}
        new = tmp_path / f"e{number}"
        _, values = write(tmp_path / "u", update, name, feedback=Feedback(owed, new))
        total += update["w"]
        sent += values["w"]
        owed = (new,)
        residual = safetensors_file.read(new)
        assert residual.keys() == {"w"}
        np.testing.assert_allclose(sent + residual["w"], total, atol=1e-5)
    assert np.abs(residual["w"]).max() > 0.5, "something is owed"


def test_several_residuals_are_added_and_named_in_the_new_one(tmp_path):
    arrays = {"w": normal(1000, seed=1)}, {"w": normal(1000, seed=2)}
    owed = tuple(tmp_path / name for name in ("e0", "e1"))
    for path, residual in zip(owed, arrays, strict=True):
        safetensors_file.write(path, residual)
    feedback = Feedback(owed, tmp_path / "e2")
    _, values = write(tmp_path / "u", {"w": np.zeros(1000, np.float32)}, "sign", feedback=feedback)
    left = safetensors_file.read(tmp_path / "e2")["w"]
    np.testing.assert_allclose(values["w"] + left, arrays[0]["w"] + arrays[1]["w"], atol=1e-6)
    assert json.loads(safetensors_file.read_metadata(tmp_path / "e2")[REPLACES]) == ["e0", "e1"]


def test_residual_of_another_model_or_a_damaged_one_is_forgotten(tmp_path):
    safetensors_file.write(tmp_path / "other", {"w": np.ones((2, 500), np.float32), "gone": np.ones(3, np.float32)})
    (tmp_path / "damaged").write_bytes(b"no safetensors file")
    feedback = Feedback((tmp_path / "other", tmp_path / "damaged"), tmp_path / "e")
    _, values = write(tmp_path / "u", {"w": np.zeros(1000, np.float32)}, "sign", feedback=feedback)
    assert not values["w"].any()
    assert not safetensors_file.read(tmp_path / "e")["w"].any()


def test_plain_tensors_owe_nothing(tmp_path):
    write(tmp_path / "u", MODEL, "sign", plain={"running_var"}, feedback=Feedback((), tmp_path / "e"))
    assert safetensors_file.read(tmp_path / "e").keys() == {"w", "b"}


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(NAMES), n=st.integers(1, 3000), seed=st.integers(0, 100))
def test_any_update_comes_back_as_its_codec_gives_it(tmp_path_factory, name, n, seed):
    path, codec = tmp_path_factory.getbasetemp() / "any", parse_codec(name)
    update = {"w": normal(n, seed)}
    pieces, values = write(path, update, name, seed=seed)
    if pieces["w"].codec:
        raw = b"".join([codec.encode(update["w"], np.random.default_rng(seed))])
        assert values["w"].tobytes() == codec.decode(raw, n).tobytes()


@pytest.mark.usefixtures("compiled")
def test_memory_is_a_few_chunks_beside_the_update(tmp_path):
    update = {"w": np.resize(normal(WIDE), 64 * CHUNK_ELEMENTS)}
    for name in ("topk:0.05", "qsgd8"):
        rng, codec = np.random.default_rng(0), parse_codec(name)
        safetensors_file.write(tmp_path / "e", update)
        tracemalloc.start()
        try:
            feedback = Feedback((tmp_path / "e",), tmp_path / "e2") if codec.is_biased else None
            write_encoded(tmp_path / "u", update, codec, rng=rng, feedback=feedback)
            assert tracemalloc.get_traced_memory()[1] < 12 * 4 * CHUNK_ELEMENTS
        finally:
            tracemalloc.stop()
