"""What the measurement on a GPU computes, where there is none: its sums and folds by torch on the CPU."""

import numpy as np
import pytest
import torch

from atoll.aggregation.fold.device import Device
from benchmarks import fold_cuda
from tests.benchmarks.test_quick import measure


@pytest.fixture
def updates():
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.standard_normal(1000, np.float32)) for _ in range(3)]


@pytest.mark.parametrize("tile", [1000, 64, 4096])
def test_the_tiles_are_those_of_numpy_and_others_are_noticed(updates, tile):
    tiles = fold_cuda.summed(Device("cpu"), updates, tile, 2)
    fold_cuda.check_bits(tiles, updates)
    tiles[-1][-1] += 1.0
    with pytest.raises(RuntimeError, match="other bits"):
        fold_cuda.check_bits(tiles, updates)


def test_whole_folds_are_measured_and_agree(updates):
    assert fold_cuda.from_files(Device("cpu"), updates, 1).keys() == {"cuda_s", "cpu_s"}


@pytest.mark.real
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make bench NAME=fold_cuda")
def test_without_a_gpu_it_says_so():
    assert measure("fold_cuda")["ours"] == "not measured: no CUDA device"
