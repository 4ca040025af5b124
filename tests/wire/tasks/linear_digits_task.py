"""The digits of `examples/digits.py` with a linear model: many rounds in a few seconds."""

from dataclasses import replace
from pathlib import Path

from torch import nn

from atoll import Local
from atoll.task.task import load_task

digits = load_task(str(Path(__file__).parents[3] / "examples" / "digits.py") + ":task")


def make_model() -> nn.Module:
    """Softmax regression: 650 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


task = replace(digits, model=make_model, local=Local(epochs=1, batch_size=16, lr=0.3))
