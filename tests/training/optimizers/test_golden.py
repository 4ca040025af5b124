"""Each optimizer against the numbers of an independent float64 calculation of its paper's formula.

The numbers were made outside this repository and agree with timm's Lars, Lamb and NvNovoGrad and with apex' LARC.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from atoll.training.optimizers.lamb import LAMB
from atoll.training.optimizers.larc import LARC
from atoll.training.optimizers.lars import LARS
from atoll.training.optimizers.novograd import NovoGrad

START = [[1.0, 2.0], [3.0, 4.0]]
GRADIENTS = [[[0.1, -0.2], [0.3, -0.4]], [[0.2, 0.1], [-0.1, 0.3]], [[-0.3, 0.2], [0.1, 0.1]]]
CONSTANT, FALLING = [0.5, 0.5, 0.5], [0.5, 0.5, 0.05]

Make = Callable[[Any, float], torch.optim.Optimizer]


def lars(lr_in_momentum: bool) -> Make:
    return lambda p, lr: LARS(p, lr, momentum=0.9, weight_decay=0.01, trust=0.001, lr_in_momentum=lr_in_momentum)


def larc(p: Any, lr: float) -> LARC:
    return LARC(p, lr, momentum=0.9, weight_decay=0.01, trust=0.02)


def novograd(averaging: bool) -> Make:
    return lambda p, lr: NovoGrad(p, lr, betas=(0.95, 0.98), weight_decay=0.01, averaging=averaging)


def lamb(bias_correction: bool) -> Make:
    return lambda p, lr: LAMB(p, lr, betas=(0.9, 0.999), weight_decay=0.01, eps=1e-6, bias_correction=bias_correction)


@pytest.mark.parametrize(
    ("make", "rates", "after_one", "after_three"),
    [
        pytest.param(
            lars(True),
            CONSTANT,
            [0.9995, 2.000818182, 2.9985, 4.001636364],
            [0.997969514, 1.999441803, 2.995954079, 3.999564772],
            id="lars",
        ),
        pytest.param(
            lars(False),
            CONSTANT,
            [0.9995, 2.000818182, 2.9985, 4.001636364],
            [0.997969514, 1.999441803, 2.995954079, 3.999564772],
            id="lars, torch's order, constant rate",
        ),
        pytest.param(
            lars(True),
            FALLING,
            [0.9995, 2.000818182, 2.9985, 4.001636364],
            [0.996352685, 2.000668314, 2.996678673, 4.000345306],
            id="lars, falling rate inside the momentum",
        ),
        pytest.param(
            lars(False),
            FALLING,
            [0.9995, 2.000818182, 2.9985, 4.001636364],
            [0.997771022, 2.000674107, 2.997420811, 4.000858732],
            id="lars, falling rate outside the momentum",
        ),
        pytest.param(
            larc,
            [0.01] * 3,
            [0.9989, 2.0018, 2.9967, 4.0036],
            [0.995929628, 2.000397436, 2.991088184, 4.001894972],
            id="larc, not clipped",
        ),
        pytest.param(
            larc,
            CONSTANT,
            [0.98, 2.032727273, 2.94, 4.065454545],
            [0.918418704, 1.977459645, 2.838929791, 3.98173862],
            id="larc, clipped",
        ),
        pytest.param(
            novograd(False),
            [0.1] * 3,
            [0.980742582, 2.034514837, 2.942227745, 4.069029673],
            [0.925991042, 2.019776234, 2.843904974, 4.059112183],
            id="novograd",
        ),
        pytest.param(
            novograd(True),
            [0.1] * 3,
            [0.999037129, 2.001725742, 2.997111387, 4.003451484],
            [0.996294195, 2.000994237, 2.992185278, 4.002965589],
            id="novograd with averaging",
        ),
        pytest.param(
            lamb(True),
            [0.1] * 3,
            [0.722113181, 2.269634049, 2.716608583, 4.264131974],
            [0.28260856, 2.123750202, 2.029724703, 4.196282617],
            id="lamb",
        ),
        pytest.param(
            lamb(False),
            [0.1] * 3,
            [0.7248889, 2.272551929, 2.723096073, 4.270838594],
            [0.289398438, 2.138890083, 2.036345528, 4.247575691],
            id="lamb without bias correction",
        ),
    ],
)
def test_three_steps_are_those_of_the_paper(
    make: Make, rates: list[float], after_one: list[float], after_three: list[float]
) -> None:
    weights = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    optimizer, trace = make([weights], rates[0]), []
    for lr, gradient in zip(rates, GRADIENTS, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        weights.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        trace.append(weights.detach().flatten().numpy().copy())
    np.testing.assert_allclose(trace[0], after_one, rtol=0, atol=2e-9)
    np.testing.assert_allclose(trace[2], after_three, rtol=0, atol=2e-9)
