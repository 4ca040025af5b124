import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.training.optimizers.make import ELEMENTWISE, LAYERWISE, make_optimizer
from atoll.training.optimizers.options import OPTIONS, OptimizerConfig


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_method_lowers_the_loss_of_a_small_regression(name: str) -> None:
    net, inputs = model(), torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    targets = inputs[:, :2] ** 2
    config = OptimizerConfig(
        name=name, lr={"sgd": 0.1, "lars": 1.0, "novograd": 0.01}.get(name, 0.02), trust=TRUST.get(name)
    )
    optimizer, losses = make_optimizer(config, net.named_parameters()), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


TRUST = {"lars": 0.02}


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_biases_and_norms_do_not_decay(name: str) -> None:
    net = model()
    optimizer = make_optimizer(OptimizerConfig(name=name, weight_decay=0.5), net.named_parameters())
    decay = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert {name: decay[parameter] for name, parameter in net.named_parameters()} == {
        **{"0.weight": 0.5, "0.bias": 0.0, "1.weight": 0.0},
        **{"1.bias": 0.0, "2.weight": 0.5, "2.bias": 0.0},
    }


def test_biases_and_norms_decay_when_they_are_told_to() -> None:
    config = OptimizerConfig(name="adamw", weight_decay=0.5, skip_1d=False)
    [group] = make_optimizer(config, model().named_parameters()).param_groups
    assert group["weight_decay"] == 0.5
    assert len(group["params"]) == 6
    lars = make_optimizer(OptimizerConfig(name="lars", skip_1d=False), model().named_parameters())
    assert lars.param_groups[0]["skip_1d"] is False


def test_frozen_parameters_are_left_out() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer = make_optimizer(OptimizerConfig(), net.named_parameters())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
    net.requires_grad_(False)
    with pytest.raises(ValueError, match=r"nothing to train: 6 parameters, all frozen \(0.weight"):
        make_optimizer(OptimizerConfig(), net.named_parameters())


def test_options_that_are_not_given_are_the_method_s_own() -> None:
    [group] = make_optimizer(
        OptimizerConfig(name="lamb", lr=0.3, betas=(0.5, 0.6)), model().named_parameters()
    ).param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.3, (0.5, 0.6), 1e-6, 0.01)
    assert OptimizerConfig(name="novograd").options == OPTIONS["novograd"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name": "sdg"}, "optimizer.name: must be one of sgd, adam, .*, got 'sdg'"),
        ({"lr": 0.0, "momentum": 1.0}, r"lr: must be positive and finite, got 0.0 .*; .*momentum: must be in \[0, 1\)"),
        ({"name": "adamw", "trust": 0.1}, "optimizer.trust: belongs to lars, larc, got 0.1 for adamw"),
        ({"name": "adamw", "betas": (0.9, 1.0), "eps": -1.0}, "betas: .*; optimizer.eps: "),
        ({"name": "lamb", "bounds": (3.0, 1.0)}, "bounds: must be two numbers 0 <= low < high, got"),
        ({"nesterov": True}, "nesterov: needs a momentum"),
        ({"lr": "fast", "skip_1d": "yes"}, "lr: .*'fast'.*; optimizer.skip_1d: .*'yes'"),
        ({"name": "lars", "lr_in_momentum": 1}, "lr_in_momentum: must be true or false, got 1"),
        ({"lr": True}, "lr: must be positive and finite, got True"),
        ({"weight_decay": float("nan")}, "weight_decay: must be finite and not negative, got nan"),
    ],
)
def test_all_faults_of_a_config_are_named_at_once(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OptimizerConfig(**options)


def test_the_page_has_every_option_as_it_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "large_batch.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+=.*) \|$", page, re.MULTILINE))
    assert rows == {name: ", ".join(f"{key}={value}" for key, value in own.items()) for name, own in OPTIONS.items()}
    assert OPTIONS.keys() == {*LAYERWISE, *ELEMENTWISE}
