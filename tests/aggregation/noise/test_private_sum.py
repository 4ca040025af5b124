"""The private sum: its grid, the bound of a client's part, and noise that no cut of the work changes."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import fold
from atoll.aggregation.noise.private_sum import (
    GRID_BITS,
    PrivateSum,
    clip_to,
    deviation_of,
    exponent_of,
    fault_of_sum,
    rounded_parts,
)
from atoll.protocol.privacy.correlated import inverse_of, inverse_square_root, squares_by_uses
from atoll.tensors import pieces as cuts
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Tensor, in_order
from atoll.tensors.noise.grid_noise import BLOCK
from atoll.tensors.updates.reader import UpdateReader
from tests.aggregation.models import store
from tests.aggregation.ranks import fold_on_ranks, write_shards

KEY = bytes(range(32))
SHAPES = {"w": (70, 300), "b": (300,), "scale": (), "none": (0, 2)}
LAYOUT = in_order([Tensor(name, "F32", shape) for name, shape in SHAPES.items()])


@pytest.mark.parametrize("deviation", [1e-6, 0.3, 1.0, 1.999, 2.0, 5e5])
def test_the_grid_follows_from_the_deviation(deviation: float) -> None:
    steps = deviation / 2.0 ** exponent_of(deviation)
    assert 2**30 <= steps < 2**31


def test_noise_is_the_same_however_it_is_cut() -> None:
    private, size = PrivateSum(0.7, 10, KEY), 3 * BLOCK + 17
    whole = private.noise("w", size, 0, size)
    assert len(whole) == size
    for start, stop in ((0, 1), (5, BLOCK), (BLOCK - 1, BLOCK + 1), (BLOCK, 2 * BLOCK), (2 * BLOCK + 9, size), (7, 7)):
        assert np.array_equal(private.noise("w", size, start, stop), whole[start:stop])
    assert not np.array_equal(private.noise("v", size, 0, 50), whole[:50])
    assert not np.array_equal(PrivateSum(0.7, 10, bytes(32)).noise("w", size, 0, 50), whole[:50])
    assert not np.array_equal(whole[:BLOCK], whole[BLOCK : 2 * BLOCK])


def test_the_noise_has_the_deviation() -> None:
    private = PrivateSum(0.7, 10, KEY)
    noise = private.noise("w", 200_000, 0, 200_000) * 2.0**private.exponent
    assert noise.std() == pytest.approx(0.7, rel=0.01)


def test_no_rounded_update_is_longer_than_the_clip_norm() -> None:
    """The worst updates: of any direction, clipped, then rounded to whole steps; norms in exact arithmetic."""
    rng, clip_norm = np.random.default_rng(0), 1.0
    for z in (0.5, 3.0, 1000.0):
        exponent = exponent_of(z * clip_norm)
        for size in (1, 7, 1000):
            bound = clip_to(clip_norm, exponent, size)
            for scale in (1.0, 1e6):
                update = rng.standard_normal(size) * scale
                factor = min(1.0, bound / float(np.sqrt((update**2).sum())))
                steps = np.rint(update * (factor * 2.0**-exponent))
                norm = sum(Fraction(int(step)) ** 2 for step in steps) * Fraction(2) ** (2 * exponent)
                assert norm <= Fraction(clip_norm) ** 2
    assert clip_to(1.0, exponent_of(1.0), 25_000_000) > 1 - 1e-5, "rounding takes little"


def test_noise_too_large_for_its_grid_and_too_little_for_its_sum_are_refused() -> None:
    with pytest.raises(ValueError, match="too fine for the grid of their noise"):
        clip_to(1.0, exponent_of(1e6), 25_000_000)
    assert fault_of_sum(1000, 1.0) == ""
    assert "leaves the 52 bits" in fault_of_sum(10_000_000, 0.001)


@pytest.mark.parametrize("uses", [1, 3])
def test_noises_with_the_same_releases_are_within_the_distance_that_the_deviation_is_for(uses: int) -> None:
    """Sums with a client whose updates have one direction, and without it; all in steps of the grid."""
    rounds, apart, bands, values, clip, z = 9, 3, 4, 4, 1000, 2.0**19
    d, most = inverse_square_root(bands), 3
    c = inverse_of(d, rounds)
    squares = squares_by_uses(c, rounds, apart, most)
    exact = z * math.sqrt(squares[-1]) * clip
    assert exponent_of(exact) == 0, "so that distances are in whole steps"
    rounding = rounds, math.fsum(c) * math.sqrt(squares[-1] / squares[0])
    share = math.sqrt(squares[uses - 1] / squares[-1])  # of the distance, as the rules account
    bound = deviation_of(exact, z, values, rounding) / z * share
    rng, longest = np.random.default_rng(uses), 0.0
    for _ in range(300):
        sums = rng.integers(-(2**40), 2**40, (rounds, values))
        others = sums.copy()
        others[[apart * use for use in range(uses)], rng.integers(values)] -= clip
        noises = np.rint(rng.standard_normal((rounds, values)) * exact).astype(np.int64)
        moved = np.zeros_like(noises)
        for t in range(rounds):
            release = sums[t] + noises[t] + _parts(noises, d, t)
            moved[t] = release - others[t] - _parts(moved, d, t)
        longest = max(longest, math.sqrt(float(((moved - noises) ** 2).sum())))
    assert exact / z * share < longest <= bound, "rounding costs something, and not more than the deviation has"


def _parts(noises: np.ndarray, d: tuple[float, ...], t: int) -> np.ndarray:
    return rounded_parts(((noises[t - j], d[j]) for j in range(1, min(len(d), t + 1))), noises.shape[1])


def test_what_rounding_costs_is_counted_on_the_coarser_grid_that_it_makes() -> None:
    below = math.nextafter(2.0, 0.0)
    found = deviation_of(below, 1.0, 100, (4, 2.0))
    assert exponent_of(found) == exponent_of(below) + 1
    assert found - below >= 1.0 * 2.0 * math.sqrt(400) * 2.0 ** exponent_of(found)
    assert deviation_of(1.5, 1.0, 100, (4, 2.0)) - 1.5 == pytest.approx(40 * 2.0**-GRID_BITS, rel=2e-3)
    assert deviation_of(1.5, 3.0, 10**9, (0, 0.0)) == 1.5
    with pytest.raises(ValueError, match="rounding would add more than 25% to it"):
        deviation_of(1.0, 1000.0, 10**12, (2000, 10.0))


def test_parts_of_earlier_noises_are_added_and_the_same_however_they_are_cut() -> None:
    keys, size = [bytes([number] * 32) for number in (1, 2)], BLOCK + 50
    both = PrivateSum(0.7, 10, KEY, ((keys[0], -0.5), (keys[1], -0.125)))
    whole = both.noise("w", size, 0, size)
    assert np.array_equal(both.noise("w", size, BLOCK - 5, BLOCK + 5), whole[BLOCK - 5 : BLOCK + 5])
    new, last, before = (PrivateSum(0.7, 10, key).noise("w", size, 0, size) for key in (KEY, *keys))
    assert np.abs(whole - (new - 0.5 * last - 0.125 * before)).max() <= 0.5


def _round(folder: Path, number: int = 5) -> list[Weighted]:
    rng = np.random.default_rng(3)

    def arrays() -> dict[str, np.ndarray]:
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}

    safetensors_file.write(folder / "base", {name: 0 * array for name, array in arrays().items()})
    found = []
    for k in range(number):
        update = arrays()
        norm = math.sqrt(sum(float((array.astype(np.float64) ** 2).sum()) for array in update.values()))
        found.append(Weighted(store(folder / f"u{k}", update), 1, min(1.0, 2.0 / norm)))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_tiles_and_threads_make_the_bits_of_one(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "PIECE_BYTES_MIN", 1 << 13)
    updates = _round(tmp_path)
    step = Step(trained=frozenset(SHAPES), private=PrivateSum(2.0, 8, KEY))
    whole = fold(tmp_path / "base", updates, tmp_path / "whole", step=step)
    again = fold(
        tmp_path / "base", updates[::-1], tmp_path / "again", step=step, execution=Execution(3, tile_elements=977)
    )
    assert again.pieces == whole.pieces
    write_shards(tmp_path / "base", LAYOUT, size, lambda rank: tmp_path / f"b{rank}")
    parts = fold_on_ranks(
        LAYOUT,
        lambda rank: tmp_path / f"b{rank}",
        updates,
        [k % size for k in range(len(updates))],
        size,
        out=lambda rank: tmp_path / f"o{rank}",
        step=lambda rank: step,
    )
    assert sum((part.pieces for part in parts), ()) == whole.pieces


def test_the_version_is_the_clipped_sum_and_noise_over_the_fixed_number(tmp_path: Path) -> None:
    updates = _round(tmp_path)
    private = PrivateSum(2.0, 8, KEY)
    fold(tmp_path / "base", updates, tmp_path / "out", step=Step(trained=frozenset(SHAPES), private=private))
    new = safetensors_file.read(tmp_path / "out")
    for name, shape in SHAPES.items():
        size = math.prod(shape)
        total = private.noise(name, size, 0, size) * 2.0**private.exponent
        for item in updates:
            with UpdateReader(item.update) as reader:
                values = reader.read(Tensor(name, "F32", shape), 0, size).astype(np.float64) if size else np.zeros(0)
            total = total + values * item.factor
        assert new[name].ravel() == pytest.approx(total / 8, rel=1e-5, abs=1e-6)
