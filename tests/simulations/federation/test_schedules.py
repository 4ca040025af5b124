"""Schedules over the rounds, options and the context in simulations, beside an independent loop."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.operations.load import load_user_task
from atoll.protocol.settings import ConfigError
from atoll.simulations.federation.run import opened
from tests.simulations.federation import line_task, scheduled_task
from tests.simulations.federation.simulating import lines, model, settings, simulate

TASK = str(Path(scheduled_task.__file__)) + ":task"
BY_SITE = str(Path(scheduled_task.__file__)) + ":by_site"
ROUNDS = 5
SETTINGS = (
    f"rounds={ROUNDS}",
    "seed=3",
    "round.cohort_size=4",
    "task.smoothing=0.4",
    "local.batch_size=20",
    "local.shuffle=false",
    "local.epochs=2",
    'schedule.local.lr={kind = "cosine", start = 0.3, end = 0.1}',
    'schedule.local.epochs={kind = "list", values = [2, 3], rounds_from = [1, 4]}',
    'schedule.optimizer.lr={kind = "step", factor = 0.5, every = 2}',
)
NO_EPOCHS = tuple(each for each in SETTINGS if each != "local.epochs=2")


def learning_rates(scheduler, start):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=start)
    it = scheduler(optimizer)
    for _ in range(ROUNDS):
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        it.step()


def independent_loop(start):
    """FedAvg by hand: whole batches, torch's own schedulers, label smoothing 0.4 / round."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    version = {name: torch.from_numpy(array.copy()) for name, array in start.items()}
    of_clients = learning_rates(lambda it: torch.optim.lr_scheduler.CosineAnnealingLR(it, ROUNDS, eta_min=0.1), 0.3)
    of_server = learning_rates(lambda it: torch.optim.lr_scheduler.StepLR(it, 2, 0.5), 1.0)
    for round_, (lr, server_lr) in enumerate(zip(of_clients, of_server, strict=True), 1):
        mean, total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in version.items()}, 0
        for site in line_task.SITES:
            net.load_state_dict(version)
            inputs, targets = line_task.data(site, "train").tensors
            optimizer = torch.optim.SGD(net.parameters(), lr=lr)
            for _ in range(2 if round_ < 4 else 3):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(inputs), targets, label_smoothing=0.4 / round_)
                loss.backward()
                optimizer.step()
            total += len(targets)
            for name, value in net.state_dict().items():
                mean[name] += len(targets) * (value.double() - version[name].double())
        version = {name: (v.double() + server_lr * mean[name] / total).float() for name, v in version.items()}
    return version


@pytest.mark.real
@pytest.mark.parametrize("engine", ["sequential", "processes", "batched"])
def test_an_independent_loop_with_torchs_schedulers_ends_at_the_same_model(tmp_path, engine):
    result, _ = simulate(tmp_path, *NO_EPOCHS, f"simulation.engine={engine}", task=TASK)
    assert engine[:5] in result["engine"].replace("2 processes", "processes")
    expected = independent_loop(model(tmp_path, 0))
    for name, array in model(tmp_path, ROUNDS).items():
        np.testing.assert_allclose(array, expected[name].numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_without_the_schedule_the_model_is_another(tmp_path):
    scheduled, _ = simulate(tmp_path / "a", *NO_EPOCHS, task=TASK)
    for leave_out in ("schedule.local.lr", "schedule.local.epochs", "schedule.optimizer.lr", "task.smoothing"):
        rest = [each for each in NO_EPOCHS if not each.startswith(leave_out)]
        other, _ = simulate(tmp_path / leave_out, *rest, task=TASK)
        assert other["model_digest"] != scheduled["model_digest"], leave_out


def test_more_local_epochs_take_more_virtual_time(tmp_path):
    simulate(tmp_path, *NO_EPOCHS, "devices.examples_per_s=10", task=TASK)
    seconds = [line["virtual_s"] for line in lines(tmp_path)]
    lengths = np.diff([0.0, *seconds])
    assert lengths[3] / lengths[2] == pytest.approx(1.5, rel=0.2)


@pytest.mark.real
def test_an_asynchronous_run_schedules_by_the_version_that_an_update_is_from(tmp_path):
    """The value of a client's round follows from its base: mixing the versions up would give another model."""
    buffered = ("round.mode=fedbuff", "round.concurrency=2", "round.buffer_size=1", "rounds=6")
    rest = tuple(each for each in NO_EPOCHS if not each.startswith(("rounds", "round.cohort")))
    one, _ = simulate(tmp_path / "one", *rest, *buffered, task=TASK)
    two, _ = simulate(tmp_path / "two", *rest, *buffered, "simulation.engine=processes", task=TASK)
    assert one["model_digest"] == two["model_digest"]


@pytest.mark.real
def test_a_loss_that_reads_its_site_is_not_batched_and_says_so(tmp_path):
    """The batched engine has no site for a loss of many clients at once: another engine trains them."""
    told = []
    file = settings("simulation.engine=batched", "rounds=1", "round.cohort_size=4", task=BY_SITE)
    task = load_user_task(file.task)
    with opened(file, task, tmp_path, on_round=told.append, is_fresh=False, tell=told.append) as federation:
        result = federation.run()
    assert any("reads context.site, which differs between the clients" in str(line) for line in told)
    assert "batched" not in result["engine"]


def test_what_cannot_fit_in_some_round_is_refused_before_the_first(tmp_path):
    wrong = ('schedule.local.lr={kind = "linear", end = -0.1}', "task.smoothin=1", "task.width=true")
    with pytest.raises(ConfigError) as refused:
        simulate(tmp_path, *wrong, task=TASK)
    assert [fault.partition(", got")[0] for fault in refused.value.faults] == [
        "schedule.local.lr: must be positive and finite",
        "task.smoothin: unknown key",
        "task.width: expected int",
    ]
    assert not (tmp_path / "rounds.jsonl").exists()


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_the_schedule(tmp_path):
    whole, _ = simulate(tmp_path / "whole", *NO_EPOCHS, task=TASK)
    part = [each for each in NO_EPOCHS if not each.startswith("rounds")]
    cosine = 'schedule.local.lr={kind = "cosine", start = 0.3, end = 0.1, rounds = 5}'
    part = [cosine if each.startswith("schedule.local.lr") else each for each in part]
    simulate(tmp_path / "parts", *part, "rounds=2", task=TASK)
    again, _ = simulate(tmp_path / "parts", *part, "rounds=5", task=TASK)
    assert again["model_digest"] == whole["model_digest"]
    assert json.loads((tmp_path / "parts" / "result.json").read_text())["version"] == ROUNDS


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_last_version_is_evaluated_though_a_further_round_would_have_no_learning_rate(tmp_path, kind):
    schedule = f'schedule.local.lr={{kind = "{kind}"}}'  # it reaches 0 in the round after the last
    result, found = simulate(tmp_path, "rounds=2", "round.cohort_size=2", "evaluation.clients_every=1", schedule)
    assert (result["state"], result["version"]) == ("finished", 2)
    assert "loss" in found[-1]["server"]
    assert "loss" in found[-1]["clients"]
