"""The update as a worker writes it when it is asked to encode it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.task.deadline import Deadline
from atoll.tensors import safetensors_file
from atoll.training.worker.operations import Operations

TASK = """
import torch
from torch import nn
from atoll import Local, Task

def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

def load(site, split):
    torch.manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))

task = Task(model=make_model, data=load, sites=["here"], loss=nn.functional.cross_entropy,
            metrics={}, local=Local(epochs=1, batch_size=8, lr=0.1))
"""
ENCODED = {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight"}
"""The encoded tensors; not 3.bias with topk:0.6, where 2 elements take the same bytes."""


@pytest.fixture
def worker(tmp_path: Path) -> Operations:
    (tmp_path / "task.py").write_text(TASK)
    operations = Operations()
    assert do(operations, "load", task=f"{tmp_path / 'task.py'}:task", site="here", threads=1) == {}
    do(operations, "initial", seed=3, out=str(tmp_path / "model"))
    return operations


def do(operations: Operations, op: str, **request: Any) -> dict[str, Any]:
    return operations.answer({"op": op, **request}, Deadline.never())


def train(worker: Operations, folder: Path, out: str, **request: Any) -> dict[str, tuple[Any, ...]]:
    request = {"seed": 7, "model": str(folder / "model"), "out": str(folder / out)} | request
    answer = do(worker, "train", **request)
    assert "error" not in answer, answer
    return {piece[0]: piece for piece in answer["pieces"]}


def test_weights_are_encoded_and_running_statistics_and_counters_are_not(worker: Operations, tmp_path: Path) -> None:
    plain = train(worker, tmp_path, "plain")
    pieces = train(worker, tmp_path, "encoded", codec="topk:0.6")
    assert {name for name, piece in pieces.items() if len(piece) > 5} == ENCODED
    assert {piece[5] for piece in pieces.values() if len(piece) > 5} == {"topk:0.6"}
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert pieces[name] == plain[name]


def test_same_seed_gives_the_same_bytes_and_the_training_is_that_of_a_plain_one(
    worker: Operations, tmp_path: Path
) -> None:
    first, again = (train(worker, tmp_path, "encoded", codec="qsgd8") for _ in range(2))
    other = train(worker, tmp_path, "encoded", codec="qsgd8", seed=8)
    assert first == again != other
    train(worker, tmp_path, "plain")
    halves = train(worker, tmp_path, "encoded", codec="fp16")
    update, encoded = safetensors_file.read(tmp_path / "plain"), safetensors_file.read(tmp_path / "encoded")
    for name in halves.keys() & ENCODED:
        assert encoded[name].tobytes() == update[name].astype(np.float16).tobytes()


def test_biased_codec_leaves_a_residual_that_the_next_update_carries(worker: Operations, tmp_path: Path) -> None:
    train(worker, tmp_path, "plain")
    train(worker, tmp_path, "e", codec="sign", residual=str(tmp_path / "r1"))
    train(worker, tmp_path, "e", codec="sign", owed=[str(tmp_path / "r1")], residual=str(tmp_path / "r2"))
    update, left = safetensors_file.read(tmp_path / "plain"), safetensors_file.read(tmp_path / "r1")
    scale = np.abs(update["0.weight"]).mean(dtype=np.float64)
    signs = np.where(update["0.weight"] < 0, -scale, scale)
    np.testing.assert_allclose(left["0.weight"], update["0.weight"] - signs, atol=1e-6)
    owed = update["0.weight"] + left["0.weight"]
    after = owed - np.where(owed < 0, -1, 1) * np.abs(owed).mean(dtype=np.float64)
    np.testing.assert_allclose(safetensors_file.read(tmp_path / "r2")["0.weight"], after, atol=1e-6)


@pytest.mark.parametrize("codec", ["bf16", "fp16", "qsgd8"])
def test_unbiased_codec_leaves_none(worker: Operations, tmp_path: Path, codec: str) -> None:
    train(worker, tmp_path, "e", codec=codec, residual=str(tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_update_beyond_the_codec_s_range_is_told_by_name(worker: Operations, tmp_path: Path) -> None:
    request = {"seed": 7, "model": str(tmp_path / "model"), "out": str(tmp_path / "u"), "codec": "fp16"}
    answer = do(worker, "train", local={"lr": 1e6, "max_steps": 1}, **request)
    assert answer["error"] == "not_finite"
    assert answer["detail"].startswith("the update cannot be encoded: tensor '")
    assert "are not within 65519" in answer["detail"]
