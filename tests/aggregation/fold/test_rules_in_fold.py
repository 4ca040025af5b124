"""Rules in the fold: what a rule makes of whole arrays is what the fold writes, tile by tile, from files."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.step import AGGREGATE, Step
from atoll.aggregation.fold.streaming import Weighted, fold
from atoll.aggregation.optimizers import FedAvg, FedAvgM
from atoll.aggregation.rules.coordinate import Median, TrimmedMean, clip_factors
from atoll.aggregation.rules.geometric import CenteredClipping, GeometricMedian, MultiKrum, NearestNeighbourMixing
from atoll.aggregation.rules.rule import GeometricRule, takes_centre
from atoll.tensors import safetensors_file
from tests.aggregation.models import store

SHAPES = {"w": (9, 5), "b": (5,), "running_var": (3,)}
TRAINED = frozenset({"w", "b"})
RULES = {
    "median": Median(),
    "trimmed": TrimmedMean(1),
    "krum": MultiKrum(1),
    "rfa": GeometricMedian(),
    "clipping": CenteredClipping(2.0, 2),
    "mixed median": NearestNeighbourMixing(1, Median()),
    "mixed clipping": NearestNeighbourMixing(1, CenteredClipping(2.0)),
}
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def arrays_of(seed):
    rng = np.random.default_rng(seed)
    floats = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    return floats | {"steps": np.array(seed, np.int64)}


def stored(folder, number, seeds=range(7)):
    return [Weighted(store(folder / f"r{number}-u{k}", arrays_of(100 * number + k)), k + 1) for k in seeds]


def run(folder, rule, rounds, *, optimizer=FedAvg(), **execution):  # noqa: B008 - a value
    """The versions, and the slots of the last one."""
    base, before, versions = folder / "0", {}, []
    safetensors_file.write(base, arrays_of(0))
    for number, weighted in enumerate(rounds, start=1):
        step = Step(optimizer, TRAINED, rule)
        after = {slot: folder / f"{number}.{slot}" for slot in step.slots}
        step = dataclasses.replace(step, before=before, after=after)
        fold(base, weighted, folder / str(number), step=step, execution=Execution(**execution))
        base, before = folder / str(number), after
        versions.append(safetensors_file.read(base))
    return versions, {slot: safetensors_file.read(path) for slot, path in before.items()}


def flat(update):
    return np.concatenate([update[name].reshape(-1).astype(np.float64) for name in SHAPES])


def twin(rule, updates, centre):
    """The rule on whole flat updates, with the Gram matrix by one product."""
    rows = np.stack([flat(update) for update in updates] + ([centre] if takes_centre(rule) else []))
    if isinstance(rule, GeometricRule):
        rows = rule.mixing(rows @ rows.T) @ rows
    return rule.reduce(rows.astype(np.float32))


@ALL_RULES
def test_rounds_over_files_are_the_rule_on_whole_arrays(tmp_path, rule):
    rounds = [stored(tmp_path, number) for number in (1, 2)]
    versions, slots = run(tmp_path, rule, rounds)
    expected, centre = flat(arrays_of(0)), np.zeros(sum(np.prod(shape) for shape in SHAPES.values()))
    for number, version in enumerate(versions, start=1):
        updates = [arrays_of(100 * number + k) for k in range(7)]
        centre = twin(rule, updates, centre)
        expected = expected + centre
        np.testing.assert_allclose(flat(version), expected, rtol=1e-5, atol=2e-6)
    assert set(slots) == ({AGGREGATE} if takes_centre(rule) else set())
    if slots:
        np.testing.assert_allclose(flat(slots[AGGREGATE]), centre, rtol=1e-5, atol=2e-6)


@ALL_RULES
def test_integers_follow_their_weighted_mean(tmp_path, rule):
    versions, _ = run(tmp_path, rule, [stored(tmp_path, 1)])
    weights = np.arange(1, 8)
    assert versions[0]["steps"] == np.round(np.sum(weights * (100 + np.arange(7))) / weights.sum())


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(RULES)), tile=st.integers(1, 50), threads=st.integers(1, 3))
def test_the_bits_depend_neither_on_tiles_nor_on_threads(tmp_path_factory, name, tile, threads):
    folder = tmp_path_factory.mktemp("rules")
    rounds = [stored(folder, number) for number in (1, 2)]
    one, _ = run(folder, RULES[name], rounds)
    other, _ = run(folder, RULES[name], rounds, tile_elements=tile, threads=threads)
    for version, again in zip(one, other, strict=True):
        assert {k: v.tobytes() for k, v in version.items()} == {k: v.tobytes() for k, v in again.items()}


def test_what_a_rule_makes_goes_through_the_optimizer(tmp_path):
    versions, slots = run(tmp_path, Median(), [stored(tmp_path, 1)], optimizer=FedAvgM(0.5, 0.9))
    median = np.median(np.stack([arrays_of(100 + k)["w"] for k in range(7)]), axis=0)
    np.testing.assert_allclose(versions[0]["w"], arrays_of(0)["w"] + 0.5 * median, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slots["momentum"]["w"], median, rtol=1e-6)


def test_a_rule_with_a_centre_keeps_it_beside_the_optimizer_s_moments(tmp_path):
    _, slots = run(tmp_path, CenteredClipping(2.0), [stored(tmp_path, 1)], optimizer=FedAvgM())
    assert set(slots) == {"momentum", AGGREGATE}
    assert set(slots["momentum"]) == TRAINED
    assert set(slots[AGGREGATE]) == set(SHAPES)


def test_of_a_tensor_that_some_leave_out_the_others_make_the_median(tmp_path):
    whole = [arrays_of(k) for k in range(3)]
    without = {name: array for name, array in arrays_of(9).items() if name != "b"}
    weighted = [Weighted(store(tmp_path / f"u{k}", update), 1) for k, update in enumerate([*whole, without])]
    versions, _ = run(tmp_path, Median(), [weighted])
    median = np.median(np.stack([update["b"] for update in whole]), axis=0)
    np.testing.assert_allclose(versions[0]["b"], arrays_of(0)["b"] + median, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="'b'"):
        run(tmp_path, MultiKrum(0), [weighted])


@pytest.mark.parametrize("rule", [None, Median()])
def test_the_norm_bound_shortens_what_is_too_long_and_leaves_the_rest(tmp_path, rule):
    updates = [arrays_of(k) for k in (1, 2, 3)]
    updates[2] = {name: array * np.array(1000, array.dtype) for name, array in updates[2].items()}
    factors = clip_factors([float(np.linalg.norm(flat(update))) for update in updates], "median")
    weighted = [
        Weighted(store(tmp_path / f"u{k}", update), 1, factor)
        for k, (update, factor) in enumerate(zip(updates, factors, strict=True))
    ]
    versions, _ = run(tmp_path, rule, [weighted])
    rows = np.stack([factor * flat(update) for update, factor in zip(updates, factors, strict=True)])
    expected = flat(arrays_of(0)) + (rows.mean(axis=0) if rule is None else np.median(rows, axis=0))
    np.testing.assert_allclose(flat(versions[0]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [-0.1, 1.1, float("nan")])
def test_a_factor_out_of_range_is_refused(tmp_path, factor):
    weighted = [Weighted(store(tmp_path / "u", arrays_of(1)), 1, factor)]
    with pytest.raises(ValueError, match=r"factor .* is not in \[0, 1\]"):
        run(tmp_path, None, [weighted])


def test_too_few_updates_are_refused_and_nothing_appears(tmp_path):
    with pytest.raises(ValueError, match="3 updates are too few: multi-Krum with f=1 needs at least 5"):
        run(tmp_path, MultiKrum(1), [stored(tmp_path, 1, range(3))])
    assert not (tmp_path / "1").exists()
