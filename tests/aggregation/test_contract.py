"""The contract of every entry in the tables of rules, optimizers and codecs.

Each is built from the names and options that a run's TOML has, and works on files as the product does. A new entry of a
table is under the contract at once; one without options here fails.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import fold
from atoll.aggregation.optimizers import OPTIMIZERS
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.config.kinds import CODECS, RULES, SERVER_OPTIMIZERS
from atoll.server.folding.method import Method
from atoll.tensors import safetensors_file
from atoll.tensors.codecs.names import FAMILIES, codec_name, parse_codec
from tests.aggregation.models import store
from tests.aggregation.reference_rules import (
    centred_clipping_twin,
    median_twin,
    multi_krum_twin,
    trimmed_mean_twin,
    weiszfeld_twin,
)

FLOWER = json.loads(Path(__file__).with_name("flower_vectors.json").read_text())
SHAPES = {"conv": (3, 4), "bias": (7,), "scale": ()}
NUM_ELEMENTS = 12 + 7 + 1
RADIUS = 100.0

SETTINGS = {
    "mean": {},
    "median": {},
    "trimmed_mean": {"malicious": 2},
    "multi_krum": {"malicious": 2, "num_selected": 4},
    "geometric_median": {"num_steps": 30},
    "centered_clipping": {"radius": RADIUS, "num_steps": 1},
}
MIXED = {f"{name}+neighbours": options for name, options in SETTINGS.items() if name != "mean"}
NAMES = [*SETTINGS, *MIXED]

TWINS = {
    "mean": lambda u, w: (u.astype(np.float64) * w[:, None]).sum(axis=0) / w.sum(),
    "median": lambda u, w: median_twin(u),
    "trimmed_mean": lambda u, w: trimmed_mean_twin(u, 2),
    "multi_krum": lambda u, w: multi_krum_twin(u, 2, 4),
    "geometric_median": lambda u, w: weiszfeld_twin(u, 30, 1e-6),
    "centered_clipping": lambda u, w: centred_clipping_twin(u, np.zeros(u.shape[1]), RADIUS, 1),
}
"""The slow definition of each rule, in float64, on whole vectors."""


def method(name, optimizer=None):
    rule, _, mixed = name.partition("+")
    options = dict(SETTINGS[rule], malicious=2) if mixed else SETTINGS[rule]
    settings = AggregationConfig(rule=rule, mix_neighbours=bool(mixed), **options)
    return Method.of(settings, OptimizerConfig(**(optimizer or {})))


def split(vector):
    """A vector as a model's tensors."""
    arrays, begin = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape, dtype=int))
        arrays[name] = vector[begin : begin + size].reshape(shape)
        begin += size
    return arrays


def joined(arrays):
    return np.concatenate([np.asarray(arrays[name]).reshape(-1) for name in SHAPES])


def aggregated(folder, name, updates, weights=None, *, base=None, optimizer=None, threads=1):
    """The next model, as one vector; the base is zeros unless given."""
    folder.mkdir(exist_ok=True)
    base = np.zeros(NUM_ELEMENTS, np.float32) if base is None else base
    safetensors_file.write(folder / "base", split(base))
    weights = [1] * len(updates) if weights is None else weights
    files = [
        Weighted(store(folder / f"u{k}", split(u)), int(w))
        for k, (u, w) in enumerate(zip(updates, weights, strict=True))
    ]
    how = method(name, optimizer)
    after = {slot: folder / f"out.{slot}" for slot in how.slots}
    step = Step(how.optimizer, frozenset(SHAPES), how.rule, after=after)
    fold(folder / "base", files, folder / "out", step=step, execution=Execution(threads))
    return joined(safetensors_file.read(folder / "out"))


def cohort(seed, num_updates=9):
    rng = np.random.default_rng(seed)
    centre = rng.standard_normal(NUM_ELEMENTS)
    return (centre + 0.5 * rng.standard_normal((num_updates, NUM_ELEMENTS))).astype(np.float32)


def test_the_contract_covers_every_name_of_the_tables():
    assert set(SETTINGS) == set(RULES.variants) - {"concatenate"}  # no function of elements: test_concatenation.py
    assert set(TWINS) == set(SETTINGS)
    assert set(OPTIMIZERS) == set(SERVER_OPTIMIZERS.variants)
    assert set(CODECS.variants) == {"none", *FAMILIES}


# ---------------------------------------------------------------- rules


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_a_rule_is_its_slow_twin(tmp_path_factory, name, seed):
    updates = cohort(seed)
    weights = np.random.default_rng(seed).integers(1, 1000, len(updates))
    ours = aggregated(tmp_path_factory.mktemp("round"), name, updates, weights)
    np.testing.assert_allclose(ours, TWINS[name](updates, weights), rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "multi_krum+neighbours"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_the_order_of_the_updates_does_not_matter(tmp_path_factory, name, seed):
    """Mixed neighbours are often equal, and multi-Krum then takes the first by client id: it has an order by design."""
    updates, rng = cohort(seed), np.random.default_rng(seed)
    weights, order = rng.integers(1, 1000, len(updates)), rng.permutation(len(updates))
    first = aggregated(tmp_path_factory.mktemp("round"), name, updates, weights)
    second = aggregated(tmp_path_factory.mktemp("round"), name, updates[order], weights[order])
    if name in ("mean", "median", "trimmed_mean"):
        assert first.tobytes() == second.tobytes()  # the others add in the order that the server gives, by client id
    np.testing.assert_allclose(first, second, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_matter(tmp_path, name):
    first = aggregated(tmp_path / "a", name, cohort(1))
    assert aggregated(tmp_path / "b", name, cohort(1), threads=3).tobytes() == first.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weight", [1, 7, 1 << 40])
def test_equal_updates_are_their_own_aggregate_bit_for_bit(tmp_path, name, weight):
    update, base = cohort(2)[0], cohort(3)[0]
    model = aggregated(tmp_path, name, [update] * 9, [weight] * 9, base=base)
    exact = (base.astype(np.float64) + update).astype(np.float32)
    if "geometric_median" in name or name.startswith(("centered", "multi_krum")):  # means of equal rows round once
        np.testing.assert_allclose(model, exact, rtol=3e-7)
    else:
        assert model.tobytes() == exact.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_all_weights_times_a_number_change_nothing(tmp_path, name):
    weights = np.random.default_rng(4).integers(1, 1000, 9)
    first = aggregated(tmp_path / "a", name, cohort(4), weights)
    np.testing.assert_array_equal(aggregated(tmp_path / "b", name, cohort(4), weights * 1024), first)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("centered", "geometric"))])
def test_updates_times_a_power_of_two_give_the_aggregate_times_it(tmp_path, name):
    """Rules without a length of their own alone: no radius, no smoothing."""
    first = aggregated(tmp_path / "a", name, cohort(5))
    np.testing.assert_array_equal(aggregated(tmp_path / "b", name, cohort(5) * np.float32(2**-20)), first * 2**-20)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [np.float16, np.uint16], ids=["fp16", "bf16"])
def test_half_floats_count_as_the_floats_that_they_are(tmp_path, name, dtype):
    if dtype is np.float16:
        halves = cohort(6).astype(np.float16)
        widened = halves.astype(np.float32)
    else:
        halves = (cohort(6).view(np.uint32) >> 16).astype(np.uint16)
        widened = (halves.astype(np.uint32) << 16).view(np.float32)
    first = aggregated(tmp_path / "a", name, halves)
    assert first.dtype == np.float32
    assert aggregated(tmp_path / "b", name, widened).tobytes() == first.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused(tmp_path, name, bad):
    """Such values never pass the inspection; and one that the disk made later is not folded either."""
    updates = cohort(7)
    whole = [Weighted(store(tmp_path / f"u{k}", split(u)), 1) for k, u in enumerate(updates)]
    data = bytearray(whole[4].update.path.read_bytes())
    data[0:4] = np.float32(bad).tobytes()
    whole[4].update.path.write_bytes(data)
    safetensors_file.write(tmp_path / "base", split(np.zeros(NUM_ELEMENTS, np.float32)))
    how = method(name)
    after = {slot: tmp_path / f"out.{slot}" for slot in how.slots}
    with pytest.raises(ValueError, match="beyond its recorded magnitude"):
        fold(tmp_path / "base", whole, tmp_path / "out", step=Step(how.optimizer, SHAPES, how.rule, after=after))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", NAMES)
def test_no_updates_and_no_weight_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="no updates to fold"):
        aggregated(tmp_path / "a", name, [])
    with pytest.raises(ValueError, match=r"weight 0 is no integer >= 1"):
        aggregated(tmp_path / "b", name, cohort(8), [0] * 9)


@pytest.mark.parametrize("name", ["trimmed_mean", "multi_krum"])
def test_too_few_updates_for_what_a_rule_promises_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"4 updates"):
        aggregated(tmp_path, name, cohort(9)[:4])


@pytest.mark.parametrize("name", ["fedavg", "median", "trimmed_mean", "krum", "multi_krum"])
def test_a_rule_is_what_flower_makes_of_it(tmp_path, name):
    """Flower 1.41 over three rounds, each on top of its own last model (`make_flower_vectors`)."""
    rule, options = {
        "fedavg": ("mean", {}),
        "median": ("median", {}),
        "trimmed_mean": ("trimmed_mean", {"malicious": 0.3}),
        "krum": ("multi_krum", {"malicious": 2, "num_selected": 1}),
        "multi_krum": ("multi_krum", {"malicious": 2, "num_selected": 5}),
    }[name]
    how = AggregationConfig(rule=rule, **options).build()
    model = np.array(FLOWER["start"], np.float32)
    for number, updates in enumerate(FLOWER["updates"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        safetensors_file.write(folder / "base", {"w": model})
        files = [
            Weighted(store(folder / f"u{k}", {"w": np.array(u, np.float32)}), FLOWER["num_examples"][k])
            for k, u in enumerate(updates)
        ]
        fold(folder / "base", files, folder / "out", step=Step(rule=how))
        model = safetensors_file.read(folder / "out")["w"]
        np.testing.assert_allclose(model, FLOWER["models"][name][number], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- optimizers

optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


def test_momentum_is_what_flower_makes_of_it():
    """FedAvgM with a heavy ball; Flower's adaptive three begin elsewhere and correct for bias (`optimizers`)."""
    weights = np.array(FLOWER["num_examples"], np.float64)
    optimizer = OptimizerConfig(name="fedavgm", lr=0.5, momentum=0.8).build()
    model, state = np.array(FLOWER["start"]), {"momentum": np.zeros(6)}
    for number, updates in enumerate(FLOWER["updates"]):
        mean = (np.array(updates) * weights[:, None]).sum(axis=0) / weights.sum()
        model = optimizer.apply(model, mean, state)
        np.testing.assert_allclose(model, FLOWER["models"]["fedavgm"][number], rtol=1e-5, atol=1e-5)


def state_of(optimizer, size):
    return {slot: np.full(size, optimizer.init(slot)) for slot in optimizer.slots}


@optimizers
def test_no_element_of_a_model_sees_another(name):
    """Ranks, tiles and threads may therefore each have some of them."""
    optimizer, rng = OptimizerConfig(name=name).build(), np.random.default_rng(1)
    whole, halves = state_of(optimizer, 10), [state_of(optimizer, 5), state_of(optimizer, 5)]
    model = parts = rng.standard_normal(10)
    for _ in range(4):
        mean = rng.standard_normal(10)
        model = optimizer.apply(model, mean.copy(), whole)
        of_halves = [optimizer.apply(parts[s], mean[s].copy(), halves[k]) for k, s in enumerate((np.s_[:5], np.s_[5:]))]
        parts = np.concatenate(of_halves)
        assert parts.tobytes() == model.tobytes()


@optimizers
def test_an_update_of_nothing_leaves_a_fresh_model_where_it_is(name):
    optimizer, start = OptimizerConfig(name=name).build(), np.random.default_rng(2).standard_normal(8)
    np.testing.assert_array_equal(optimizer.apply(start.copy(), np.zeros(8), state_of(optimizer, 8)), start)


@optimizers
def test_the_model_moves_the_way_of_the_mean(name):
    """The update is a direction of descent: it is added."""
    optimizer, mean = OptimizerConfig(name=name).build(), np.array([1.0, -1.0, 1e-3, -1e3])
    moved = optimizer.apply(np.zeros(4), mean.copy(), state_of(optimizer, 4))
    assert (np.sign(moved) == np.sign(mean)).all()
    assert moved.dtype == np.float64


@optimizers
def test_an_optimizer_in_the_fold_is_itself_on_the_exact_mean(tmp_path, name):
    updates, base = cohort(10), cohort(11)[0]
    optimizer = OptimizerConfig(name=name).build()
    mean = updates.astype(np.float64).sum(axis=0) / len(updates)
    twin = optimizer.apply(base.astype(np.float64), mean, state_of(optimizer, NUM_ELEMENTS))
    ours = aggregated(tmp_path, "mean", updates, base=base, optimizer={"name": name})
    np.testing.assert_allclose(ours, twin, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- codecs

codecs = pytest.mark.parametrize("name", [codec_name(family, 0.2 if family == "topk" else None) for family in FAMILIES])


def values(seed, n=3000):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def encoded(name, array, seed=0):
    return parse_codec(name).encode(array, np.random.default_rng(seed))


@codecs
@pytest.mark.parametrize("size", [1, 2, 511, 512, 513, 3000])
def test_a_codec_keeps_its_word_about_its_size_and_saves_bytes(name, size):
    codec, array = parse_codec(name), values(1, size)
    data = encoded(name, array)
    assert len(data) == codec.num_bytes(size)
    assert codec.decode(data, size).shape == (size,)
    if size >= 512:
        assert len(data) < array.nbytes


@codecs
def test_a_codec_gives_the_same_bytes_for_the_same_seed(name):
    assert encoded(name, values(2), seed=3) == encoded(name, values(2), seed=3)


@codecs
def test_nothing_stays_nothing(name):
    zeros = np.zeros(700, np.float32)
    assert not parse_codec(name).decode(encoded(name, zeros), 700).any()


@codecs
def test_values_times_a_power_of_two_decode_to_the_power_of_two_times_them(name):
    codec, array = parse_codec(name), values(4)
    array = np.copysign(np.maximum(np.abs(array), 0.01), array)  # fp16 has fewer bits below 6e-5
    first = codec.decode(encoded(name, array), array.size)
    np.testing.assert_array_equal(codec.decode(encoded(name, array * np.float32(0.25)), array.size), first * 0.25)


@codecs
def test_what_is_lost_is_less_than_all(name):
    """A contraction, in the mean square: ||C(x) - x||^2 < ||x||^2, hence error feedback converges."""
    array = values(5)
    lost = array - parse_codec(name).decode(encoded(name, array), array.size)
    assert float(np.square(lost, dtype=np.float64).sum()) < 0.75 * float(np.square(array, dtype=np.float64).sum())


@codecs
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_codec_refuses_what_is_no_number(name, bad):
    array = values(6)
    array[17] = bad
    with pytest.raises(ValueError, match=r"nan|inf|finite"):
        encoded(name, array)


@codecs
def test_bytes_of_another_length_are_refused(name):
    data = encoded(name, values(7))
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(ValueError, match="bytes"):
            parse_codec(name).decode(wrong, 3000)
