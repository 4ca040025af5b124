import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.rules import combine as combine_module
from atoll.aggregation.rules import order_statistics
from atoll.aggregation.rules.combine import combine, mixing_for
from atoll.aggregation.rules.coordinate import Median, TrimmedMean
from atoll.aggregation.rules.custom_rule import CustomRule, RuleFailed
from atoll.aggregation.rules.geometric import CenteredClipping, GeometricMedian, MultiKrum, NearestNeighbourMixing
from atoll.tensors.layout import Tensor
from atoll.tensors.updates.reader import UpdateReader
from atoll.tensors.updates.sources import Scaled, Zeros
from tests.aggregation.models import random_cuts, store
from tests.aggregation.reference_rules import applied

SHAPE = (19, 7)
SIZE = 133
TENSOR = Tensor("w", "F32", SHAPE)
RULES = [
    Median(),
    TrimmedMean(0.2),
    MultiKrum(1),
    GeometricMedian(),
    CenteredClipping(2.0, 2),
    NearestNeighbourMixing(0.2, Median()),
    NearestNeighbourMixing(1, CenteredClipping(2.0)),
]


def cohort(seed, num_updates=7, shape=SHAPE):
    rng = np.random.default_rng(seed)
    return {f"site-{k}": rng.standard_normal(shape).astype(np.float32) for k in range(num_updates)}


@contextmanager
def opened(folder, updates, rng=None):
    """Readers of the stored updates, in the order of their clients' names, whatever order they come in."""
    with ExitStack() as stack:
        readers = {}
        for name, array in updates.items():
            cuts = rng and {"w": random_cuts(rng, array.shape, depth=4)}
            readers[name] = stack.enter_context(UpdateReader(store(folder / name, {"w": array}, cuts=cuts)))
        yield dict(sorted(readers.items()))


def combined(rule, readers, *, centre=None, cuts=(0, SIZE), threads=1):
    mixing = mixing_for(rule, (TENSOR,), readers, centre=centre, threads=threads)
    sources = [*readers.values()] + [centre] * getattr(rule, "takes_centre", False)
    ranges = itertools.pairwise(cuts)
    with ThreadPoolExecutor(threads) as pool:
        parts = pool.map(lambda ends: combine(TENSOR, *ends, sources, rule, mixing), ranges)
    return np.concatenate(list(parts))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    values=st.integers(1, 1200),
    threads=st.integers(1, 3),
    inner=st.lists(st.integers(0, SIZE), max_size=6),
)
def test_combine_has_the_bits_of_whole_arrays_for_any_tiles_threads_and_order(
    tmp_path_factory, rule, seed, values, threads, inner
):
    rng, folder = np.random.default_rng(seed), tmp_path_factory.getbasetemp()
    updates = cohort(seed)
    with opened(folder, updates) as readers:
        expected = combined(rule, readers, centre=Zeros())
    names = list(updates)
    rng.shuffle(names)
    with pytest.MonkeyPatch.context() as patch, opened(folder, {name: updates[name] for name in names}, rng) as readers:
        patch.setattr(combine_module, "TILE_VALUES", values)
        patch.setattr(combine_module, "MIXED_VALUES", values // 2)
        cuts = (0, *sorted(inner), SIZE)
        ours = combined(rule, readers, centre=Zeros(), cuts=cuts, threads=threads)
    assert ours.tobytes() == expected.tobytes()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_combine_makes_of_files_what_the_rule_makes_of_arrays(tmp_path, rule):
    updates, centre = cohort(1), cohort(2, 1)["site-0"]
    rows = np.array([array.reshape(-1) for array in updates.values()])
    with opened(tmp_path, updates) as readers, UpdateReader(store(tmp_path / "centre", {"w": centre})) as last:
        ours = combined(rule, readers, centre=last)
    twin = applied(rule, rows, centre.reshape(-1) if getattr(rule, "takes_centre", False) else None)
    np.testing.assert_allclose(ours, twin, rtol=1e-6, atol=1e-7)


def test_combine_adds_mixed_rows_in_the_order_of_the_sources(tmp_path):
    """The bits of a loop over single elements: no element sees another."""
    updates = cohort(3)
    rule = NearestNeighbourMixing(2, Median())
    with opened(tmp_path, updates) as readers:
        mixing = mixing_for(rule, (TENSOR,), readers)
        ours = combine(TENSOR, 0, SIZE, list(readers.values()), rule, mixing)
    columns = np.array([array.reshape(-1) for array in updates.values()]).T
    for column, value in zip(columns, ours, strict=True):
        mixed = []
        for coefficients in mixing:
            total = 0.0
            for a, u in zip(coefficients, column, strict=True):
                total += float(a) * float(u)
            mixed.append(float(np.float32(total)))
        assert sorted(mixed)[3] == value


@pytest.mark.slow
def test_combine_memory_is_a_tile_of_each_update(tmp_path):
    values = np.random.default_rng(5).standard_normal(1 << 17).astype(np.float32)
    tensor = Tensor("w", "F32", values.shape)
    with opened(tmp_path, {f"site-{k}": values for k in range(12)}) as readers, pytest.MonkeyPatch.context() as patch:
        patch.setattr(combine_module, "TILE_VALUES", 1 << 14)
        patch.setattr(combine_module, "MIXED_VALUES", 1 << 14)
        patch.setattr(order_statistics, "TILE_VALUES", 1 << 14)
        for rule in (Median(), NearestNeighbourMixing(2, Median())):
            mixing = mixing_for(rule, (tensor,), readers)
            tracemalloc.start()
            try:
                ours = combine(tensor, 0, values.size, list(readers.values()), rule, mixing)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert np.array_equal(ours.astype(np.float32), values)
            assert peak < ours.nbytes + (1 << 14) * 32 < 2 * ours.nbytes


def test_coordinate_rules_take_those_that_carry_a_tensor_and_count_them(tmp_path):
    updates = cohort(6, 3)
    with opened(tmp_path, updates) as readers:
        sources = list(readers.values())
        assert mixing_for(TrimmedMean(1), (TENSOR,), readers) is None
        assert np.array_equal(combine(TENSOR, 0, SIZE, sources[:1], Median()), updates["site-0"].reshape(-1))
        with pytest.raises(ValueError, match="2 updates are too few: a trimmed mean with f=1 needs at least 3"):
            combine(TENSOR, 0, SIZE, sources[1:], TrimmedMean(1))
        with pytest.raises(ValueError, match="3 updates are too few: multi-Krum with f=1 needs at least 5"):
            mixing_for(MultiKrum(1), (TENSOR,), readers)


def test_mixing_names_the_update_without_a_tensor_and_the_rule_without_a_centre(tmp_path):
    layout = (TENSOR, Tensor("x", "F32", (2,)))
    with opened(tmp_path, cohort(7)) as readers:
        with pytest.raises(ValueError, match="update site-0: tensor 'x' is left out"):
            mixing_for(GeometricMedian(), layout, readers)
        with pytest.raises(ValueError, match="CenteredClipping takes the previous aggregate, and got none"):
            mixing_for(CenteredClipping(1.0), (TENSOR,), readers)


class Users:
    def __init__(self, mixing, values):
        self._mixing, self._values = mixing, values

    def mixing(self, gram):
        return self._mixing

    def reduce(self, rows):
        return self._values


@pytest.mark.parametrize("mixing", [np.ones((1, 6)), np.ones(7), np.ones((0, 7)), np.full((1, 7), np.nan)])
def test_mixing_refuses_a_matrix_of_a_users_rule_that_does_not_fit(tmp_path, mixing):
    with opened(tmp_path, cohort(8)) as readers, pytest.raises(ValueError, match="rule Users mixes 7 updates with a"):
        mixing_for(CustomRule(Users(mixing, None)), (TENSOR,), readers)


def test_combine_refuses_values_of_a_users_rule_that_do_not_fit(tmp_path):
    with (
        opened(tmp_path, cohort(9)) as readers,
        pytest.raises(ValueError, match=r"rule Users returns \(3,\) for 7 rows of tensor 'w', expected is \(19,\)"),
    ):
        combine(TENSOR, 0, 19, list(readers.values()), CustomRule(Users(None, np.zeros(3))))


def test_a_source_is_scaled(tmp_path):
    updates = cohort(10, 1)
    (first,) = (array.reshape(-1)[3:50] for array in updates.values())
    with opened(tmp_path, updates) as readers:
        (new,) = readers.values()
        assert np.array_equal(Scaled(new, 0.3).read(TENSOR, 3, 50), np.float32(0.3) * first)
        assert np.array_equal(Scaled(new, 1.0).read(TENSOR, 3, 50), first)
        assert (Scaled(new, 0.3).carries("w"), Scaled(new, 0.3).carries("x")) == (True, False)


def test_scaled_sources_leave_integers_alone(tmp_path):
    update = store(tmp_path / "u", {"n": np.array([5, 7])})
    with UpdateReader(update) as reader:
        assert Scaled(reader, 0.5).read(Tensor("n", "I64", (2,)), 0, 2).tolist() == [5, 7]


def test_a_norm_bound_holds_for_what_the_rule_sees(tmp_path):
    updates = cohort(11)
    with opened(tmp_path, updates) as readers:
        bounded = {name: Scaled(reader, 0.25) for name, reader in readers.items()}
        whole, quarter = combined(GeometricMedian(), readers), combined(GeometricMedian(), bounded)
    np.testing.assert_allclose(quarter, whole / 4, rtol=1e-6)


def test_what_a_users_rule_raises_is_a_fault_of_the_rule(tmp_path):
    class Mine:
        def reduce(self, rows):
            raise ZeroDivisionError("by nothing")

        def mixing(self, gram):
            raise LookupError("no neighbours")

    with opened(tmp_path, cohort(1)) as readers:
        with pytest.raises(RuleFailed, match="rule Mine: reduce raised ZeroDivisionError: by nothing"):
            combine(TENSOR, 0, SIZE, list(readers.values()), CustomRule(Mine()))
        with pytest.raises(RuleFailed, match="rule Mine: mixing raised LookupError: no neighbours"):
            mixing_for(CustomRule(Mine()), (TENSOR,), readers)
