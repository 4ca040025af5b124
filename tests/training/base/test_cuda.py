"""LoRA adapters on a Llama trained on a GPU, against the CPU. `make test-cuda` runs this."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll import Base, Deadline
from atoll.training.worker.bench import Received
from atoll.training.worker.model_bench import ModelBench
from tests.later import later
from tests.training.base.test_peft import base as base  # a fixture
from tests.training.base.test_peft import llama, lora, task_of

peft = later("peft")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-cuda"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


def test_the_factors_move_as_on_the_cpu(base: Path) -> None:
    task = task_of(lambda: peft.get_peft_model(llama(), lora()), Base(base))
    updates = []
    for device in ("cpu", "cuda"):
        request: dict[str, Any] = {"site": "a", "seed": 3, "model_seed": 5, "local": {}, "device": device}
        bench = ModelBench(task, request)
        updates.append(bench.train(Received(bench.initial(5)), request, Deadline.never()).trained.update)
    assert updates[0].keys() == updates[1].keys()
    assert all("lora_" in name for name in updates[0])
    for name, array in updates[0].items():
        np.testing.assert_allclose(updates[1][name], array, rtol=1e-4, atol=1e-6, err_msg=name)
