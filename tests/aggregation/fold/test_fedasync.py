"""FedAsync's mixing in the fold: an update, and the way back to the version that it was trained from."""

import numpy as np
import pytest

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.step import Anchor, Step
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.aggregation.optimizers import FedAvg
from atoll.tensors import safetensors_file
from tests.aggregation.fold.test_step import TRAINED, model
from tests.aggregation.models import store

SHARE = 0.6 * 3**-0.5


@pytest.fixture
def files(tmp_path):
    """The base, the older version, the update; as paths and as arrays."""
    arrays = [model(np.random.default_rng(seed)) for seed in (1, 2, 3)]
    base, older = tmp_path / "base", tmp_path / "older"
    safetensors_file.write(base, arrays[0])
    safetensors_file.write(older, arrays[1])
    return (base, older, store(tmp_path / "update", arrays[2])), arrays


def mixed(files, out, share=SHARE, **execution):
    base, older, update = files
    step = Step(FedAvg(), TRAINED, anchor=Anchor(older, share))
    fold(base, [Weighted(update, 1, share)], out, step=step, execution=Execution(**execution))
    return safetensors_file.read(out)


def test_the_model_is_mixed_with_the_client_s(tmp_path, files):
    paths, (base, older, update) = files
    new = mixed(paths, tmp_path / "new")
    for name in ("w", "b", "running_var"):
        x, x_old, u = (arrays[name].astype(np.float64) for arrays in (base, older, update))
        np.testing.assert_allclose(new[name], (1 - SHARE) * x + SHARE * (x_old + u), rtol=1e-6, atol=1e-7)
    assert new["steps"] == base["steps"] + update["steps"], "integers follow their update"


def test_with_a_whole_share_the_client_s_model_is_taken(tmp_path, files):
    paths, (_, older, update) = files
    new = mixed(paths, tmp_path / "new", share=1.0)
    np.testing.assert_allclose(new["w"], older["w"] + update["w"], rtol=2e-7, atol=2e-7)


def test_the_bits_depend_on_no_block_and_no_thread(tmp_path, files):
    paths, _ = files
    whole, tiles = mixed(paths, tmp_path / "whole"), mixed(paths, tmp_path / "tiles", tile_elements=3, threads=3)
    assert {name: a.tobytes() for name, a in whole.items()} == {name: a.tobytes() for name, a in tiles.items()}


def test_a_tensor_that_the_update_leaves_out_stays(tmp_path, files):
    (base, older, _), (arrays, _, update) = files
    part = store(tmp_path / "part", {name: array for name, array in update.items() if name != "b"})
    new = mixed((base, older, part), tmp_path / "new")
    np.testing.assert_array_equal(new["b"], arrays["b"])


def test_an_anchor_of_another_layout_is_refused(tmp_path, files):
    (base, older, update), (arrays, *_) = files
    safetensors_file.write(older, {name: array for name, array in arrays.items() if name != "b"})
    with pytest.raises(ValueError, match="its tensors are not the base's"):
        mixed((base, older, update), tmp_path / "new")
    assert not (tmp_path / "new").exists()
