"""The sum that torch makes on a device has the bits of numpy's: on the CPU always, and on a GPU where there is one."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.device import Device, Summand
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.kernel import add_within_by_numpy
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.aggregation.optimizers import FedAdam
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Tensor
from atoll.tensors.updates.reader import UpdateReader
from tests.aggregation.models import DTYPES, fold_in, random_cuts, store, widened
from tests.aggregation.ranks import fold_on_ranks, write_shards
from tests.tensors.encoded_by_hand import store_encoded

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda")),
]

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return Device(request.param)


def arrays_of(rng, kind, shape):
    values = (10.0 ** rng.integers(-7, 4) * rng.standard_normal(shape)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2") if kind == "<u2" else values.astype(kind)


def sums(device, readers, tensor, start, stop, scales, magnitudes):
    summands = [Summand(*each) for each in zip(readers, scales, magnitudes, strict=True)]
    return device.weighted_sum(tensor, start, stop, summands)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_updates=st.integers(1, 7), depth=st.integers(0, 5), power=st.integers(-40, 60))
def test_the_sum_has_the_bits_of_numpy_for_every_dtype_and_any_boxes(
    tmp_path_factory, device, seed, num_updates, depth, power
):
    rng, folder, shape = np.random.default_rng(seed), tmp_path_factory.getbasetemp(), (11, 13)
    tensor, scales, readers = Tensor("w", "F32", shape), [], []
    start, stop = sorted(rng.integers(0, 143, 2).tolist())
    stop += 1
    expected = np.zeros(stop - start)
    for k in range(num_updates):
        array = arrays_of(rng, rng.choice(["<f4", "<f2", "<u2"]), shape)
        cuts = {"w": random_cuts(rng, shape, depth=depth)}
        readers.append(UpdateReader(store(folder / f"device-{k}", {"w": array}, cuts=cuts, junk=bytes(k))))
        assert readers[-1].stored_dtype("w") == DTYPES[array.dtype.str]
        scales.append(float(np.ldexp(rng.uniform(0.5, 1.0), power)))
        values = widened(array).astype(np.float32).reshape(-1)[start:stop]
        add_within_by_numpy(expected, values, np.float64(scales[-1]), np.inf)
    total, is_within = sums(device, readers, tensor, start, stop, scales, [float("inf")] * num_updates)
    assert total.tobytes() == expected.tobytes()
    assert is_within.all()


@settings(max_examples=60, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=40), power=st.integers(-200, 150), magnitude=st.floats(0, 3.5e38))
def test_every_float32_is_added_and_held_against_its_magnitude_as_by_numpy(
    tmp_path_factory, device, values, power, magnitude
):
    array = np.array([*values, 0.5, -0.5, 1.5, 2.5, -0.0, 1e-45], np.float32)
    scale = np.ldexp(1.0, power)
    with UpdateReader(store(tmp_path_factory.getbasetemp() / "device", {"w": array})) as reader:
        total, is_within = sums(device, [reader], Tensor("w", "F32", array.shape), 0, array.size, [scale], [magnitude])
    expected = np.zeros(array.size)
    with np.errstate(over="ignore"):
        verdict = add_within_by_numpy(expected, array, scale, magnitude)
    assert total.tobytes() == expected.tobytes()
    assert is_within.tolist() == [verdict]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.5])
def test_a_fold_names_the_update_that_is_beyond_its_magnitude(tmp_path, device, bad):
    array = np.ones(70, np.float32)
    safetensors_file.write(tmp_path / "base", {"w": array})
    updates = [Weighted(store(tmp_path / f"u{k}", {"w": array}), 1) for k in range(3)]
    array[33] = bad
    (tmp_path / "u1").write_bytes(array.tobytes())
    with pytest.raises(
        ValueError, match=r"update .*u1: tensor 'w' has values in .* beyond its recorded magnitude 1\.0"
    ):
        fold(tmp_path / "base", updates, tmp_path / "out", execution=Execution(1, 16, device=device))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["<f4", "<f2", "<u2"])
def test_a_fold_on_the_device_has_the_bits_of_the_cpu_for_any_tiles(tmp_path, device, kind):
    rng = np.random.default_rng(1)
    shapes = {"w": (40, 30), "bias": (7,), "scale": ()}
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    base["steps"] = np.array([3, 4])
    updates = []
    for _ in range(5):
        arrays = {name: arrays_of(rng, kind, shape) for name, shape in shapes.items() if rng.random() < 0.9}
        updates.append((arrays | {"steps": rng.integers(0, 9, 2)}, int(rng.integers(1, 1 << 40))))
    expected = fold_in(tmp_path, base, updates)
    for options in ({}, {"tile_elements": 17, "threads": 3}):
        ours = fold_in(tmp_path, base, updates, device=device, **options)
        assert {name: array.tobytes() for name, array in ours.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }


def test_a_fold_on_the_device_moves_an_optimizer_as_one_without(tmp_path, device):
    rng = np.random.default_rng(2)
    base = {"w": rng.standard_normal(300).astype(np.float32)}
    updates = [({"w": rng.standard_normal(300).astype(np.float32)}, k + 1) for k in range(4)]
    written = []
    for name, options in (("here", {}), ("there", {"device": device})):
        (folder := tmp_path / name).mkdir()
        after = {slot: folder / slot for slot in FedAdam().slots}
        fold_in(folder, base, updates, step=Step(FedAdam(), frozenset(base), after=after), **options)
        written.append([(folder / file).read_bytes() for file in ("out", *after)])
    assert written[0] == written[1]


def test_ranks_that_sum_on_a_device_write_the_bits_of_those_without(tmp_path, device):
    rng = np.random.default_rng(4)
    base = {"w": rng.standard_normal((40, 30)).astype(np.float32), "steps": np.array([3, 4])}
    safetensors_file.write(tmp_path / "base", base)
    layout = (Tensor("steps", "I64", (2,)), Tensor("w", "F32", (40, 30)))
    updates = [
        Weighted(
            store(tmp_path / f"u{k}", {"w": arrays_of(rng, "<f2", (40, 30)), "steps": np.array([k, 1])}), k + 1, 0.7
        )
        for k in range(5)
    ]
    fold(tmp_path / "base", updates, tmp_path / "whole")
    write_shards(tmp_path / "base", layout, 2, lambda rank: tmp_path / f"b{rank}")
    folded = fold_on_ranks(
        layout,
        lambda rank: tmp_path / f"b{rank}",
        updates,
        [0, 1, 1, 1, 1],
        2,
        out=lambda rank: tmp_path / f"o{rank}",
        step=lambda rank: Step(),
        execution=Execution(device=device),
    )
    whole = safetensors_file.read(tmp_path / "whole")
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in whole.items()}
    assert {piece.tensor: piece.sha256 for part in folded for piece in part.pieces} == digests


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "meta"])
def test_a_device_that_is_not_there_is_named(name):
    with pytest.raises(ValueError, match=f"device '{name}' is (unknown|not there|not supported)"):
        Device(name)


@pytest.mark.parametrize("codec", ["bf16", "qsgd8", "topk:0.1"])
def test_encoded_updates_are_decoded_before_they_cross(tmp_path, device, codec):
    rng = np.random.default_rng(3)
    safetensors_file.write(tmp_path / "base", {"w": rng.standard_normal(500).astype(np.float32)})
    updates = []
    for k in range(3):
        values = rng.standard_normal(500).astype(np.float32)
        update, decoded = store_encoded(tmp_path / f"u{k}", {"w": values}, {"w": codec})
        magnitudes = {"w": float(np.abs(decoded["w"]).max())}
        updates.append(Weighted(dataclasses.replace(update, magnitudes=magnitudes), k + 1))
    for name, options in (("here", {}), ("there", {"device": device})):
        fold(tmp_path / "base", updates, tmp_path / name, execution=Execution(1, 99, **options))
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
