import pytest
import torch
from torch import nn

from atoll.simulations.engines.batched.outputs import activation_bytes
from atoll.simulations.engines.batched.probe import TRIED
from atoll.simulations.engines.batched.stack import CannotBatch
from atoll.simulations.engines.batched.trainer import ACTIVATION_BYTES, AT_ONCE_MAX, BatchTrainer
from tests.simulations.engines.cases import Case, images


def small_cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3))


def test_every_layer_counts_what_comes_out_of_it() -> None:
    floats = 5 * (4 * 64 + 4 * 64 + 256 + 3)
    assert activation_bytes(small_cnn(), torch.zeros(5, 1, 8, 8)) == 1 + 4 * floats


def test_so_many_clients_are_in_a_product_as_find_room_for_what_flows() -> None:
    examples, width = 8, 300

    def wide() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, width, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3)
        )

    each = 4 * examples * (2 * width * 64 + 2 * width + 3)
    assert (
        BatchTrainer(Case("wide", model=wide, examples=images).training()).at_once
        == ACTIVATION_BYTES // each
        < AT_ONCE_MAX
    )
    assert BatchTrainer(Case("small", model=small_cnn, examples=images).training()).at_once == AT_ONCE_MAX


def test_a_model_that_takes_no_such_inputs_is_refused_by_whoever_tries_it() -> None:
    with pytest.raises(CannotBatch, match=rf"by hand: Expected size .* \[{TRIED}, 6\] but got: \[{TRIED}, 7\]"):
        BatchTrainer(Case("narrow", model=lambda: nn.Sequential(nn.Linear(7, 3))).training())
