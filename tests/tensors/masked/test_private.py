"""A private sum: its bound for each member, what else it tells, and the members' noise in it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors import safetensors_file
from atoll.tensors.layout import Piece, Tensor
from atoll.tensors.masked.encode import encode_update
from atoll.tensors.masked.mask import mask_part, mask_update
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.plan import EncodingPlan, Vector
from atoll.tensors.secure.vector import clip_steps, fault_of_noise, share_of_noise
from tests.tensors.masked.members import meshes, pairwise, stored, summed
from tests.tensors.masked.test_mask import opened

LAYOUT = (Tensor("b", "F32", (7,)), Tensor("w", "F32", (40, 25)))
BITS = [32, 64]


def plan_of(layout, bits=32, *, clip_norm=0.8, share=0.0):
    exponents = (0,) * len(layout)
    return EncodingPlan(
        bits=bits, clip_norm=clip_norm, exponents=exponents, is_private=True, share=share, num_examples=9
    )


def words_of(folder, update, plan, layout=LAYOUT):
    encode_update(stored(folder / "update", update), folder / "words", layout=layout, plan=plan)
    return safetensors_file.read(folder / "words")


def update_of(seed, scale, layout=LAYOUT):
    draw = np.random.default_rng(seed)
    return {t.name: (draw.standard_normal(t.shape) * scale).astype(np.float32) for t in layout}


@pytest.mark.parametrize("bits", BITS)
def test_no_member_adds_more_than_the_clip_norm_in_steps(tmp_path, bits):
    """The norm of the rounded words in whole numbers: for updates that are long, short, sparse and all alike."""
    plan = plan_of(LAYOUT, bits)
    most = math.floor(clip_steps(bits) ** 2)
    updates = [update_of(seed, scale) for seed, scale in enumerate((1e-3, 0.02, 0.03, 1.0, 1e20))]
    updates.append({t.name: np.zeros(t.shape, np.float32) for t in LAYOUT})
    updates.append({**updates[-1], "b": np.array([9, 0, 0, 0, 0, 0, 0], np.float32)})
    for halves in (0.5, 1.5, 2.5):  # of a step: every value is rounded by the most
        step = plan.clip_norm / clip_steps(bits)
        updates.append({t.name: np.full(t.shape, halves * step, np.float32) for t in LAYOUT})
    for update in updates:
        words = words_of(tmp_path, update, plan)
        squares = sum(int(word) ** 2 for name in ("b", "w") for word in words[name].reshape(-1))
        assert squares <= most
    long = words_of(tmp_path, update_of(0, 1.0), plan)
    squares = sum(int(word) ** 2 for name in ("b", "w") for word in long[name].reshape(-1))
    assert squares > 0.999 * most, "the clip takes little"


@pytest.mark.parametrize("bits", BITS)
def test_the_words_follow_from_the_update_alone_and_are_rounded_to_the_nearest(tmp_path, bits):
    plan, update = plan_of(LAYOUT, bits), update_of(1, 1e-3)
    first, again = words_of(tmp_path, update, plan), words_of(tmp_path, update, plan)
    step = plan.clip_norm / clip_steps(bits)
    for name in ("b", "w"):
        assert np.array_equal(first[name], again[name])
        assert np.abs(first[name] * step - update[name].astype(np.float64)).max() <= step * (0.5 + 1e-9)


def test_nothing_else_in_the_sum_depends_on_an_update(tmp_path):
    plan = plan_of(LAYOUT)
    short, long = words_of(tmp_path, update_of(1, 1e-6), plan), words_of(tmp_path, update_of(2, 1e6), plan)
    assert np.array_equal(short["secure/exact"], long["secure/exact"])


def test_an_encoding_that_would_release_more_is_refused():
    for change in ({"metrics": (("loss", 2),)}, {"examples_max": 10}, {"exponents": (0, -3)}):
        with pytest.raises(ValueError, match="metrics, weights by examples or ranges that follow from data"):
            replace(plan_of(LAYOUT), **change)
    with pytest.raises(ValueError, match="share of noise"):
        replace(plan_of(LAYOUT), is_private=False, share=3.0)
    for share in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="share of noise"):
            replace(plan_of(LAYOUT), share=share)
    with pytest.raises(ValueError, match="n: whole numbers"):
        Vector((*LAYOUT, Tensor("n", "I64", (2,))), plan_of(LAYOUT))
    with pytest.raises(ValueError, match="too fine for the grid"):
        plan_of(LAYOUT).factor(1 << 52, 1.0, 1 << 40)


@pytest.mark.parametrize("bits", BITS)
def test_the_opened_sum_has_the_noise_of_the_members_in_it(tmp_path, bits):
    """z^2 C^2 |U3| / h within 1 %, over 2^18 elements; an attempt that is repeated adds the same, another one other."""
    layout, z, h, members = (Tensor("w", "F32", (1 << 18,)),), 1.3, 3, 5
    plan = plan_of(layout, bits, share=share_of_noise(bits, z, h))
    vector = Vector(layout, plan)
    streams, own = pairwise(members)
    update = update_of(0, 1e-4, layout)
    words_of(tmp_path, update, plan, layout)
    plain = safetensors_file.read(tmp_path / "words")
    masked = []
    for number, mine in enumerate(streams):
        share = GridNoise(plan.share, bytes([number]) * 32)
        mask_update(tmp_path / "words", tmp_path / "masked", vector.masked, mine, share=share)
        masked.append(safetensors_file.read(tmp_path / "masked"))
    mask_update(tmp_path / "words", tmp_path / "again", vector.masked, streams[-1], share=share)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "masked").read_bytes()
    mask_update(
        tmp_path / "words", tmp_path / "other", vector.masked, streams[-1], share=GridNoise(plan.share, bytes(32))
    )
    assert (tmp_path / "other").read_bytes() != (tmp_path / "masked").read_bytes()
    found = opened(summed(masked, bits), vector.masked, bits, own)
    assert np.array_equal(found["secure/exact"], plain["secure/exact"].view(np.uint64) * members)
    noise = (found["w"] - plain["w"].view(found["w"].dtype) * found["w"].dtype.type(members)).view(f"i{bits // 8}")
    noise = noise.astype(np.float64) * (plan.clip_norm / clip_steps(bits))
    needed = (z * plan.clip_norm) ** 2
    assert noise.var() == pytest.approx(needed * members / h, rel=0.01)
    assert abs(noise.mean()) < 5 * noise.std() / len(noise) ** 0.5


@given(meshes(), st.sampled_from(BITS))
@settings(max_examples=20, deadline=None)
def test_the_parts_of_a_mesh_have_the_noise_of_one_file(tmp_path_factory, mesh, bits):
    (shape, boxes), folder = mesh, tmp_path_factory.mktemp("mesh")
    model = (Tensor("v", "F32", (3,)), Tensor("w", "F32", shape))
    plan, share = plan_of(model, bits, share=500.0), GridNoise(500.0, bytes(range(32)))
    layout = Vector(model, plan).masked
    words = words_of(folder, update_of(3, 0.01, model), plan, model)
    keys = [(bytes([7]) * 32, 1)]
    mask_update(folder / "words", folder / "masked", layout, keys, share=share)
    masked = safetensors_file.read(folder / "masked")
    for offsets, lengths in boxes:
        at = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        (folder / "part").write_bytes(np.ascontiguousarray(words["w"][at]).tobytes() + words["secure/exact"].tobytes())
        pieces = [
            Piece("w", layout[1].dtype, offsets, lengths, ""),
            Piece("secure/exact", "I64", (0,), words["secure/exact"].shape, ""),
        ]
        mask_part(folder / "part", folder / "out", layout, pieces, keys, share)
        expected = np.ascontiguousarray(masked["w"][at]).tobytes() + masked["secure/exact"].tobytes()
        assert (folder / "out").read_bytes() == expected


def test_the_share_of_each_member_gives_at_least_the_variance_that_is_needed():
    for bits in BITS:
        for z in (0.01, 0.7, 3.0, 50.0):
            for h in range(1, 64):
                assert h * share_of_noise(bits, z, h) ** 2 >= (z * clip_steps(bits)) ** 2


def test_noise_that_does_not_fit_into_the_words_is_a_fault():
    assert fault_of_noise(32, 64, share_of_noise(32, 5.0, 42)) == ""
    assert "words of 32 bits" in fault_of_noise(32, 64, share_of_noise(32, 100.0, 42))
    assert fault_of_noise(64, 64, share_of_noise(64, 100.0, 42)) == ""
    for share in (3.0, 2.0**42, math.nan):
        assert "standard deviation" in fault_of_noise(64, 3, share)
