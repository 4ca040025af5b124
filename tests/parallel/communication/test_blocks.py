"""Blocks of a gradient as bytes, against the plain formulas."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.parallel.communication import blocks
from atoll.parallel.communication.compression import Compression, bytes_per_rank, parse_compression

REFERENCE = [0.9, -0.1, 0.05, -0.4, 0.3, -0.02, 0.7, -0.6]


def through_int8(values: torch.Tensor, num_rows: int) -> torch.Tensor:
    rows = blocks.encode_int8(blocks.as_blocks(values, num_rows))
    assert rows.shape == (num_rows, blocks.INT8_ROW * blocks.num_blocks(values.numel(), num_rows))
    return blocks.decode_int8(rows).view(-1)[: values.numel()]


def through_signs(values: torch.Tensor, num_rows: int = 1) -> torch.Tensor:
    rows = blocks.encode_signs(blocks.as_blocks(values, num_rows), values.numel())
    assert rows.shape == (num_rows, blocks.SIGN_ROW * blocks.num_blocks(values.numel(), num_rows))
    return blocks.decode_signs(rows).view(-1)[: values.numel()]


vectors = st.tuples(st.integers(1, 5000), st.integers(0, 2**32 - 1), st.floats(-30, 30)).map(
    lambda drawn: torch.from_numpy(
        np.random.default_rng(drawn[1]).standard_normal(drawn[0], np.float32) * np.float32(2.0 ** drawn[2])
    )
)


@given(vectors, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_int8_is_within_half_a_level_of_its_block(values: torch.Tensor, num_rows: int) -> None:
    found = through_int8(values, num_rows)
    for block, read in zip(values.split(1024), found.split(1024), strict=True):
        half_a_level = block.abs().max() / 127 / 2
        assert (block - read).abs().max() <= half_a_level * (1 + 1e-5)


@given(vectors, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_signs_are_read_as_their_block_s_mean_magnitude(values: torch.Tensor, num_rows: int) -> None:
    found = through_signs(values, num_rows)
    for block, read in zip(values.split(1024), found.split(1024), strict=True):
        wanted = np.where(block.numpy() < 0, -1, 1) * np.abs(block.numpy().astype(np.float64)).mean()
        np.testing.assert_allclose(read.numpy(), wanted, rtol=1e-5)


def test_signs_have_the_scale_and_the_contraction_of_the_reference() -> None:
    values = torch.tensor(REFERENCE)
    found = through_signs(values)
    assert found.abs().tolist() == pytest.approx([0.38375] * 8, rel=1e-6)
    contraction = 1 - ((values - found).square().sum() / values.square().sum()).item()
    assert contraction == pytest.approx(0.612674868, rel=1e-6)


def test_zeros_stay_zeros() -> None:
    assert not through_int8(torch.zeros(1500), 2).any()
    assert not through_signs(torch.zeros(1500)).any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_an_overflow_arrives_as_one(poison: float) -> None:
    values = torch.ones(3000)
    values[1500] = poison
    for through in (through_int8(values, 2), through_signs(values)):
        assert not through[1024:2048].isfinite().any()
        assert through[:1024].isfinite().all()
        assert through[2048:].isfinite().all()


def test_compressions_are_read_by_name() -> None:
    assert parse_compression("int8") == Compression("int8")
    assert parse_compression("powersgd:4") == Compression("powersgd", 4)


@pytest.mark.parametrize("text", ["", "fp8", "int8:2", "powersgd", "powersgd:0", "powersgd:-1", "powersgd:two"])
def test_what_is_no_compression_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"compression: .*got {text!r}"):
        parse_compression(text)


def test_bytes_shrink_as_the_table_says() -> None:
    elements = 1 << 20
    plain = bytes_per_rank("none", elements, 2)
    assert plain == 4 * elements
    shrinks = {name: plain / bytes_per_rank(name, elements, 2) for name in ("fp16", "bf16", "int8", "onebit")}
    assert shrinks == pytest.approx({"fp16": 2, "bf16": 2, "int8": 4 / 1.00390625, "onebit": 32 / 1.03125})
    square = [(1024, 1024)]
    assert plain / bytes_per_rank("powersgd:4", elements, 2, square) == 1024 * 1024 / (4 * 2048)
    assert bytes_per_rank("none", elements, 1) == bytes_per_rank("onebit", elements, 1) == 0


def test_signs_are_gathered_so_that_more_ranks_gain_less() -> None:
    gains = [bytes_per_rank("none", 1 << 20, n) / bytes_per_rank("onebit", 1 << 20, n) for n in (2, 4, 8, 64)]
    assert gains == pytest.approx([31.03, 15.52, 7.76, 0.97], abs=0.01)


def test_powersgd_s_bytes_need_the_shapes() -> None:
    with pytest.raises(ValueError, match="shapes of its 100 elements"):
        bytes_per_rank("powersgd:1", 100, 2)
