"""The parts of an update may lie at any ranks: the fold has the bits of whole updates in one process."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.fold.sharded import fold_shard
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import fold
from atoll.aggregation.optimizers import FedAdam, FedAvg
from atoll.aggregation.rules import gram as gram_module
from atoll.aggregation.rules.coordinate import Median
from atoll.tensors import pieces as cuts
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Tensor
from atoll.tensors.updates.inspection import inspect
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader
from tests.aggregation.fold.test_sharded import LAYOUT, RULES, SHAPES, TRAINED, model, update
from tests.aggregation.models import in_parts, random_cuts, store
from tests.aggregation.ranks import cohort_of, on_ranks, write_shards
from tests.tensors.encoded_by_hand import store_encoded


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(cuts, "PIECE_BYTES_MIN", 32)
    monkeypatch.setattr(gram_module, "TILE_VALUES", 40)


def cut(rng, path, arrays, codec=""):
    """An update in boxes, as it is stored whole; with a codec its floats are encoded, box by box."""
    boxes = {name: random_cuts(rng, array.shape, depth=int(rng.integers(9))) for name, array in arrays.items()}
    if not codec:
        return store(path, arrays, cuts=boxes)
    arrays = {name: array.astype(np.float32) if name in SHAPES else array for name, array in arrays.items()}
    encoded = {name: codec for name in SHAPES if not name.startswith("control/") and arrays[name].size}
    whole, _ = store_encoded(path, arrays, encoded, cuts=boxes)
    return replace(whole, magnitudes=inspect(path, whole.pieces).magnitudes)


def spread(whole, first, size):
    """What each rank has of an update in parts: part i lies at rank (first + i) mod size. None: nothing."""
    pieces, files = iter(whole.pieces), [[] for _ in range(size)]
    for index, (file, num_pieces) in enumerate(whole.parts):
        files[(first + index) % size].append((file, tuple(itertools.islice(pieces, num_pieces))))
    return [
        StoredUpdate.of_parts(whole.path, here, whole.magnitudes, is_partial=True) if here else None for here in files
    ]


def compare(folder, rng, step, size, num_updates, *, codec="", omits=(), execution=None):
    """The parts of all updates dealt over the ranks, against a fold of the whole updates."""
    safetensors_file.write(folder / "base", model(rng))
    write_shards(folder / "base", LAYOUT, size, lambda rank: folder / f"base{rank}")
    updates, held, execution = [], [], execution or Execution()
    for k in range(num_updates):
        whole = cut(rng, folder / f"u{k}", update(rng, omits if k % 2 else ()), codec)
        numbers = int(rng.integers(1, 1 << 20)), *rng.choice([1.0, 0.25, 0.7, 1e-20], 2).tolist()
        updates.append(Weighted(whole, *numbers))
        parts = spread(in_parts(whole, int(rng.integers(1, 7)), rng), int(rng.integers(size)), size)
        held.append([None if of_rank is None else Weighted(of_rank, *numbers) for of_rank in parts])
    at_rank = [tuple(k for k, of_update in enumerate(held) if of_update[rank]) for rank in range(size)]
    cohort = replace(cohort_of(updates, [0] * num_updates, LAYOUT, size, TRAINED), places=tuple(at_rank))

    def slots(name):
        return {slot: folder / f"{name}.{slot}" for slot in step.slots}

    def work(exchange):
        rank = exchange.rank
        mine = [held[k][rank] for k in at_rank[rank]]
        base, out = folder / f"base{rank}", folder / f"out{rank}"
        of_rank = replace(step, trained=TRAINED, after=slots(f"rank{rank}"))
        return fold_shard(LAYOUT, base, mine, out, cohort=cohort, exchange=exchange, step=of_rank, execution=execution)

    whole = fold(folder / "base", updates, folder / "whole", step=replace(step, trained=TRAINED, after=slots("whole")))
    shards = on_ranks(size, work)
    assert sum((shard.pieces for shard in shards), ()) == whole.pieces
    for slot, pieces in whole.slots.items():
        assert sum((shard.slots[slot] for shard in shards), ()) == pieces


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["", "bf16", "fp16"])
@pytest.mark.parametrize("rule", RULES)
def test_spread_parts_make_the_bits_of_whole_updates(tmp_path, rule, codec):
    compare(tmp_path, np.random.default_rng(1), Step(FedAdam(lr=0.1), rule=RULES[rule]), 2, 7, codec=codec)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(1, 5),
    num_updates=st.integers(1, 6),
    tile_elements=st.integers(1, 70),
    rule=st.sampled_from([None, Median()]),
    omits=st.sets(st.sampled_from(sorted(SHAPES))),
)
def test_any_ranks_parts_and_tiles_make_the_same_bits(
    tmp_path_factory, seed, size, num_updates, tile_elements, rule, omits
):
    folder = tmp_path_factory.mktemp("round")
    step, execution = Step(FedAvg(), rule=rule), Execution(2, tile_elements)
    compare(folder, np.random.default_rng(seed), step, size, num_updates, omits=tuple(omits), execution=execution)


def test_a_negative_zero_stays_one_when_its_neighbours_lie_at_another_rank(tmp_path):
    """A rule that takes a value as it is must not see +0 for -0: -0 + -0 is -0, and the model has such elements."""
    values, layout = np.full((4, 2), -0.0, np.float32), (Tensor("w", "F32", (4, 2)),)
    safetensors_file.write(tmp_path / "base", {"w": values})
    write_shards(tmp_path / "base", layout, 2, lambda rank: tmp_path / f"base{rank}")
    rows = {"w": [((0, 0), (2, 2)), ((2, 0), (2, 2))]}
    parted = [
        in_parts(store(tmp_path / f"u{k}", {"w": values}, cuts=rows), 2, np.random.default_rng(k)) for k in range(3)
    ]
    updates = [Weighted(update, 1) for update in parted]
    held = [spread(update, 0, 2) for update in parted]
    at_rank = tuple(tuple(k for k in range(3) if held[k][rank]) for rank in range(2))
    cohort = replace(cohort_of(updates, [0] * 3, layout, 2, frozenset(["w"])), places=at_rank)
    step = Step(FedAvg(), frozenset(["w"]), Median())

    def work(exchange):
        rank = exchange.rank
        mine = [Weighted(held[k][rank], 1) for k in at_rank[rank]]
        out = tmp_path / f"out{rank}"
        return fold_shard(layout, tmp_path / f"base{rank}", mine, out, cohort=cohort, exchange=exchange, step=step)

    whole = fold(tmp_path / "base", updates, tmp_path / "whole", step=step)
    assert sum((shard.pieces for shard in on_ranks(2, work)), ()) == whole.pieces


def test_what_lies_elsewhere_reads_as_zeros(tmp_path):
    values, tensor = np.arange(1, 25, dtype=np.float32).reshape(4, 6), Tensor("w", "F32", (4, 6))
    boxes = {"w": [((0, 0), (4, 2)), ((0, 2), (4, 4))]}
    whole = store(tmp_path / "u", {"w": values}, cuts=boxes)
    left = replace(whole, pieces=whole.pieces[:1], parts=((whole.path, 1),), is_partial=True)
    expected = values.copy()
    expected[:, 2:] = 0
    with UpdateReader(left) as reader:
        out = np.full(17, 9.0, np.float32)
        np.testing.assert_array_equal(reader.read(tensor, 3, 20, out), expected.reshape(-1)[3:20])
        assert reader.meets(tensor, 0, 3)
        assert not reader.meets(tensor, 20, 24)
        assert not reader.meets(replace(tensor, name="other"), 0, 3)
    nothing = StoredUpdate.of_parts(whole.path, (), whole.magnitudes, is_partial=True)
    with UpdateReader(nothing) as reader:
        assert not reader.carries("w")
