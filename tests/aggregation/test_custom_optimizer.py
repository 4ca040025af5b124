"""The server optimizer of a user's own: its numbers by formula, the same bits in every fold, and its contract."""

from collections import Counter

import numpy as np
import pytest

from atoll.aggregation.custom_optimizer import CustomOptimizer, OptimizerFailed
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.means import Weighted
from atoll.aggregation.fold.prepared import check_whole
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import fold
from atoll.aggregation.stacked.rows import Rows, can_stack, fold_rows
from atoll.plugins.place import Place
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Tensor, in_order
from tests.aggregation.models import store

SHAPES = {"conv": (5, 7), "bias": (9,), "scale": ()}
LAYOUT = in_order(Tensor(name, "F32", shape) for name, shape in SHAPES.items())
TRAINED = frozenset({"conv", "bias"})
WEIGHTS = (3, 1, 4)


class Heavy:
    """x <- x + m / K, m <- 0.9 m + D: a slot, and the number of updates."""

    slots = ("velocity",)

    def init(self, slot):
        return 0.25

    def apply(self, master, mean, state, place):
        state["velocity"] = 0.9 * state["velocity"] + mean
        return master + state["velocity"] / place.num_updates


class Extrapolated:
    """x <- x + |D| D, by the inner products."""

    def prepare(self, gram, place):
        shares = np.array(place.shares)
        return np.sqrt(shares @ gram @ shares)

    def apply(self, master, mean, state, place):
        return master + place.prepared * mean


class Centred:
    """x <- x + D - mean of D: it needs the whole tensor."""

    whole = True

    def apply(self, master, mean, state):
        return master + mean - mean.mean()


def arrays(rng):
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def cohort():
    rng = np.random.default_rng(5)
    return arrays(rng), [arrays(rng) for _ in WEIGHTS]


def place(version=1):
    total = sum(WEIGHTS)
    return Place(7, version, "key", shares=tuple(weight / total for weight in WEIGHTS))


def folded(folder, own, *, tile_elements=None, threads=1, before=None):
    """The next model and the slots, from files."""
    folder.mkdir(parents=True, exist_ok=True)
    base, updates = cohort()
    safetensors_file.write(folder / "base", base)
    files = [Weighted(store(folder / f"u{k}", u), w) for k, (u, w) in enumerate(zip(updates, WEIGHTS, strict=True))]
    optimizer = CustomOptimizer(own)
    after = {slot: folder / f"out.{slot}" for slot in optimizer.slots}
    step = Step(optimizer, TRAINED, before=before or {}, after=after, place=place())
    fold(folder / "base", files, folder / "out", step=step, execution=Execution(threads, tile_elements=tile_elements))
    return safetensors_file.read(folder / "out"), {slot: safetensors_file.read(path) for slot, path in after.items()}


def mean_update(updates, names=SHAPES):
    total = sum(WEIGHTS)
    return {n: sum(w * u[n].astype(np.float64) for w, u in zip(WEIGHTS, updates, strict=True)) / total for n in names}


def test_slots_and_the_number_of_updates(tmp_path):
    base, updates = cohort()
    mean = mean_update(updates)
    model, slots = folded(tmp_path / "one", Heavy())
    velocity = {name: 0.9 * 0.25 + mean[name] for name in TRAINED}
    for name in TRAINED:
        np.testing.assert_allclose(slots["velocity"][name], velocity[name], rtol=1e-6)
        np.testing.assert_allclose(model[name], base[name] + velocity[name] / 3, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(model["scale"], base["scale"] + mean["scale"], rtol=1e-6)
    _, again = folded(tmp_path / "two", Heavy(), before={"velocity": tmp_path / "one" / "out.velocity"})
    for name in TRAINED:
        np.testing.assert_allclose(again["velocity"][name], 0.9 * velocity[name] + mean[name], rtol=1e-5, atol=1e-6)


def test_what_is_prepared_is_of_the_trained_tensors(tmp_path):
    base, updates = cohort()
    mean = mean_update(updates)
    norm = np.sqrt(sum((mean[name] ** 2).sum() for name in TRAINED))
    model, _ = folded(tmp_path, Extrapolated())
    for name in TRAINED:
        np.testing.assert_allclose(model[name], base[name] + norm * mean[name], rtol=1e-5, atol=1e-6)


def test_a_whole_tensor(tmp_path):
    base, updates = cohort()
    mean = mean_update(updates)
    model, _ = folded(tmp_path, Centred(), tile_elements=4)
    for name in TRAINED:
        np.testing.assert_allclose(model[name], base[name] + mean[name] - mean[name].mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [Heavy(), Extrapolated()])
def test_tiles_and_threads_do_not_matter(tmp_path, own):
    expected = folded(tmp_path / "a", own)
    for number, options in enumerate(({"tile_elements": 3}, {"threads": 3, "tile_elements": 8})):
        found = folded(tmp_path / str(number), own, **options)
        for one, other in zip((expected[0], *expected[1].values()), (found[0], *found[1].values()), strict=True):
            assert {n: a.tobytes() for n, a in one.items()} == {n: a.tobytes() for n, a in other.items()}


def test_rows_in_memory_have_the_bits_of_files(tmp_path):
    base, updates = cohort()
    values = np.stack([np.concatenate([u[t.name].reshape(-1) for t in LAYOUT]) for u in updates])
    for own in (Heavy(), Centred()):
        step = Step(CustomOptimizer(own), TRAINED, place=place())
        assert can_stack(LAYOUT, step)
        slots = {}
        new = fold_rows(base, LAYOUT, Rows(values, WEIGHTS, (1.0,) * 3, (1.0,) * 3), step, slots)
        model, of_files = folded(tmp_path / type(own).__name__, own)
        assert {n: a.tobytes() for n, a in new.items()} == {n: model[n].tobytes() for n in new}
        for slot, tensors in of_files.items():
            assert {n: slots[f"{slot}/{n}"].tobytes() for n in tensors} == {n: a.tobytes() for n, a in tensors.items()}
    assert not can_stack(LAYOUT, Step(CustomOptimizer(Extrapolated()), TRAINED))


def test_ranks_may_not_cut_what_is_needed_whole():
    step = Step(CustomOptimizer(Centred()), TRAINED)
    check_whole(step, LAYOUT, Counter({"conv": 1, "scale": 2}))
    with pytest.raises(ValueError, match="aggregation ranks cut conv into pieces"):
        check_whole(step, LAYOUT, Counter({"conv": 2}))


# ---------------------------------------------------------------- the contract


def own_with(**methods):
    return type("Mine", (), methods)()


def draws(self, master, mean, state):
    return master + np.random.default_rng().random(mean.shape)


def remembers(self, master, mean, state):
    self.calls = getattr(self, "calls", 0) + 1
    return master + self.calls


def looks_aside(self, master, mean, state):
    return master + mean.mean()


def fails(self, master, mean, state):
    return master / {}["nothing"]


def shortens(self, master, mean, state):
    return master[:1]


@pytest.mark.parametrize(
    ("apply", "sentence"),
    [
        (draws, "computes other values for the same 18 elements of tensor 'conv'"),
        (remembers, "keeps no state but its slots"),
        (looks_aside, "unless it has `whole = True`"),
        (fails, "optimizer Mine: apply raised KeyError: 'nothing'"),
        (shortens, r"returns \(1,\) for \(35,\) elements of the model"),
    ],
)
def test_a_breach_of_the_contract_costs_the_round_by_name(tmp_path, apply, sentence):
    base, _ = cohort()
    optimizer = CustomOptimizer(own_with(apply=apply))
    with pytest.raises(OptimizerFailed, match=sentence):
        optimizer.apply(base["conv"].reshape(-1).astype(float), np.arange(35.0), {}, place().at("conv", 0, 35))


def test_what_it_draws_from_its_place_is_the_same_everywhere(tmp_path):
    def apply(self, master, mean, state, place):
        return master + place.uniform() + place.of_tensor().random() + place.of_round().random()

    expected = folded(tmp_path / "a", own_with(apply=apply))[0]
    found = folded(tmp_path / "b", own_with(apply=apply), tile_elements=5)[0]
    assert {n: a.tobytes() for n, a in expected.items()} == {n: a.tobytes() for n, a in found.items()}


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda self, gram: float("nan"), "allowed: a finite number, or an array"),
        (lambda self, gram: "much", "prepare: could not convert string to float: 'much'"),
        (lambda self, gram: np.random.default_rng().random(), "another number when it is asked again"),
        (lambda self, gram: gram["x"], "prepare raised IndexError"),
    ],
)
def test_what_cannot_be_prepared(tmp_path, prepare, sentence):
    with pytest.raises(OptimizerFailed, match=sentence):
        folded(tmp_path, own_with(apply=lambda self, master, mean, state: master, prepare=prepare))


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ({"apply": draws, "slots": ("h",)}, "has slots, and no method `init`"),
        ({"apply": draws, "slots": "h"}, "allowed: a tuple of names"),
        ({"apply": draws, "slots": ("aggregate",), "init": lambda self, slot: 0}, "'aggregate' is not a slot name"),
        ({"apply": draws, "slots": ("../x",), "init": lambda self, slot: 0}, "is not a slot name"),
        ({"apply": draws, "slots": ("h",), "init": lambda self, slot: 1e300}, r"init\('h'\) is 1e\+300"),
        ({"apply": draws, "slots": ("h",), "init": lambda self, slot: {}[slot]}, r"init\('h'\) raised KeyError"),
    ],
)
def test_what_is_no_optimizer(methods, sentence):
    with pytest.raises(ValueError, match=sentence):
        CustomOptimizer(own_with(**methods))
