"""The algorithms of `examples/algorithms`, each against a loop of its formulas, written without Atoll and in float64.

Every client takes full-batch steps in a fixed order, so that nothing is drawn but the cohorts, which the loop reads
from the rounds of the run.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import atoll
from atoll.task.task import load_task

HERE = Path(atoll.__file__).resolve().parents[1] / "examples" / "algorithms"
STEPS, LR, ROUNDS = 3, 0.2, 4
PLAIN = {
    "local.batch_size": "none",
    "local.shuffle": False,
    "local.epochs": STEPS,
    "local.lr": LR,
    "round.cohort_size": 4,
    "aggregation.weighting": "uniform",
    "model.keep_versions": ROUNDS + 1,
}


def run_of(name, folder, **settings):
    """The run of an example, its cohorts, and the sites' data in float64."""
    reference = f"{HERE / name}.py:task"
    run = atoll.simulate(reference, rounds=ROUNDS, out=folder, progress=False, set=PLAIN | settings)
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    cohorts = [sorted(line["fates"]) for line in lines]
    task = load_task(reference)
    data = {site: tuple(t.tensors) for site in task.sites if (t := task.data(site, "train"))}
    return run, cohorts, {site: (inputs.double(), targets) for site, (inputs, targets) in data.items()}


def exact(arrays):
    return {name: torch.from_numpy(np.array(array, np.float64)) for name, array in arrays.items()}


def net(weights, inputs):
    hidden = torch.tanh(inputs @ weights["0.weight"].T + weights["0.bias"])
    return hidden @ weights["2.weight"].T + weights["2.bias"]


def gradient_of(loss, weights):
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    found = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(v) if g is None else g for (n, v), g in zip(leaves.items(), found, strict=True)}


def loss_on(data, forward=net):
    return lambda weights: cross_entropy(forward(weights, data[0]), data[1])


def combined(*terms):
    """The sum of (factor, tensors by name)."""
    return {name: sum(factor * tensors[name] for factor, tensors in terms) for name in terms[0][1]}


def mean_of(many):
    return combined(*((1 / len(many), each) for each in many))


def zeros(like):
    return {name: torch.zeros_like(value) for name, value in like.items()}


def assert_same(arrays, expected, tolerance=2e-5):
    assert arrays.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(arrays[name], value.numpy(), rtol=tolerance, atol=tolerance, err_msg=name)


def descended(weights, gradient, steps=STEPS, lr=LR):
    """K steps along gradient(weights)."""
    for _ in range(steps):
        weights = combined((1, weights), (-lr, gradient(weights)))
    return weights


@pytest.mark.slow
def test_feddyn_with_partial_participation(tmp_path):
    alpha, clients = 0.1, 6
    run, cohorts, sites = run_of(
        "feddyn",
        tmp_path / "run",
        **{
            "optimizer.name": f"{HERE}/feddyn.py:FedDyn",
            "optimizer.options.alpha": alpha,
            "optimizer.options.num_clients": clients,
        },
    )
    x = exact(run.model(0))
    h, own = zeros(x), {site: zeros(x) for site in sites}
    for cohort in cohorts:
        local = {}
        for site in cohort:
            loss, start = loss_on(sites[site]), x
            local[site] = descended(
                x,
                lambda w, loss=loss, start=start, site=site: combined(
                    (1, gradient_of(loss, w)), (-1, own[site]), (alpha, w), (-alpha, start)
                ),
            )
            own[site] = combined((1, own[site]), (-alpha, local[site]), (alpha, x))
        moved = combined((1, mean_of(list(local.values()))), (-1, x))
        h = combined((1, h), (-alpha * len(cohort) / clients, moved))
        x = combined((1, mean_of(list(local.values()))), (-1 / alpha, h))
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert_same(run.model(), x)


@pytest.mark.slow
def test_fedexp(tmp_path):
    run, cohorts, sites = run_of(
        "fedexp",
        tmp_path / "run",
        **{"optimizer.name": f"{HERE}/fedexp.py:FedExP", "optimizer.options.epsilon": 1e-4},
    )
    x, steps = exact(run.model(0)), []
    for cohort in cohorts:
        updates = [
            combined((1, descended(x, lambda w, s=site: gradient_of(loss_on(sites[s]), w))), (-1, x)) for site in cohort
        ]
        whole = [torch.cat([value.flatten() for value in update.values()]) for update in updates]
        mean = torch.stack(whole).mean(0)
        steps.append(max(1.0, float(sum(u @ u for u in whole) / (2 * len(whole) * (mean @ mean + 1e-4)))))
        x = combined((1, x), (steps[-1], mean_of(updates)))
    assert max(steps) > 1, "the extrapolation takes part"
    assert_same(run.model(), x)


@pytest.mark.slow
def test_fedcm(tmp_path):
    alpha = 0.1
    run, cohorts, sites = run_of("fedcm", tmp_path / "run")
    x = exact(run.model(0))
    direction = None
    for cohort in cohorts:
        local = []
        for site in cohort:
            loss = loss_on(sites[site])
            parts = (1, zeros(x)) if direction is None else (alpha, direction)
            weight = 1 if direction is None else alpha
            local.append(
                descended(
                    x,
                    lambda w, loss=loss, weight=weight, parts=parts: combined(
                        (weight, gradient_of(loss, w)), ((1 - weight), parts[1])
                    ),
                )
            )
        direction = mean_of([combined((1 / (LR * STEPS), x), (-1 / (LR * STEPS), y)) for y in local])
        x = mean_of(local)
    assert_same(run.model(), x)


@pytest.mark.slow
def test_mime_lite(tmp_path):
    beta = 0.9
    run, cohorts, sites = run_of("mime", tmp_path / "run")
    x = exact(run.model(0))
    momentum = zeros(x)
    for cohort in cohorts:
        local, sent = [], []
        for site in cohort:
            loss = loss_on(sites[site])
            mixed = lambda w, loss=loss, m=momentum: combined((1 - beta, gradient_of(loss, w)), (beta, m))  # noqa: E731
            local.append(descended(x, mixed))
            sent.append(mixed(x))
        x, momentum = mean_of(local), mean_of(sent)
    assert_same(run.model(), x)


def personal(run, site, tasks_sites):
    """The client's state, from the newest file of its number."""
    number = tasks_sites.index(site)
    files = sorted(
        run.folder.glob(f"clients/{number}.own.*.safetensors"), key=lambda path: int(path.name.split(".")[2])
    )
    arrays = atoll.tensors.safetensors_file.read(files[-1]) if files else {}
    return {name.removeprefix("state/"): array for name, array in arrays.items()}


@pytest.mark.slow
def test_ditto(tmp_path):
    weight = 0.5
    run, cohorts, sites = run_of("ditto", tmp_path / "run")
    x = exact(run.model(0))
    own = {}
    for cohort in cohorts:
        local = []
        for site in cohort:
            loss = loss_on(sites[site])
            local.append(descended(x, lambda w, loss=loss: gradient_of(loss, w)))
            own[site] = descended(
                own.get(site, x),
                lambda v, loss=loss, x=x: combined((1, gradient_of(loss, v)), (weight, v), (-weight, x)),
            )
        x = mean_of(local)
    assert_same(run.model(), x)
    for site in cohorts[-1]:
        assert_same(personal(run, site, list(sites)), own[site])


@pytest.mark.slow
def test_pfedme(tmp_path):
    weight, inner, rate, lr = 15.0, 5, 0.05, 0.02
    run, cohorts, sites = run_of("pfedme", tmp_path / "run", **{"local.lr": lr, "optimizer.lr": 0.9})
    x = exact(run.model(0))
    for cohort in cohorts:
        local = []
        for site in cohort:
            loss, copy = loss_on(sites[site]), x
            for _ in range(STEPS):
                own = descended(
                    copy,
                    lambda v, loss=loss, copy=copy: combined((1, gradient_of(loss, v)), (weight, v), (-weight, copy)),
                    inner,
                    rate,
                )
                copy = combined((1, copy), (-lr * weight, copy), (lr * weight, own))
            local.append(copy)
        x = combined((1 - 0.9, x), (0.9, mean_of(local)))
    assert_same(run.model(), x)


def features(weights, inputs):
    hidden = torch.tanh(inputs @ weights["body.0.weight"].T + weights["body.0.bias"])
    return hidden @ weights["body.2.weight"].T + weights["body.2.bias"]


@pytest.mark.slow
def test_moon(tmp_path):
    temperature, weight = 0.5, 1.0
    run, cohorts, sites = run_of("moon", tmp_path / "run")
    x = exact(run.model(0))
    last = {}

    def similar(one, other):
        return (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))

    def loss(w, data, towards, away):
        z = features(w, data[0])
        near, far = (torch.exp(similar(z, features(o, data[0])) / temperature) for o in (towards, away))
        scores = z @ w["head.weight"].T + w["head.bias"]
        return cross_entropy(scores, data[1]) - weight * torch.log(near / (near + far)).mean()

    for cohort in cohorts:
        local = []
        for site in cohort:
            before = last.get(site, x)
            local.append(
                descended(
                    x,
                    lambda w, s=site, x=x, before=before: gradient_of(
                        lambda leaves: loss(leaves, sites[s], x, before), w
                    ),
                )
            )
            last[site] = local[-1]
        x = mean_of(local)
    assert any(cohorts[0][0] in cohort for cohort in cohorts[1:]), "a client has a last model"
    assert_same(run.model(), x)


@pytest.mark.slow
def test_ifca(tmp_path):
    run, cohorts, sites = run_of("ifca", tmp_path / "run", **{"aggregation.partial": True})
    x = exact(run.model(0))
    chosen = {}
    for cohort in cohorts:
        trained = {}
        for site in cohort:
            models = [
                {name.removeprefix(f"models.{j}."): v for name, v in x.items() if name.startswith(f"models.{j}.")}
                for j in range(3)
            ]
            losses = [float(loss_on(sites[site])(model)) for model in models]
            chosen[site] = j = losses.index(min(losses))
            trained.setdefault(j, []).append(descended(models[j], lambda w, s=site: gradient_of(loss_on(sites[s]), w)))
        for j, many in trained.items():
            x |= {f"models.{j}.{name}": value for name, value in mean_of(many).items()}
    assert len(set(chosen.values())) > 1
    assert_same(run.model(), x)


@pytest.mark.parametrize("name", ["feddyn", "fedexp", "fedcm", "ditto", "pfedme", "moon", "mime", "ifca"])
def test_an_example_is_short(name):
    lines = (HERE / f"{name}.py").read_text().splitlines()
    assert len(lines) < 100
