"""Any number of ranks makes the bits that one fold makes, whatever the rule, the optimizer and the cut of the model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.exchange import ExchangeBroken
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.fold.sharded import fold_shard
from atoll.aggregation.fold.step import Anchor, Step
from atoll.aggregation.fold.streaming import fold
from atoll.aggregation.fold.weights import Share, integer_weights
from atoll.aggregation.optimizers import DiLoCo, FedAdam, FedAvg
from atoll.aggregation.rules import gram as gram_module
from atoll.aggregation.rules.coordinate import Median, TrimmedMean
from atoll.aggregation.rules.geometric import CenteredClipping, GeometricMedian, MultiKrum, NearestNeighbourMixing
from atoll.tensors import pieces as cuts
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Tensor, in_order
from atoll.tensors.ownership import SEGMENTS, owned_pieces, owned_segments, segments_of
from tests.aggregation.models import store
from tests.aggregation.ranks import Threads, cohort_of, fold_on_ranks, on_ranks, write_shards

SHAPES = {"conv": (4, 3, 5), "bias": (7,), "scale": (), "table": (50, 3), "none": (0, 2), "mean": (9,)}
SHAPES |= {"control/conv": (4, 3, 5), "control/table": (50, 3)}
TRAINED = frozenset(name for name in SHAPES if not name.startswith("control/")) - {"mean"}
LAYOUT = in_order(
    [Tensor(name, "F32", shape) for name, shape in SHAPES.items()]
    + [Tensor("steps", "I64", ()), Tensor("seen", "U8", (31,))]
)
RULES = {
    "mean": None,
    "median": Median(),
    "trimmed_mean": TrimmedMean(1),
    "multi_krum": MultiKrum(1),
    "rfa": GeometricMedian(),
    "clipping": CenteredClipping(2.0),
    "mixed": NearestNeighbourMixing(1, Median()),
}


def model(rng):
    arrays = {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}
    return arrays | {"steps": np.array(rng.integers(1 << 60)), "seen": rng.integers(0, 60, 31).astype(np.uint8)}


def update(rng, omits=()):
    arrays = {
        name: np.asarray(rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 3)).astype(
            rng.choice([np.float32, np.float16])
        )
        for name, shape in SHAPES.items()
    }
    arrays |= {"steps": np.array(rng.integers(-(1 << 60), 0)), "seen": rng.integers(0, 60, 31).astype(np.uint8)}
    return {name: array for name, array in arrays.items() if name not in omits}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces of at most 32 bytes: every larger tensor is cut, also within its rows."""
    monkeypatch.setattr(cuts, "PIECE_BYTES_MIN", 32)
    monkeypatch.setattr(gram_module, "TILE_VALUES", 40)


def stored_round(folder: Path, rng, num_updates, omits=()):
    folder.mkdir(exist_ok=True)
    metadata = {safetensors_file.BUFFERS: json.dumps(["mean"])}
    safetensors_file.write(folder / "base", model(rng), metadata=metadata)
    factors = rng.choice([1.0, 0.25, 0.7, 1e-20], (num_updates, 2)).tolist()
    claims = [rng.integers(1, 1 << 20) * rng.choice([1.0, 0.1, 1e-25]) for _ in factors]
    return [
        Weighted(store(folder / f"u{k}", update(rng, omits if k % 2 else ())), weight, *both)
        for k, (both, weight) in enumerate(zip(factors, integer_weights(list(map(Share, claims))), strict=True))
    ]


def steps_of(folder: Path, step, rank=None, turn=0, share=None):
    """The step of a turn: it reads the slots that the turn before wrote, and may be drawn towards the first model."""
    anchor = None
    if turn and share is not None:
        anchor = Anchor(folder / ("base" if rank is None else f"rank{rank}.base"), share)
    name = "whole" if rank is None else f"rank{rank}"

    def paths(turn):
        return {slot: folder / f"{name}.{turn}.{slot}" for slot in step.slots}

    return replace(step, trained=TRAINED, before=paths(turn - 1) if turn else {}, after=paths(turn), anchor=anchor)


def compare(folder: Path, rng, step, size, num_updates, omits=(), share=None, **options):
    """Two rounds, the second on top of the first: whole, and on ranks."""
    updates = stored_round(folder, rng, num_updates, omits)
    whole_base = folder / "base"
    write_shards(whole_base, LAYOUT, size, lambda rank: folder / f"rank{rank}.base")
    for turn, before in enumerate(("base", 0)):
        whole = fold(whole_base, updates, folder / f"whole.{turn}", step=steps_of(folder, step, None, turn, share))
        parts = fold_on_ranks(
            LAYOUT,
            lambda rank, before=before: folder / f"rank{rank}.{before}",
            updates,
            rng.integers(0, size, num_updates).tolist(),
            size,
            out=lambda rank, turn=turn: folder / f"rank{rank}.{turn}",
            step=lambda rank, turn=turn: steps_of(folder, step, rank, turn, share),
            **options,
        )
        assert sum((part.pieces for part in parts), ()) == whole.pieces
        for slot, pieces in whole.slots.items():
            assert sum((part.slots[slot] for part in parts), ()) == pieces
        whole_base = folder / f"whole.{turn}"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_ranks_make_the_bits_of_one(tmp_path, rule, size):
    compare(tmp_path, np.random.default_rng(size), Step(FedAdam(lr=0.1), rule=RULES[rule]), size, num_updates=7)


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_ranks_draw_the_model_towards_an_older_version_as_one_does(tmp_path, rule):
    compare(tmp_path, np.random.default_rng(7), Step(rule=RULES[rule]), 3, num_updates=5, share=0.3)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    size=st.integers(1, 6),
    num_updates=st.integers(1, 6),
    tile_elements=st.integers(1, 70),
    threads=st.integers(1, 3),
    optimizer=st.sampled_from([FedAvg(), FedAdam(lr=0.1), DiLoCo()]),
    omits=st.sets(st.sampled_from(sorted(SHAPES))),
    num_clients=st.sampled_from([None, 11]),
    scale=st.sampled_from([1.0, 3.7]),
)
def test_any_ranks_tiles_and_threads_make_the_same_bits(
    tmp_path_factory, seed, size, num_updates, tile_elements, threads, optimizer, omits, num_clients, scale
):
    folder = tmp_path_factory.mktemp("round")
    execution = Execution(threads, tile_elements)
    step = Step(optimizer, scale=scale, num_clients=num_clients)
    compare(folder, np.random.default_rng(seed), step, size, num_updates, tuple(omits), execution=execution)


def test_ranks_divide_the_sum_of_control_variates_by_all_clients(tmp_path):
    """SCAFFOLD, against float64 by hand: weights and factors of the trained tensors do not reach the variates."""
    rng = np.random.default_rng(7)
    arrays = [update(rng) for _ in range(5)]
    safetensors_file.write(tmp_path / "base", model(rng))
    updates = [Weighted(store(tmp_path / f"u{k}", array), 10**k, 1.0, 0.1) for k, array in enumerate(arrays)]
    write_shards(tmp_path / "base", LAYOUT, 3, lambda rank: tmp_path / f"b{rank}")
    step = Step(FedAvg(0.5), TRAINED, scale=2.0, num_clients=9)
    fold_on_ranks(
        LAYOUT,
        lambda rank: tmp_path / f"b{rank}",
        updates,
        [2, 0, 2, 2, 0],
        3,
        out=lambda rank: tmp_path / f"o{rank}",
        step=lambda rank: step,
    )
    base = safetensors_file.read(tmp_path / "base")
    whole = b"".join(
        path.read_bytes()[safetensors_file.parse_header(path)[1] :]
        for path in (tmp_path / f"o{rank}" for rank in range(3))
    )
    start = sum(tensor.num_bytes for tensor in LAYOUT[: [t.name for t in LAYOUT].index("control/table")])
    table = np.frombuffer(whole[start : start + 600], np.float32).reshape(50, 3)
    total = sum(array["control/table"].astype(np.float64) for array in arrays)
    np.testing.assert_allclose(table, base["control/table"] + total / 9, rtol=1e-6, atol=1e-7)


def test_shards_one_after_the_other_are_the_model_s_file(tmp_path):
    rng = np.random.default_rng(5)
    updates = stored_round(tmp_path, rng, 3)
    write_shards(tmp_path / "base", LAYOUT, 3, lambda rank: tmp_path / f"b{rank}")
    fold_on_ranks(
        LAYOUT,
        lambda rank: tmp_path / f"b{rank}",
        updates,
        [0, 1, 2],
        3,
        out=lambda rank: tmp_path / f"o{rank}",
        step=lambda rank: Step(trained=frozenset(SHAPES)),
    )
    fold(tmp_path / "base", updates, tmp_path / "whole", step=Step(trained=frozenset(SHAPES)))
    data = [
        path.read_bytes()[safetensors_file.parse_header(path)[1] :] for path in (tmp_path / f"o{r}" for r in range(3))
    ]
    whole = tmp_path / "whole"
    assert b"".join(data) == whole.read_bytes()[safetensors_file.parse_header(whole)[1] :]
    assert len([part for part in data if part]) == 3
    assert all(safetensors_file.read_buffers(tmp_path / f"o{rank}") == {"mean"} for rank in range(3))


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_sends_no_more_than_its_share_of_one_accumulator(tmp_path, size, monkeypatch):
    monkeypatch.setattr(cuts, "PIECE_BYTES_MIN", 1 << 12)
    rng, layout = np.random.default_rng(1), (Tensor("w", "F32", (64, 1024)),)
    safetensors_file.write(tmp_path / "base", {"w": rng.standard_normal((64, 1024)).astype(np.float32)})
    write_shards(tmp_path / "base", layout, size, lambda rank: tmp_path / f"b{rank}")
    arrays = [{"w": rng.standard_normal((64, 1024)).astype(np.float32)} for _ in range(8)]
    updates = [Weighted(store(tmp_path / f"u{k}", array), 1) for k, array in enumerate(arrays)]
    cohort = cohort_of(updates, [k % size for k in range(8)], layout, size, frozenset())
    sent = []

    def work(exchange: Threads):
        own = [updates[place] for place in cohort.places[exchange.rank]]
        out = tmp_path / f"o{exchange.rank}"
        fold_shard(layout, tmp_path / f"b{exchange.rank}", own, out, cohort=cohort, exchange=exchange)
        sent.append(exchange.sent_bytes)

    on_ranks(size, work)
    assert sent == [8 * 64 * 1024 * (size - 1) // size] * size


def test_a_failure_of_one_rank_ends_the_fold_at_all_and_leaves_nothing(tmp_path):
    rng = np.random.default_rng(2)
    updates = stored_round(tmp_path, rng, 4)
    write_shards(tmp_path / "base", LAYOUT, 2, lambda rank: tmp_path / f"b{rank}")
    cohort = cohort_of(updates, [0, 1, 0, 1], LAYOUT, 2, frozenset())
    endings = {}

    def broken():
        raise InterruptedError("stopped")

    def work(exchange):
        own = [updates[place] for place in cohort.places[exchange.rank]]
        out = tmp_path / f"o{exchange.rank}"
        execution = Execution(between=broken if exchange.rank else None)
        try:
            fold_shard(
                LAYOUT, tmp_path / f"b{exchange.rank}", own, out, cohort=cohort, exchange=exchange, execution=execution
            )
        except Exception as error:
            endings[exchange.rank] = error
            exchange.leave()

    on_ranks(2, work)
    assert isinstance(endings[1], InterruptedError)
    assert isinstance(endings.get(0, ExchangeBroken()), ExchangeBroken)
    assert not (tmp_path / "o1").exists()
    assert not list(tmp_path.glob("*.part"))


def test_an_update_that_exceeds_its_magnitude_is_named_by_the_rank_that_has_it(tmp_path):
    rng = np.random.default_rng(3)
    updates = stored_round(tmp_path, rng, 2)
    wrong = store(tmp_path / "wrong", update(rng))
    updates[1] = Weighted(type(wrong)(wrong.path, wrong.pieces, {**wrong.magnitudes, "table": 1e-9}), 3)
    write_shards(tmp_path / "base", LAYOUT, 2, lambda rank: tmp_path / f"b{rank}")
    with pytest.raises(ValueError, match="wrong: tensor 'table' has values in"):
        fold_on_ranks(
            LAYOUT,
            lambda rank: tmp_path / f"b{rank}",
            updates,
            [0, 1],
            2,
            out=lambda rank: tmp_path / f"o{rank}",
            step=lambda rank: Step(),
        )


@settings(deadline=None, max_examples=30)
@given(sizes=st.lists(st.integers(0, 500), min_size=1, max_size=8), ranks=st.integers(1, SEGMENTS))
def test_segments_are_runs_and_ranks_own_all_of_them(sizes, ranks):
    layout = in_order(Tensor(f"t{index}", "F32", (size,)) for index, size in enumerate(sizes))
    pieces = [piece for segment in segments_of(layout) for piece in segment]
    assert pieces == list(cuts.cut_layout(layout, cuts.piece_bytes_of(layout)))
    assert [i for rank in range(ranks) for i in owned_segments(rank, ranks)] == list(range(SEGMENTS))
    assert [piece for rank in range(ranks) for piece in owned_pieces(pieces, rank, ranks)] == pieces


def test_large_models_are_shared_evenly(monkeypatch):
    monkeypatch.setattr(cuts, "PIECE_BYTES_MIN", 1 << 22)
    layout = in_order([Tensor("embedding", "F32", (32000, 1024)), Tensor("head", "F32", (1024, 4096))])
    total = sum(tensor.num_bytes for tensor in layout)
    for size in (2, 3, 4):
        shares = [
            sum(p.num_bytes for p in owned_pieces(cuts.cut_layout(layout, cuts.piece_bytes_of(layout)), rank, size))
            for rank in range(size)
        ]
        assert sum(shares) == total
        assert max(shares) - total / size < 1 << 23


@pytest.mark.parametrize(("rank", "size"), [(0, 0), (0, SEGMENTS + 1), (2, 2), (-1, 2)])
def test_there_is_no_such_rank(rank, size):
    with pytest.raises(ValueError, match=r"allowed: 1 to 64|is not in 0\.\."):
        owned_segments(rank, size)
