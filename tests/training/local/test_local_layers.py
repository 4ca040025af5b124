"""Layers that stay at their site: FedBN against the algorithm written out in plain torch, and what is refused."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Deadline, Task
from atoll.task.arrays import Arrays
from atoll.task.errors import NotFinite, TaskBroken, TaskMismatch
from atoll.training.local.local_layers import names_that_stay
from atoll.training.model.parameters import initial_parameters
from atoll.training.worker.bench import Outcome, Received
from atoll.training.worker.model_bench import ModelBench
from tests.training.tasks import make_task

FEDBN = {"keep": "batchnorm", "batch_size": None, "epochs": 3, "lr": 0.2}
BN = {f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def bench(task: Task, site: str | None = None, **local: Any) -> ModelBench:
    return ModelBench(task, {"site": site, "local": local})


def trained(task: Task, site: str, version: Arrays, own: Arrays | None, local: dict[str, Any], **more: Any) -> Outcome:
    request = {"seed": 3, "model_seed": 5, "local": local} | more
    return bench(task, site).train(Received(version, own), request, Deadline.never())


def by_hand(task: Task, num_rounds: int) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    """FedBN in plain torch: every key of the batch norm stays in its client's model, the rest is averaged by size."""
    torch.manual_seed(5)
    server = task.model()
    clients = {site: copy.deepcopy(server) for site in task.sites}
    shared = {name: tensor.clone() for name, tensor in server.state_dict().items() if name not in BN}
    for _ in range(num_rounds):
        total, count = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}, 0
        for site, model in clients.items():
            model.load_state_dict(shared, strict=False)
            inputs, targets = task.data(site, "train").tensors
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            model.train()
            for _ in range(3):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            count += len(targets)
            for name in total:
                total[name] += len(targets) * model.state_dict()[name]
        shared = {name: tensor / count for name, tensor in total.items()}
    for model in clients.values():
        model.load_state_dict(shared, strict=False)
    return shared, clients


def test_three_rounds_of_fedbn_are_those_of_plain_torch() -> None:
    task = make_task(normalized)
    version, own = bench(task, **FEDBN).initial(5), dict[str, Arrays]()
    assert not version.keys() & BN
    for _ in range(3):
        outcomes = {site: trained(task, site, version, own.get(site), FEDBN) for site in task.sites}
        total = sum(outcome.trained.num_examples for outcome in outcomes.values())
        for name in version:
            moves = (o.trained.num_examples * o.trained.update[name] for o in outcomes.values())
            version[name] = (version[name] + sum(moves) / total).astype(np.float32)
        own = {site: outcome.own for site, outcome in outcomes.items()}
    shared, clients = by_hand(task, 3)
    for name, tensor in shared.items():
        np.testing.assert_allclose(version[name], tensor.numpy(), rtol=1e-4, atol=1e-6)
    for site, model in clients.items():
        assert own[site].keys() == BN
        for name, array in own[site].items():
            np.testing.assert_allclose(array, model.state_dict()[name].numpy(), rtol=1e-4, atol=1e-6)
        model.eval()
        inputs, targets = task.data(site, "test").tensors
        loss = nn.functional.cross_entropy(model(inputs), targets)
        request = {"split": "test", "local": FEDBN}
        measured = bench(task, site).evaluate(Received(version, own[site]), request)
        assert not isinstance(measured, str)
        assert measured["loss"][0] / measured["loss"][1] == pytest.approx(loss.item(), rel=1e-4)


def test_a_new_client_begins_with_the_layers_of_the_runs_initial_model() -> None:
    """The layers are equal even if they are random; and the client measures with them before it has trained."""
    task, keep = make_task(normalized), {"keep": "3.*", "batch_size": None}
    whole, version = initial_parameters(task, 5), bench(task, keep="3.*").initial(5)
    assert whole.keys() - version.keys() == {"3.weight", "3.bias"}
    plain = trained(task, "a", whole, None, {"batch_size": None})
    outcome = trained(task, "a", version, None, keep)
    for name, array in outcome.trained.update.items():
        np.testing.assert_array_equal(array, plain.trained.update[name])
    for name, array in outcome.own.items():
        np.testing.assert_allclose(array, whole[name] + plain.trained.update[name], atol=1e-6)
    request = {"split": "test", "model_seed": 5}
    first = bench(task, "a").evaluate(Received(version), request | {"local": keep})
    assert first == bench(task, "a").evaluate(Received(whole), request)


def test_what_stays_is_no_part_of_the_update_nor_of_the_layout() -> None:
    task = make_task(normalized)
    version = bench(task, **FEDBN).initial(0)
    outcome = trained(task, "a", version, None, FEDBN)
    assert outcome.trained.update.keys() == version.keys()
    assert bench(task, **FEDBN).buffers() == []
    assert bench(task).buffers() == ["1.running_mean", "1.running_var"]


def test_without_keep_nothing_stays_and_what_another_run_has_left_is_not_looked_at() -> None:
    task = make_task(normalized)
    version = bench(task).initial(0)
    left = {name: array + 1 for name, array in version.items() if name in BN}
    outcome, same = (trained(task, "a", version, own, {}) for own in (None, left))
    assert outcome.own == same.own == {}
    assert outcome.trained.update.keys() > BN
    for name, array in outcome.trained.update.items():
        np.testing.assert_array_equal(array, same.trained.update[name])


def test_an_own_layer_that_is_missing_is_named() -> None:
    task = make_task(normalized)
    version = bench(task, **FEDBN).initial(0)
    with pytest.raises(TaskMismatch, match=r"1\.bias is missing"):
        trained(task, "a", version, {"1.weight": np.ones(8, np.float32)}, FEDBN)


def test_scaffold_has_no_variate_of_what_stays() -> None:
    task = make_task(normalized)
    version = ModelBench(task, {"local": FEDBN, "algorithm": "scaffold"}).initial(0)
    assert {name for name in version if name.startswith("control/")} == {
        f"control/{layer}.{kind}" for layer in (0, 3) for kind in ("weight", "bias")
    }
    outcome = trained(task, "a", version, None, FEDBN, algorithm="scaffold")
    assert outcome.trained.update.keys() == version.keys()
    assert outcome.own.keys() == BN | {name for name in version if name.startswith("control/")}
    again = trained(task, "a", version, outcome.own, FEDBN, algorithm="scaffold")
    assert again.own["1.num_batches_tracked"] == 6


def test_several_words_and_every_kind_of_batch_norm() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(2)), nn.Linear(2, 2), nn.LayerNorm(2))
    stays = names_that_stay(model, " batchnorm, 2.b* ")
    assert {name.rsplit(".", 1)[0] for name in stays} == {"0", "1.0", "2"}
    assert "2.weight" not in stays
    assert "0.num_batches_tracked" in stays
    bare = nn.BatchNorm1d(2)
    assert names_that_stay(nn.ModuleDict({"n": bare, "m": nn.Linear(1, 1)}), "batchnorm") >= {"n.weight"}


@pytest.mark.parametrize(
    ("keep", "fault"),
    [
        ("hed.*", r"local.keep: 'hed.\*' fits no tensor of the model \(its tensors: 0.weight, "),
        ("3.*, batchnorms", "'batchnorms' fits no tensor"),
        ("*", "keeps the whole model"),
    ],
)
def test_a_word_that_cannot_be_meant_is_refused(keep: str, fault: str) -> None:
    with pytest.raises(TaskBroken, match=fault):
        bench(make_task(normalized), keep=keep).initial(0)


def test_a_model_without_batch_norm_has_none_to_keep() -> None:
    with pytest.raises(TaskBroken, match="'batchnorm' fits no tensor"):
        bench(make_task(), keep="batchnorm").initial(0)


@pytest.mark.parametrize("keep", ["", "head.*, "])
def test_empty_words_are_no_setting(keep: str) -> None:
    with pytest.raises(ValueError, match=r"local\.keep: must be names separated by commas, or none"):
        bench(make_task(), keep=keep)


def test_a_global_model_that_has_what_stays_here_is_another_one() -> None:
    task = make_task(normalized)
    with pytest.raises(TaskMismatch, match=r"keeps 1\.bias, .* at the site, but the global model has them"):
        trained(task, "a", initial_parameters(task, 0), None, FEDBN)


def test_a_layer_of_its_own_that_is_not_finite_fails_the_training() -> None:
    def fit(model: nn.Module, *_: object) -> float:
        with torch.no_grad():
            model.get_parameter("1.bias").fill_(float("nan"))
        return 1.0

    task = make_task(normalized, fit=fit)
    with pytest.raises(NotFinite, match=r"1\.bias"):
        trained(task, "a", bench(task, **FEDBN).initial(0), None, FEDBN)


def test_the_servers_data_is_not_measured_with_layers_that_are_elsewhere() -> None:
    task = make_task(normalized)
    version = bench(task, **FEDBN).initial(0)
    reason = bench(task, **FEDBN).evaluate(Received(version), {"split": "server"})
    assert reason == "the layers of local.keep (batchnorm) are at the sites: let clients evaluate"


class Tied(nn.Module):
    """A language model whose output layer has, by `how`, the weight of the embedding, or a view of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        weight = self.embed.weight
        if how == "tied":
            self.head.weight = weight
        elif how == "shared module":
            self.head.register_module("of", self.embed)
        elif how == "transposed":
            self.head.weight = nn.Parameter(weight.detach().T)
        elif how == "part":
            self.head.weight = nn.Parameter(weight.detach()[2:5, 1:])
        elif how == "buffer":
            self.head.register_buffer("table", weight.detach().flatten()[3:9])
        elif how == "not in state_dict":
            self.head.register_buffer("table", weight.detach()[0], persistent=False)
        elif how == "view of a view":
            self.mix.weight = nn.Parameter(weight.detach()[:4])
            self.head.weight = nn.Parameter(weight.detach()[3:6])


@pytest.mark.parametrize(
    "how", ["tied", "shared module", "transposed", "part", "buffer", "not in state_dict", "view of a view", "nothing"]
)
def test_no_number_of_a_kept_tensor_leaves_under_another_name(how: str) -> None:
    """Each kept number is changed in the model; what travels must not change with it."""

    def model() -> nn.Module:
        return Tied(how)

    task = make_task(model)
    before = bench(task, keep="head.*").initial(0)
    torch.manual_seed(0)
    changed = model()
    for _, tensor in [*changed.head.named_parameters(), *changed.head.named_buffers()]:
        tensor.detach().add_(1)
    after = bench(make_task(lambda: changed), keep="head.*").initial(0)
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
    wanted = {"embed.weight", "mix.weight", "mix.bias"} - {"nothing": set()}.get(how, {"embed.weight"})
    assert before.keys() == wanted - ({"mix.weight"} if how == "view of a view" else set())


def test_the_embedding_that_is_tied_to_a_kept_head_is_trained_and_stays() -> None:
    def fit(model: Any, *_: object) -> float:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        return 1.0

    task = make_task(lambda: Tied("tied"), fit=fit)
    version, whole = bench(task, keep="head.*").initial(5), initial_parameters(task, 5)
    outcome = trained(task, "a", version, None, {"keep": "head.*"})
    assert outcome.trained.update.keys() == {"mix.weight", "mix.bias"}
    assert outcome.own.keys() == {"embed.weight", "head.bias"}
    for name, array in outcome.own.items():
        np.testing.assert_allclose(array, whole[name] + 1, rtol=1e-6)
    again = trained(task, "a", version, outcome.own, {"keep": "head.*"})
    np.testing.assert_allclose(again.own["embed.weight"], whole["embed.weight"] + 2, rtol=1e-6)


def test_a_batch_norm_whose_scale_has_an_earlier_name_stays() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.BatchNorm1d(4)
            self.scale = norm.weight
            self.layers = nn.Sequential(nn.Linear(6, 4), norm)

    assert names_that_stay(Scaled(), "batchnorm") == {"scale"} | {
        f"layers.1.{name}" for name in ("bias", "running_mean", "running_var", "num_batches_tracked")
    }


def test_neighbours_in_one_flat_storage_do_not_stay_with_each_other() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.zeros(12)
            self.first, self.second = nn.Parameter(flat[:6]), nn.Parameter(flat[6:])
            columns = torch.zeros(4, 2)
            self.left, self.right = nn.Parameter(columns[:, 0]), nn.Parameter(columns[:, 1])

    assert names_that_stay(Flat(), "first") == {"first"}
    assert names_that_stay(Flat(), "right") == {"right"}


def test_a_kept_part_of_the_tensor_that_holds_the_whole_model_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.zeros(12))
            self.first, self.second = nn.Parameter(self.flat.detach()[:6]), nn.Parameter(self.flat.detach()[6:])

    with pytest.raises(TaskBroken, match=r"'first' keeps the whole model.* under all of its names"):
        names_that_stay(Flat(), "first")
