from pathlib import Path

import numpy as np
import pytest

from tests.parallel.checkpoint.runs import TIED, Full, load_and_step, save_after
from tests.parallel.ranks import call_on_ranks


def merged(results: list[tuple[Full, Full]], which: int) -> Full:
    """Merge the tensors of all ranks; every rank that has a name has the same."""
    found: Full = {}
    for result in results:
        for name, tensor in result[which].items():
            assert np.array_equal(found.setdefault(name, tensor), tensor), name
    return found


def equal(left: Full, right: Full) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Full, Full]:
    """Saved by four ranks of FSDP after three steps, which took the fourth while it was being written."""
    folder = tmp_path_factory.mktemp("run")
    results = call_on_ranks(save_after, 4, folder, "fsdp", 3, True)
    return folder, merged(results, 0), merged(results, 1)


@pytest.mark.parametrize(("layout", "num_ranks"), [("plain", 1), ("fsdp", 2), ("tp", 2), ("ddp", 2), ("stages", 4)])
def test_what_four_sharded_ranks_saved_as_they_trained_goes_on_under_any_layout(
    sharded: tuple[Path, Full, Full], layout: str, num_ranks: int
) -> None:
    folder, saved, later = sharded
    assert {"up.weight exp_avg", "up.weight exp_avg_sq", "up.weight step", "norm.running_mean"} <= saved.keys()
    results = call_on_ranks(load_and_step, num_ranks, folder, layout, 3)
    assert equal(merged(results, 0), saved)
    assert equal(merged(results, 1), later)


def test_a_process_without_a_group_loads_it_too(sharded: tuple[Path, Full, Full]) -> None:
    folder, saved, later = sharded
    assert equal((found := load_and_step(folder, "plain", 3))[0], saved)
    assert equal(found[1], later)


@pytest.mark.parametrize(("layout", "num_ranks"), [("ddp", 2), ("tp", 2), ("stages", 2)])
def test_what_another_layout_saved_goes_on_under_sharding(tmp_path: Path, layout: str, num_ranks: int) -> None:
    before = call_on_ranks(save_after, num_ranks, tmp_path, layout, 2)
    after = call_on_ranks(load_and_step, 2, tmp_path, "fsdp", 2)
    assert equal(merged(after, 0), merged(before, 0))
    assert equal(merged(after, 1), merged(before, 1))


def test_a_run_saved_before_its_first_step_starts_as_it_would_have(tmp_path: Path) -> None:
    before = call_on_ranks(save_after, 2, tmp_path, "fsdp", 0)
    after = call_on_ranks(load_and_step, 1, tmp_path, "plain", 0)
    assert not any("step" in name for name in merged(after, 0))
    assert equal(merged(after, 1), merged(before, 1))


@pytest.mark.parametrize(("saving", "loading"), [("fsdp", "stages"), ("stages", "plain")])
def test_tied_weights_are_one_wherever_the_copies_are(tmp_path: Path, saving: str, loading: str) -> None:
    ranks = {"plain": 1, "fsdp": 2, "stages": 2}
    before = call_on_ranks(save_after, ranks[saving], tmp_path, saving, 2, False, True)
    after = call_on_ranks(load_and_step, ranks[loading], tmp_path, loading, 2, True)
    for which in (0, 1):
        found, expected = merged(after, which), merged(before, which)
        for alias, first in TIED.items():
            assert np.array_equal(found[alias], expected[first])
            for kept in ("exp_avg", "exp_avg_sq", "step"):
                assert np.array_equal(found[f"{first} {kept}"], expected[f"{first} {kept}"])
                if f"{alias} {kept}" in found:  # of a stage that has the copy alone
                    assert np.array_equal(found[f"{alias} {kept}"], expected[f"{first} {kept}"])
