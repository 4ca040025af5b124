"""The guides for a user's own code, "Write a task" and "Extending": their blocks run, and their tables are true."""

import itertools
import random
import re
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import ArrayTask, Deadline, Instructions, Task, codec_faults, load_task
from atoll.aggregation.rules.rule import check_count
from atoll.plugins.reference import load_module
from atoll.protocol.vocabulary import ClientId, RoundId
from atoll.server.config.aggregation import OptimizerConfig
from atoll.server.config.extensions import CUSTOM_RULE, CUSTOM_SAMPLER
from atoll.server.members.member import Candidate
from atoll.server.selection.sampling import draw
from atoll.simulations.devices.config import DeviceConfig
from atoll.simulations.populations.config import PopulationConfig
from atoll.simulations.populations.population import populate
from atoll.task.metrics import merge, values
from atoll.tensors import safetensors_file
from atoll.training.local.training import train_locally
from atoll.training.worker.bench import Received
from atoll.training.worker.model_bench import ModelBench
from tests.later import later
from tests.plugins.packages import install
from tests.simulations.federation.simulating import simulate

sklearn_metrics = later("sklearn.metrics")
mstats = later("scipy.stats.mstats")

ROOT = Path(__file__).parents[1]
TASK_PAGE = (ROOT / "docs" / "task.md").read_text("utf-8")
EXTENDING = (ROOT / "docs" / "extending.md").read_text("utf-8")


def code_of(page: str) -> str:
    """Return all Python blocks of a page, one after the other."""
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guide") / "task.py"
    path.write_text(code_of(TASK_PAGE))
    return path


@pytest.fixture(scope="module")
def guide(task_file: Path) -> ModuleType:
    return load_module(f"{task_file}:task")


# ---------------------------------------------------------------- the task


@pytest.fixture(scope="module")
def federated(task_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A simulated run of the task of the page, and the line of its last round."""
    folder = tmp_path_factory.mktemp("run")
    overrides = ["rounds=3", "round.cohort_size=3", "evaluation.clients_every=1"]
    result, lines = simulate(folder, *overrides, task=f"{task_file}:task")
    assert result["state"] == "finished"
    return folder, lines[-1]


def scores_of(guide: ModuleType, folder: Path, parts: list[torch.utils.data.TensorDataset]) -> tuple[Any, Any]:
    """Return the last model's scores of some data, and the targets."""
    model = guide.make_model()
    arrays = safetensors_file.read(folder / "models" / "versions" / "000003.safetensors")
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    with torch.no_grad():
        scores = [torch.sigmoid(model(part.tensors[0])).numpy() for part in parts]
    return np.concatenate(scores), np.concatenate([part.tensors[1].numpy() for part in parts])


def binned(guide: ModuleType, scores: Any) -> Any:
    return np.minimum((torch.from_numpy(scores) * guide.BINS).long().numpy(), guide.BINS - 1)


@pytest.mark.parametrize("where", ["server", "clients"])
def test_the_auc_of_a_federation_is_scikit_learns_of_all_its_sites(
    guide: ModuleType, federated: tuple[Path, dict[str, Any]], where: str
) -> None:
    folder, line = federated
    parts = [guide.load_test()] if where == "server" else [guide.load_site(site, "test") for site in guide.SITES]
    scores, targets = scores_of(guide, folder, parts)
    found = line[where]
    assert found["auc"] == pytest.approx(sklearn_metrics.roc_auc_score(targets, binned(guide, scores)), rel=1e-12)
    assert abs(found["auc"] - sklearn_metrics.roc_auc_score(targets, scores)) <= found["auc_error"] + 1e-12
    assert found["accuracy"] == pytest.approx(((scores > 0.5) == (targets > 0.5)).mean(), rel=1e-12)
    assert found["auc"] > 0.95


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(2, 400), spread=st.sampled_from([0.1, 1.0, 10.0]))
def test_the_auc_does_not_depend_on_the_split_into_sites(
    guide: ModuleType, seed: int, count: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    targets = np.concatenate([[0, 1], rng.integers(0, 2, count - 2)])
    logits = torch.from_numpy((spread * (rng.standard_normal(count) + targets)).astype(np.float32))
    cuts = np.sort(rng.integers(0, count + 1, size=4))
    sites = [
        {name: metric.statistics(part, label) for name, metric in guide.metrics.items() if name != "accuracy"}
        for part, label in zip(np.split(logits, cuts), np.split(torch.from_numpy(targets), cuts), strict=True)
    ]
    found = values(guide.metrics, merge(sites))
    scores = torch.sigmoid(logits).numpy()
    assert found["auc"] == pytest.approx(sklearn_metrics.roc_auc_score(targets, binned(guide, scores)), rel=1e-12)
    assert found["auc_error"] is not None
    assert abs(sklearn_metrics.roc_auc_score(targets, scores) - found["auc"]) <= found["auc_error"] + 1e-12


def test_the_auc_of_one_class_has_no_value(guide: ModuleType) -> None:
    counts = guide.score_counts(torch.zeros(3), torch.ones(3))
    assert values(guide.metrics, {"auc": counts, "auc_error": counts}) == {"auc": None, "auc_error": None}


def test_what_the_page_requires_of_a_task_is_required(guide: ModuleType) -> None:
    needed = {f.name for f in fields(Task) if f.default is MISSING and f.default_factory is MISSING}
    assert needed == {"model", "data", "loss"}
    assert "Only `model`, `data` and `loss` are required" in TASK_PAGE
    assert "Only `initial` and `train` are required" in TASK_PAGE
    assert isinstance(guide.in_arrays, ArrayTask)


def test_the_loop_of_the_page_trains_and_stops_at_the_deadline(guide: ModuleType, task_file: Path) -> None:
    task = load_task(f"{task_file}:with_a_loop")
    assert isinstance(task, Task)
    data = guide.load_site("north", "train")
    steps = 2 * -(-len(data) // 16)

    def work(deadline: Deadline) -> float:
        return train_locally(task, task.model(), data, task.local, seed=1, deadline=deadline).work

    ticks = itertools.count()
    assert work(Deadline.never()) == 1.0
    # The clock is read once before the loop, then before each step but the first: 5 steps begin before 4.5.
    assert work(Deadline(lambda: float(next(ticks)), at=4.5)) == 5 / steps


def test_a_round_of_one_step_in_arrays_is_a_gradient_step_on_the_pooled_data(
    guide: ModuleType, task_file: Path, tmp_path: Path
) -> None:
    overrides = ["rounds=2", "round.cohort_size=3", "local.steps=1", "local.lr=0.2"]
    result, lines = simulate(tmp_path, *overrides, task=f"{task_file}:in_arrays")
    assert result["state"] == "finished"
    pooled = [guide.arrays_of(site) for site in guide.SITES]
    measures, benign = np.concatenate([m for m, _ in pooled]), np.concatenate([b for _, b in pooled])
    ones = np.column_stack([measures, np.ones(len(benign))])
    w = np.zeros(31)
    for _ in range(2):
        w -= 0.2 * ones.T @ (ones @ w - benign) / len(benign)
    model = safetensors_file.read(tmp_path / "models" / "versions" / "000002.safetensors")
    np.testing.assert_allclose(np.append(model["coefficients"], model["intercept"]), w, rtol=1e-5, atol=1e-7)
    held_out, truth = guide.arrays_of("server")
    residuals = np.column_stack([held_out, np.ones(len(truth))]) @ w - truth
    assert lines[-1]["server"]["loss"] == pytest.approx(np.square(residuals).mean(), rel=1e-5)


# ---------------------------------------------------------------- rules and samplers of one's own


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guide") / "extensions.py"
    path.write_text(code_of(EXTENDING))
    return path


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 30), count=st.integers(3, 20))
def test_the_rule_of_the_page_is_scipys_winsorized_mean(extensions: Path, seed: int, count: int) -> None:
    rule = CUSTOM_RULE.load(f"{extensions}:winsorized")
    rows = np.random.default_rng(seed).standard_normal((count, 7)).astype(np.float32)
    expected = mstats.winsorize(rows.astype(np.float64), limits=(1 / count, 1 / count), axis=0).mean(axis=0)
    np.testing.assert_allclose(rule.reduce(rows.copy()), expected, rtol=1e-12, atol=1e-12)
    assert np.array_equal(rule.reduce(rows[:, 2:4].copy()), rule.reduce(rows.copy())[2:4])
    with pytest.raises(ValueError, match="2 updates are too few: at least 3"):
        check_count(rule, 2)


def test_the_sampler_of_the_page_chooses_everyone_equally_often(extensions: Path) -> None:
    sampler = CUSTOM_SAMPLER.load(f"{extensions}:least_often")
    chosen = {ClientId(f"c{k}"): 0 for k in range(7)}
    first_draws = set()
    for number in range(1, 30):
        candidates = [Candidate(client, 1, "", times_chosen=count) for client, count in chosen.items()]
        random.Random(number).shuffle(candidates)
        cohort = draw(sampler, seed=1, round_id=RoundId(number), count=3, candidates=candidates)
        assert cohort == draw(sampler, seed=1, round_id=RoundId(number), count=3, candidates=candidates[::-1])
        for client in cohort:
            chosen[client] += 1
        assert max(chosen.values()) - min(chosen.values()) <= 1
        first_draws.add(draw(sampler, seed=number, round_id=RoundId(1), count=3, candidates=candidates))
    assert len(first_draws) > 5, "equal ones are drawn by lot"


def test_a_run_takes_the_rule_and_the_sampler_of_the_page(task_file: Path, extensions: Path, tmp_path: Path) -> None:
    overrides = ["rounds=2", "round.cohort_size=3", "round.quorum=3"]
    mine = [f'aggregation.rule="{extensions}:winsorized"', f'cohort.sampler="{extensions}:least_often"']
    result, lines = simulate(tmp_path, *overrides, *mine, task=f"{task_file}:in_arrays")
    assert result["state"] == "finished"
    assert [line["counted"] for line in lines] == [3, 3]
    model = safetensors_file.read(tmp_path / "models" / "versions" / "000001.safetensors")
    guide = load_module(f"{task_file}:task")
    updates = [
        guide.in_arrays.train(guide.in_arrays.initial(0), Instructions(site, 0, 1, Deadline.never())).update
        for site in guide.SITES
    ]
    middle = np.median([update["coefficients"] for update in updates], axis=0)  # of three, f = 1: all become the median
    np.testing.assert_allclose(model["coefficients"], middle, rtol=1e-6)


def test_the_server_optimizer_of_the_page_is_a_damped_momentum(extensions: Path) -> None:
    config = OptimizerConfig(name=f"{extensions}:Damped", options={"decay": 0.8})
    expected = OptimizerConfig(name="fedavgm", lr=0.2, momentum=0.8)  # b m + D is (1 - b) times as large
    damped, plain = config.build(), expected.build()
    x, y, rng = np.ones(5), np.ones(5), np.random.default_rng(0)
    states: list[dict[str, Any]] = [{"momentum": np.zeros(5)}, {"momentum": np.zeros(5)}]
    for _ in range(4):
        mean = rng.standard_normal(5)
        x, y = damped.apply(x, mean.copy(), states[0]), plain.apply(y, mean.copy(), states[1])
    np.testing.assert_allclose(x, y)


def test_the_codec_of_the_page_rounds_to_the_nearest_of_its_levels(extensions: Path) -> None:
    rounded = load_module(f"{extensions}:Rounded").Rounded
    values = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    for levels in (1, 7, 127):
        codec, step = rounded(levels), np.abs(values).max() / levels
        found = codec.decode(codec.encode(values, np.random.default_rng(0)), 1000)
        assert np.abs(found - values).max() <= step / 2 * (1 + 1e-5)
        assert len(np.unique(found)) <= 2 * levels + 1
        assert codec_faults(codec) == []


def test_a_run_takes_the_codec_and_the_local_optimizer_of_the_page(
    task_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {
        "atoll.codecs": {"rounded": "acme_of_the_page:Rounded"},
        "atoll.local_optimizers": {"lion": "acme_of_the_page:Lion"},
    }
    monkeypatch.syspath_prepend(
        install(tmp_path / "site", "acme", modules={"acme_of_the_page": code_of(EXTENDING)}, points=points)
    )
    overrides = ["rounds=2", "round.cohort_size=3", "local.lr=0.01"]
    coded = ["aggregation.codec=rounded", "aggregation.codec_options.levels=3", "local.optimizer=lion"]
    result, _ = simulate(tmp_path / "run", *overrides, *coded, task=f"{task_file}:task")
    plain, _ = simulate(tmp_path / "plain", *overrides, task=f"{task_file}:task")
    assert result["state"] == plain["state"] == "finished"
    assert result["model_digest"] != plain["model_digest"]
    assert result["bytes_up"] < 0.5 * plain["bytes_up"]


def test_the_algorithm_of_the_page_is_fedprox(extensions: Path, guide: ModuleType) -> None:
    algorithm = load_module(f"{extensions}:Proximal").Proximal()
    task = replace(guide.task, algorithm=algorithm, options={"mu": 0.5})
    updates = []
    for each, local in ((task, {}), (guide.task, {"prox_mu": 0.5})):
        bench = ModelBench(each, {"site": guide.SITES[0]})
        outcome = bench.train(Received(bench.initial(0)), {"seed": 1, "local": local}, Deadline.never())
        updates.append(outcome.trained.update)
    for name, array in updates[0].items():
        np.testing.assert_allclose(array, updates[1][name], rtol=1e-4, atol=1e-7)


def test_the_population_of_the_page_leaves_each_site_s_data_together(extensions: Path) -> None:
    data = {site: torch.utils.data.TensorDataset(torch.zeros(600, 1), torch.rand(600)) for site in ("a", "b")}
    task = Task(model=torch.nn.Identity, data=lambda site, split: data[site], sites=list(data), loss=torch.nn.MSELoss())
    config = PopulationConfig(kind=f"{extensions}:within_sites", clients=12, options={"largest": 0.5})
    train = populate(config, task, seed=2).train
    assert set(train.owner[:600].tolist()) == set(range(6))
    assert set(train.owner[600:].tolist()) == set(range(6, 12))
    assert 290 < train.sizes[0] < 410, "half of 600, and a sixth of the other half"


def test_the_device_model_of_the_page_is_one(extensions: Path) -> None:
    fleet = DeviceConfig(model=f"{extensions}:phone", options={"median": 150.0}).of(list("abcdefgh"), seed=1)
    ratios = fleet.speeds.up_bytes_per_s / fleet.speeds.examples_per_s
    np.testing.assert_allclose(ratios, 400_000 / 150)
    assert len(set(fleet.speeds.latency_s.tolist())) == 8


def test_the_tables_of_what_to_add_name_what_the_files_have() -> None:
    found = re.findall(r"^\| ((?:`[\w./]+`(?:, )?)+) \| (.*) \|$", EXTENDING, re.MULTILINE)
    assert len(found) > 15
    for cell, added in found:
        texts = [(ROOT / path).read_text("utf-8") for path in re.findall(r"`([^`]+)`", cell)]
        for name in re.findall(r"`([A-Za-z_]\w*)`", added):
            assert any(re.search(rf"\b{name}\b", text) for text in texts), f"{name} is not in {cell}"


def test_the_page_names_what_a_sampler_sees() -> None:
    sentence = EXTENDING.partition("Each has ")[2].partition(".\n")[0]
    assert tuple(re.findall(r"`(\w+)`", sentence)) == Candidate._fields
