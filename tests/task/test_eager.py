"""Torch's optimizers without its compiler: the same bits, and the compiler as soon as somebody imports it."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.waiting import BOUND_S

STEPS = """
import json, sys
import torch
from atoll.task import eager

if sys.argv[1] == "eager":
    eager.step_without_compiler()
    eager.step_without_compiler()  # the second time changes nothing
kinds = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.1}),
}

def steps(kind, settings):
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(5))
    optimizer = kind([weights], **settings)
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    def closure():
        optimizer.zero_grad()
        loss = (weights**4).sum()
        loss.backward()
        return loss
    for _ in range(3):
        optimizer.step(closure)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step(closure)
    assert weights.requires_grad and weights.is_leaf and len(hooked) == 4
    return weights.tolist()

def differentiable():
    weights = torch.nn.Parameter(torch.ones(3))
    moved = weights.clone()
    moved.grad = torch.full((3,), 2.0)
    torch.optim.SGD([moved], lr=0.5, differentiable=True).step()
    return torch.autograd.grad(moved.sum(), weights)[0].tolist()

found = {name: steps(*kind) for name, kind in kinds.items()}
found["differentiable"] = differentiable()
is_imported = "torch._dynamo" in sys.modules
import torch._dynamo
again = steps(*kinds["sgd"]) == found["sgd"]
method, is_told = torch.optim.Optimizer.zero_grad, False
while method is not None:
    is_told, method = is_told or hasattr(method, "__dynamo_disable"), getattr(method, "__wrapped__", None)
print(json.dumps({"found": found, "imported": is_imported, "again": again, "told": is_told}))
"""


def steps(how: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.real
def test_optimizers_step_alike_with_and_without_the_compiler() -> None:
    eager, torchs_own = steps("eager"), steps("as torch does")
    assert eager["found"] == torchs_own["found"]
    assert eager["found"]["differentiable"] == [1.0, 1.0, 1.0]
    assert torchs_own["imported"]
    assert not eager["imported"]
    assert eager["again"]
    assert eager["told"], "the compiler is told to leave the method alone, once it is there"
