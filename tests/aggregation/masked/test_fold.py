"""The fold of masked updates: against rationals, the plain fold, and itself on other ranks and boxes."""

import math
import random
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.grid import grid_exponent
from atoll.aggregation.fold.step import Step
from atoll.aggregation.masked.fold import fold_masked
from atoll.aggregation.masked.no_sum import NoSum
from atoll.aggregation.noise.private_sum import PrivateSums
from atoll.aggregation.optimizers import FedAdam
from atoll.aggregation.rules.coordinate import Median, TrimmedMean
from atoll.aggregation.rules.geometric import GeometricMedian
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Tensor, in_order
from atoll.tensors.noise.grid_noise import GridNoise
from atoll.tensors.secure.plan import Vector
from atoll.tensors.secure.vector import clip_steps, share_of_noise
from tests.aggregation.masked.sessions import float_mean, masked_round, split_over_ranks
from tests.aggregation.models import fold_in
from tests.aggregation.ranks import on_ranks, write_shards
from tests.tensors.masked.members import LAYOUT, plan_of, update_of

FLOATS = [tensor.name for tensor in LAYOUT if tensor.dtype == "F32"]


def base_of(layout, seed=99):
    draw = np.random.default_rng(seed)
    return {
        t.name: (
            draw.normal(0, 1, t.shape).astype(np.float32)
            if t.dtype == "F32"
            else np.asarray(draw.integers(100, 150, t.shape), {"I64": np.int64, "U8": np.uint8}[t.dtype])
        )
        for t in layout
    }


def folded(folder, round_, vector, base, name="out", **options):
    """Fold in one process; return the pieces, the new values and the outcome."""
    safetensors_file.write(folder / "base", base, durable=False)
    done, outcome = fold_masked(
        folder / "base", round_.sessions, folder / name, vector=vector, durable=False, **options
    )
    return done.pieces, safetensors_file.read(folder / name), outcome


def members(count, bits=32, seed=0, size=0.1, layout=LAYOUT, **options):
    plans = []
    for number in range(count):
        plan = plan_of(layout, bits, num_examples=10 * (number + 1) + seed, **options)
        plans.append((plan, update_of(layout, 1000 * seed + number, size)))
    return plans


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sizes", [(3,), (4, 3), (3, 5, 3)])
def test_the_new_version_is_the_base_and_the_mean_of_all_members(tmp_path, bits, sizes):
    plans = [members(size, bits, seed) for seed, size in enumerate(sizes)]
    round_ = masked_round(tmp_path, LAYOUT, plans)
    vector, base = Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT)
    _, new, outcome = folded(tmp_path, round_, vector, base)
    everyone = [each for plan in plans for each in plan]
    for name in FLOATS:
        expected = (base[name].astype(np.float64) + float_mean(round_, vector, name)).astype(np.float32)
        assert np.abs(new[name] - expected).max(initial=0) <= np.spacing(np.abs(expected)).max(initial=0)
        clipped = [
            min(1.0, 1.0 / math.sqrt(sum(float((u[n].astype(np.float64) ** 2).sum()) for n in FLOATS)))
            for _, u in everyone
        ]
        total = sum(
            p.num_examples * factor * u[name].astype(np.float64)
            for (p, u), factor in zip(everyone, clipped, strict=True)
        )
        plain = base[name] + np.asarray(total) / sum(p.num_examples for p, _ in everyone)
        step = 2.0 ** -(21 if bits == 32 else 43)
        assert np.abs(new[name] - plain).max(initial=0) <= 4 * step / outcome.weight * len(everyone) + 1e-6
    for name in ("steps", "small"):
        weights = [p.weight for p, _ in everyone]
        for index, value in enumerate(np.asarray(new[name]).reshape(-1).tolist()):
            total = sum(
                w * int(np.asarray(u[name]).reshape(-1)[index]) for w, (_, u) in zip(weights, everyone, strict=True)
            )
            assert value == int(np.asarray(base[name]).reshape(-1)[index]) + round(Fraction(total, sum(weights)))
    assert outcome.members == sum(sizes)
    assert outcome.weight == pytest.approx(sum(p.num_examples for plan in plans for p, _ in plan) / 100, rel=1e-12)
    assert outcome.statistics == {
        "loss": (1.5 * sum(sizes), 40.0 * sum(sizes)),
        "accuracy": (31.0 * sum(sizes), 40.0 * sum(sizes)),
    }
    assert not outcome.dropped


@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_of_zero_updates_is_the_base_again(tmp_path, bits):
    """flower#7631: no norm of zero divides, and the session counts."""
    nothing = {tensor.name: np.zeros_like(update_of(LAYOUT, 0, 0.1)[tensor.name]) for tensor in LAYOUT}
    plans = [[(plan_of(LAYOUT, bits, num_examples=10), nothing) for _ in range(3)]]
    base = base_of(LAYOUT)
    _, new, outcome = folded(tmp_path, masked_round(tmp_path, LAYOUT, plans), Vector(LAYOUT, plans[0][0][0]), base)
    assert outcome.members == 3
    assert not outcome.dropped
    for name, values in base.items():
        np.testing.assert_array_equal(new[name], values)


def test_64_bits_on_the_grid_of_the_plain_fold_have_its_bits(tmp_path):
    layout = tuple(tensor for tensor in LAYOUT if tensor.name != "empty")
    updates = [(update_of(layout, seed, 10.0 ** (seed - 2)), 7 + 30 * seed) for seed in range(4)]
    base, total = base_of(layout), sum(weight for _, weight in updates)
    floats = sorted(tensor.name for tensor in layout if tensor.dtype == "F32")
    grid = tuple(
        grid_exponent(float(max(np.abs(u[name]).max() for u, _ in updates)), total_weight=total, count=4) - 10
        for name in floats
    )
    options = {"clip_norm": 1e30, "examples_max": 1024, "grid": grid, "exponents": ()}
    plans = [(plan_of(layout, 64, num_examples=weight, **options), update) for update, weight in updates]
    for groups in ([plans], [plans[:2], plans[2:]]):
        round_ = masked_round(tmp_path, layout, groups)
        (tmp_path / "secure").mkdir(exist_ok=True)
        _, new, _ = folded(tmp_path / "secure", round_, Vector(layout, plans[0][0]), base)
        (tmp_path / "grid").mkdir(exist_ok=True)
        plain = fold_in(tmp_path / "grid", base, updates)
        for name in new:
            assert np.array_equal(new[name], plain[name]), name


@given(
    sizes=st.lists(st.integers(3, 5), min_size=1, max_size=2),
    bits=st.sampled_from([32, 64]),
    seed=st.integers(0, 2**20),
    ranks=st.integers(2, 4),
    tile=st.sampled_from([7, 64, None]),
)
@settings(max_examples=25, deadline=None)
def test_boxes_ranks_tiles_and_threads_change_no_bit(tmp_path_factory, sizes, bits, seed, ranks, tile):
    folder = tmp_path_factory.mktemp("ranks")
    layout = (*LAYOUT, Tensor("big", "F32", (3, 4, 5)))
    plans = [members(size, bits, number + seed, 0.05, layout) for number, size in enumerate(sizes)]
    round_, vector, base = masked_round(folder, layout, plans, seed), Vector(layout, plans[0][0][0]), base_of(layout)
    pieces, new, outcome = folded(folder, round_, vector, base, execution=Execution(2, tile_elements=tile))
    write_shards(folder / "base", vector.layout, ranks, lambda rank: folder / f"b{rank}")
    held = [split_over_ranks(session, ranks, seed + number) for number, session in enumerate(round_.sessions)]

    def work(exchange):
        rank = exchange.rank
        return fold_masked(
            folder / f"b{rank}",
            [of_ranks[rank] for of_ranks in held],
            folder / f"o{rank}",
            vector=vector,
            exchange=exchange,
            execution=Execution(2, tile_elements=tile),
            durable=False,
        )

    results = on_ranks(ranks, work)
    assert tuple(piece for done, _ in results for piece in done.pieces) == pieces
    assert all(found == outcome for _, found in results)
    assert set(new) == {tensor.name for tensor in layout}


def test_a_session_that_is_too_long_is_dropped_alone_and_named(tmp_path):
    """A member that does not clip, and claims that it did: its session alone does not count."""
    plans = [members(3, seed=number) for number in range(3)]
    plans[1][2] = (plans[1][2][0], {**plans[1][2][1], "b": np.full(5, -100.0, np.float32)})
    round_ = masked_round(tmp_path, LAYOUT, plans)
    vector, base = Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT)
    honest = folded(tmp_path, round_, vector, base)
    assert not honest[2].dropped  # it is clipped, as it should be
    _with_words(tmp_path, round_, vector, 1, 2, lambda words: {**words, "b": np.full(5, -(2**20) * 40, np.int32)})
    _, new, outcome = folded(tmp_path, round_, vector, base)
    assert list(outcome.dropped) == [1]
    assert "its norm is" in outcome.dropped[1]
    assert outcome.members == 6
    for name in FLOATS:
        expected = (base[name].astype(np.float64) + float_mean(round_, vector, name, [0, 2])).astype(np.float32)
        assert np.abs(new[name] - expected).max(initial=0) <= np.spacing(np.abs(expected)).max(initial=0)


SMALL = (Tensor("b", "F32", (5,)), Tensor("n", "I64", ()))


def _small(folder, draw, sessions=3):
    """Return a round of small sessions, and a session and a member of it."""
    folder.mkdir()
    plans = [
        members(draw.randint(3, 6), seed=draw.randrange(99), layout=SMALL, examples_max=200) for _ in range(sessions)
    ]
    round_ = masked_round(folder, SMALL, plans)
    liar = draw.randrange(sessions)
    return round_, Vector(SMALL, plans[0][0][0]), liar, draw.randrange(len(plans[liar]))


def test_dishonest_move_51_a_member_that_ignores_the_bound_costs_its_session_alone(tmp_path):
    for seed in range(20):
        draw, folder = random.Random(f"long {seed}"), tmp_path / str(seed)
        round_, vector, liar, index = _small(folder, draw)
        _with_words(
            folder, round_, vector, liar, index, lambda words: {**words, "b": np.full(5, -(2**20) * 100, np.int32)}
        )
        base = base_of(SMALL)
        _, new, outcome = folded(folder, round_, vector, base)
        assert list(outcome.dropped) == [liar]
        assert "its norm is" in outcome.dropped[liar]
        others = [number for number in range(3) if number != liar]
        expected = (base["b"].astype(np.float64) + float_mean(round_, vector, "b", others)).astype(np.float32)
        assert np.abs(new["b"] - expected).max() <= np.spacing(np.abs(expected)).max()


def test_dishonest_move_54_a_weight_above_1_is_seen_only_where_the_sum_is_beyond_that_of_its_members(tmp_path):
    for seed in range(20):
        draw, folder = random.Random(f"heavy {seed}"), tmp_path / str(seed)
        round_, vector, liar, index = _small(folder, draw)
        place, claimed = vector.exact.weight, []
        room = sum(2**52 - int(words["secure/exact"][place]) for words in round_.words[liar])
        is_seen = draw.random() < 0.5
        more = room + is_seen * draw.randint(1, 2**54)

        def lie(words, place=place, more=more, claimed=claimed):
            exact = words["secure/exact"].copy()
            exact[place] += more
            claimed.append(int(exact[place]))
            return {**words, "secure/exact": exact}

        _with_words(folder, round_, vector, liar, index, lie)
        assert claimed[0] > 2**52, "more than any honest member has"
        _, _, outcome = folded(folder, round_, vector, base_of(SMALL))
        assert list(outcome.dropped) == [liar] * is_seen
        if is_seen:
            assert "its weight is" in outcome.dropped[liar]


def _with_words(folder, round_, vector, number, index, change):
    """Replace the masked update of a member by one of other words, under the same masks."""
    session = round_.sessions[number]
    update = session.updates[index]
    position, old = update.data_start, update.path.read_bytes()
    words = change(round_.words[number][index])
    out = bytearray(old)
    for piece in update.pieces:
        dtype = np.uint32 if piece.dtype == "I32" else np.uint64
        masked = np.frombuffer(old, dtype, piece.num_elements, position)
        before = np.ascontiguousarray(round_.words[number][index][piece.tensor]).reshape(-1).view(dtype)
        after = np.ascontiguousarray(words[piece.tensor]).reshape(-1).view(dtype)
        out[position : position + piece.num_bytes] = (masked - before + after).tobytes()
        position += piece.num_bytes
    update.path.write_bytes(bytes(out))


@pytest.mark.parametrize("place", ["weight", "members", "within"])
def test_a_sum_of_impossible_counts_is_dropped(tmp_path, place):
    plans = [members(3, seed=number) for number in range(2)]
    round_ = masked_round(tmp_path, LAYOUT, plans)
    vector, base = Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT)

    def lie(words):
        exact = words["secure/exact"].copy()
        exact[getattr(vector.exact, place)] = 2**54
        return {**words, "secure/exact": exact}

    _with_words(tmp_path, round_, vector, 0, 1, lie)
    _, _, outcome = folded(tmp_path, round_, vector, base)
    assert list(outcome.dropped) == [0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_session_whose_integers_leave_their_dtype_is_dropped_alone(tmp_path, size):
    """A member that adds 2^62 to a counter of bytes would end the round of all."""
    plans = [members(3, seed=number) for number in range(2)]
    round_ = masked_round(tmp_path, LAYOUT, plans)
    vector, base = Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT)
    place = vector.exact.integers["small"]

    def lie(words):
        exact = words["secure/exact"].copy()
        exact[place.start + 3] += 1 << 54  # of the upper words
        return {**words, "secure/exact": exact}

    _with_words(tmp_path, round_, vector, 1, 0, lie)
    safetensors_file.write(tmp_path / "base", base, durable=False)
    write_shards(tmp_path / "base", in_order(LAYOUT), size, lambda rank: tmp_path / f"b{rank}")
    held = [split_over_ranks(session, size, session.number) for session in round_.sessions]

    def work(exchange):
        rank = exchange.rank
        mine, out = [of_ranks[rank] for of_ranks in held], tmp_path / f"o{rank}"
        options = {"vector": vector, "exchange": exchange if size > 1 else None, "durable": False}
        return fold_masked(tmp_path / (f"b{rank}" if size > 1 else "base"), mine, out, **options)[1]

    for outcome in on_ranks(size, work):
        assert outcome.dropped == {1: "an integer tensor of its mean leaves the dtype"}
        assert outcome.members == 3


def test_a_missing_member_or_stream_drops_the_session_and_none_left_is_no_version(tmp_path):
    plans = [members(3, seed=number) for number in range(2)]
    round_ = masked_round(tmp_path, LAYOUT, plans)
    vector, base = Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT)
    first, second = round_.sessions
    round_.sessions = [replace(first, updates=first.updates[1:]), second]
    _, _, outcome = folded(tmp_path, round_, vector, base)
    assert outcome.dropped.keys() == {0}
    assert "canaries" in outcome.dropped[0]
    round_.sessions = [
        replace(first, streams=first.streams[1:]),
        replace(second, streams=((bytes(32), 1), *second.streams)),
    ]
    with pytest.raises(
        NoSum, match=r"no secure sum of the round counts: session 0: its canaries.*; session 1"
    ) as caught:
        folded(tmp_path, round_, vector, base, "none")
    assert caught.value.dropped.keys() == {0, 1}
    assert not (tmp_path / "none").exists()
    assert not [path for path in tmp_path.iterdir() if "part" in path.name]


def test_keys_are_in_no_text(tmp_path):
    plans = [members(3)]
    session = masked_round(tmp_path, LAYOUT, plans).sessions[0]
    assert "streams" not in repr(session)
    for key, _ in session.streams:
        assert key.hex() not in repr(session)
        assert repr(key) not in repr(session)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(1)])
def test_a_rule_reduces_the_means_of_sessions(tmp_path, rule):
    plans = [members(3, seed=number) for number in range(4)]
    round_ = masked_round(tmp_path, LAYOUT, plans)
    vector, base = Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT)
    _, new, _ = folded(tmp_path, round_, vector, base, step=Step(rule=rule))
    for name in FLOATS:
        rows = np.sort([float_mean(round_, vector, name, [number]) for number in range(4)], axis=0)
        expected = base[name] + (rows[1] + rows[2]) / 2
        assert np.abs(new[name] - expected).max(initial=0) <= 1e-6


def test_a_rule_that_needs_more_sessions_or_whole_updates_is_refused(tmp_path):
    plans = [members(3, seed=number) for number in range(2)]
    round_ = masked_round(tmp_path, LAYOUT, plans)
    vector, base = Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT)
    with pytest.raises(ValueError, match="2"):
        folded(tmp_path, round_, vector, base, step=Step(rule=TrimmedMean(1)))
    with pytest.raises(ValueError, match="shows no single update"):
        folded(tmp_path, round_, vector, base, step=Step(rule=GeometricMedian()))


def test_the_server_optimizer_moves_by_the_mean(tmp_path):
    plans = [members(3)]
    round_ = masked_round(tmp_path, LAYOUT, plans)
    vector, base = Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT)
    after = {slot: tmp_path / slot for slot in FedAdam().slots}
    _, new, _ = folded(tmp_path, round_, vector, base, step=Step(FedAdam(), frozenset({"a.w"}), after=after))
    mean = float_mean(round_, vector, "a.w")
    state = {slot: np.full(mean.shape, FedAdam().init(slot)) for slot in FedAdam().slots}
    expected = FedAdam().apply(base["a.w"].astype(np.float64), mean, state)
    assert np.abs(new["a.w"] - expected).max() <= 1e-6
    assert np.array_equal(new["b"], (base["b"] + float_mean(round_, vector, "b")).astype(np.float32))


@pytest.mark.parametrize("change", ["dtype", "name", "missing", "codec"])
def test_an_update_of_another_layout_is_refused(tmp_path, change):
    plans = [members(3)]
    round_ = masked_round(tmp_path, LAYOUT, plans)
    vector, base = Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT)
    session = round_.sessions[0]
    update = session.updates[0]
    place = [piece.tensor for piece in update.pieces].index("b")
    pieces = [*update.pieces]
    if change == "missing":
        del pieces[place]
    else:
        wrong = {"dtype": {"dtype": "F32"}, "name": {"tensor": "c"}, "codec": {"codec": "bf16", "encoded_bytes": 20}}
        pieces[place] = replace(pieces[place], **wrong[change])
    round_.sessions[0] = replace(session, updates=(replace(update, pieces=tuple(pieces)), *session.updates[1:]))
    with pytest.raises(ValueError, match=r"the sum has|not all of the 5 tensors of the sum"):
        folded(tmp_path, round_, vector, base)


def test_ranges_adapt_until_the_worst_tensor_is_right(tmp_path):
    """Tensors of very different sizes: from the fourth round on each has a relative error of at most 5e-4."""
    layout = tuple(Tensor(name, "F32", (2000,)) for name in ("a", "b", "c"))
    sizes, exponents, errors = {"a": 1e-2, "b": 1e-4, "c": 3e-6}, (0, 0, 0), []
    for number in range(6):
        plans = []
        for member in range(5):
            draw = np.random.default_rng(10 * number + member)
            update = {name: draw.normal(size, size, 2000).astype(np.float32) for name, size in sizes.items()}
            plans.append((plan_of(layout, exponents=exponents, num_examples=100), update))
        round_, vector = masked_round(tmp_path, layout, [plans]), Vector(layout, plans[0][0])
        _, new, outcome = folded(tmp_path, round_, vector, {name: np.zeros(2000, np.float32) for name in sizes})
        exponents = outcome.exponents
        worst = 0.0
        for name in sizes:
            right = np.mean([update[name].astype(np.float64) for _, update in plans], axis=0)
            worst = max(worst, float(np.linalg.norm(new[name] - right) / np.linalg.norm(right)))
        errors.append(worst)
    assert errors[0] > 1e-2
    assert max(errors[3:]) <= 5e-4
    assert exponents[2] < exponents[1] < exponents[0] <= 0


def test_one_value_grows_beyond_the_range_and_the_range_follows(tmp_path):
    layout = (Tensor("a", "F32", (50,)),)
    exponents, found = (-9,), []
    for _ in range(4):
        plans = [(plan_of(layout, exponents=exponents), {"a": np.full(50, 0.1, np.float32)}) for _ in range(3)]
        round_, vector = masked_round(tmp_path, layout, [plans]), Vector(layout, plans[0][0])
        _, new, outcome = folded(tmp_path, round_, vector, {"a": np.zeros(50, np.float32)})
        exponents = outcome.exponents
        found.append((exponents[0], float(new["a"].max())))
    assert [exponent for exponent, _ in found] == [-7, -5, -3, -3]  # 40 of 100 examples: 0.04 > 2^-5
    assert found[-1][1] == pytest.approx(0.1, rel=1e-3)


def test_a_fold_that_is_broken_off_leaves_nothing(tmp_path):
    plans = [members(3)]
    round_ = masked_round(tmp_path, LAYOUT, plans)

    def stop():
        raise InterruptedError

    with suppress(InterruptedError):
        folded(tmp_path, round_, Vector(LAYOUT, plans[0][0][0]), base_of(LAYOUT), execution=Execution(between=stop))
    assert not (tmp_path / "out").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "plain", "encoded", "masked", "s0m0", "s0m1", "s0m2"}


def private_members(count, share, layout):
    plan = plan_of(layout, exponents=(0,) * len(layout), is_private=True, share=share, examples_max=0, metrics=())
    return [(replace(plan, statistics={}), update_of(layout, number, 1e-3)) for number in range(count)]


@pytest.mark.parametrize("by", ["clients", "coordinator"])
def test_a_private_mean_has_the_noise_and_the_fixed_divisor(tmp_path, by):
    """The members' noise is in the words, the coordinator's in the fold; neither is divided by who came."""
    layout, z, h, divisor, number = (Tensor("b", "F32", (500,)), Tensor("w", "F32", (300, 400))), 0.9, 2, 7, 3
    share = share_of_noise(32, z, h) if by == "clients" else 0.0
    shares = [GridNoise(share, bytes([index + 1]) * 32) if share else None for index in range(2 * number)]
    plans = [private_members(number, share, layout) for _ in range(2)]
    round_ = masked_round(tmp_path, layout, plans, shares=shares)
    vector, base = Vector(layout, plans[0][0][0]), {t.name: np.zeros(t.shape, np.float32) for t in layout}
    noise = GridNoise(share_of_noise(32, z, 1), bytes(range(32))) if by == "coordinator" else None
    step = Step(private_sums=PrivateSums(divisor, noise))
    _, new, outcome = folded(tmp_path, round_, vector, base, step=step)
    assert not outcome.dropped, "noise is within the bound of the sum's norm"
    assert outcome.exponents == (0, 0)
    _, cut, _ = folded(tmp_path, round_, vector, base, "cut", step=step, execution=Execution(2, tile_elements=777))
    mean = {name: np.sum([words[name] for each in round_.words for words in each], axis=0) for name in ("b", "w")}
    found = []
    for name, total in mean.items():
        assert np.array_equal(new[name], cut[name])
        found.append((new[name] - total * (1.0 / clip_steps(32) / divisor)).reshape(-1))
    variance = z**2 / divisor**2 * (2 * number / h if by == "clients" else 1)
    assert np.concatenate(found).var() == pytest.approx(variance, rel=0.02)


def test_a_private_sum_that_is_longer_than_members_and_noise_make_it_is_dropped(tmp_path):
    layout, share = (Tensor("w", "F32", (2000,)),), share_of_noise(32, 1.0, 3)
    members_ = private_members(3, share, layout)
    round_ = masked_round(
        tmp_path, layout, [members_], shares=[GridNoise(5 * share, bytes([i]) * 32) for i in range(3)]
    )
    base = {"w": np.zeros(2000, np.float32)}
    with pytest.raises(NoSum):
        folded(tmp_path, round_, Vector(layout, members_[0][0]), base, step=Step(private_sums=PrivateSums(3)))


@pytest.mark.parametrize("length", [3.3, 20.0, 50.0, 400.0])
def test_whether_a_sum_counts_follows_from_what_is_published_with_the_coordinator_s_noise(tmp_path, length):
    """A member adds a vector at the edge of its session's bound, 3 C: a drop without the noise would tell of others.

    With the noise the bound of all sessions is 6 C + z (sqrt(d) + 8) C = 53.4 C, of the values that a reader sees.
    """
    layout, z, divisor = (Tensor("w", "F32", (2000,)),), 0.9, 5
    plans = [private_members(3, 0.0, layout) for _ in range(2)]
    round_, vector = masked_round(tmp_path, layout, plans), Vector(layout, plans[0][0][0])
    value = int(length / math.sqrt(2000) * clip_steps(32))
    _with_words(tmp_path, round_, vector, 1, 2, lambda words: {**words, "w": np.full(2000, value, np.int32)})
    noise = GridNoise(share_of_noise(32, z, 1), bytes(range(32)))
    step, base = Step(private_sums=PrivateSums(divisor, noise)), {"w": np.zeros(2000, np.float32)}
    honest = [words["w"] for words in (*round_.words[0], *round_.words[1][:2])]
    total = np.sum(honest, axis=0, dtype=np.int64) + value
    published = (total + noise.between("w", 2000, 0, 2000)) / clip_steps(32)
    counts = np.linalg.norm(published) <= 6 + z * (math.sqrt(2000) + 8)
    assert counts == (length < 40)
    if counts:
        _, new, outcome = folded(tmp_path, round_, vector, base, step=step)
        assert not outcome.dropped
        assert new["w"] == pytest.approx(published / divisor, abs=1e-5)
        return
    with pytest.raises(NoSum, match="the norm of all sums with their noise is") as caught:
        folded(tmp_path, round_, vector, base, step=step)
    assert caught.value.dropped.keys() == {0, 1}
    assert not (tmp_path / "out").exists()
    held = [split_over_ranks(session, 2, number) for number, session in enumerate(round_.sessions)]
    write_shards(tmp_path / "base", layout, 2, lambda rank: tmp_path / f"b{rank}")

    def work(exchange):
        mine, out = [of_ranks[exchange.rank] for of_ranks in held], tmp_path / f"o{exchange.rank}"
        options = {"vector": vector, "exchange": exchange, "step": step, "durable": False}
        with pytest.raises(NoSum) as here:
            fold_masked(tmp_path / f"b{exchange.rank}", mine, out, **options)
        return here.value.dropped

    assert on_ranks(2, work) == [caught.value.dropped] * 2
