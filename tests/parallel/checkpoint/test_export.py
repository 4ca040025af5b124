import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from atoll.parallel.checkpoint.checkpointer import Checkpointer
from atoll.parallel.checkpoint.errors import CheckpointBroken, CheckpointFailed, CheckpointMismatch
from atoll.parallel.checkpoint.export import export_checkpoint, export_model, import_model
from atoll.tensors.safetensors_file import read, read_buffers
from atoll.training.model.parameters import buffers_of, parameters_of
from tests.parallel.checkpoint.runs import TIED, TIED_NAMES, Tiny, build, everything, save_after, step
from tests.parallel.ranks import call_on_ranks

LAYOUTS = [("plain", 1, True), ("fsdp", 2, False), ("tp", 2, False), ("stages", 4, True)]
"""The numbers of ranks, each with and without a tied weight."""


def trained(is_tied: bool) -> Tiny:
    """Return the model that one process trains with the same gradients."""
    parts, optimizers = build("plain", is_tied)
    for number in range(2):
        step(parts, optimizers, number, is_tied)
    (model,) = parts
    assert isinstance(model, Tiny)
    return model


def export_after(folder: Path, out: Path, layout: str, is_tied: bool) -> None:
    """Train, save, and export both what was saved and what runs."""
    parts, optimizers = build(layout, is_tied)
    tied = TIED_NAMES if is_tied else []
    for number in range(2):
        step(parts, optimizers, number, is_tied)
    with Checkpointer(folder, tied=tied) as checkpointer:
        checkpointer.save(parts, optimizers, {}, 2)
    export_model(parts, out, tied)


@pytest.mark.parametrize(("layout", "num_ranks", "is_tied"), LAYOUTS)
def test_an_export_is_what_one_process_would_have_trained(
    tmp_path: Path, layout: str, num_ranks: int, is_tied: bool
) -> None:
    call_on_ranks(export_after, num_ranks, tmp_path, tmp_path / "live", layout, is_tied)
    export_checkpoint(tmp_path / "step-00000002", tmp_path / "saved")
    assert (tmp_path / "live").read_bytes() == (tmp_path / "saved").read_bytes()
    model = trained(is_tied)
    expected, found = parameters_of(model), read(tmp_path / "saved")
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert read_buffers(tmp_path / "saved") == frozenset(buffers_of(model))


def import_into(file: Path, layout: str, is_tied: bool) -> Any:
    parts, optimizers = build(layout, is_tied)
    step(parts, optimizers, 5, is_tied)
    import_model(parts, file, TIED_NAMES if is_tied else ())
    return everything(parts, [torch.optim.SGD(part.parameters()) for part in parts])


@pytest.mark.parametrize(("layout", "num_ranks", "is_tied"), LAYOUTS)
def test_an_export_can_be_put_into_any_layout(tmp_path: Path, layout: str, num_ranks: int, is_tied: bool) -> None:
    model = trained(is_tied)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (is_tied and name in TIED)}
    save_file(tensors, tmp_path / "model")
    found: dict[str, Any] = {}
    for of_rank in call_on_ranks(import_into, num_ranks, tmp_path / "model", layout, is_tied):
        found |= of_rank
    assert found.keys() == model.state_dict().keys()
    assert all(np.array_equal(found[name], tensor.numpy()) for name, tensor in model.state_dict().items())


def test_half_precision_is_exported_as_float32_and_rounded_back(tmp_path: Path) -> None:
    model = Tiny().to(torch.bfloat16)
    export_model([model], tmp_path / "model")
    found = load_file(tmp_path / "model")
    assert found["up.weight"].dtype == torch.float32
    assert torch.equal(found["up.weight"], model.up.weight.detach().float())
    with torch.no_grad():
        model.up.weight.zero_()
    import_model([model], tmp_path / "model")
    assert torch.equal(model.up.weight.detach().float(), found["up.weight"])


def test_what_may_not_travel_is_named(tmp_path: Path) -> None:
    model = Tiny()
    model.register_buffer("phase", torch.zeros(8, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"phase is complex64 \(8,\).*allowed: float32, float16"):
        export_model([model], tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def import_other(folder: Path) -> str:
    """Rank 1 has another model than the file, which rank 0 has."""
    model = Tiny()
    if dist.get_rank() == 1:
        model.down = torch.nn.Linear(16, 9)
        del model.head
        model.foot = torch.nn.Linear(1, 1)
    with pytest.raises(CheckpointMismatch) as caught:
        import_model([model], folder / "model")
    return str(caught.value)


def test_a_file_of_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    save_file({**Tiny().state_dict(), "more": torch.zeros(1)}, tmp_path / "model")
    first, second = call_on_ranks(import_other, 2, tmp_path)
    assert first == second
    for difference in (
        "down.weight is F32 (8, 16) in the file, here F32 (9, 16)",
        "foot.bias is missing in the file",
        "more is unknown here",
    ):
        assert difference in first


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointBroken, match="model cannot be read"):
        import_model([Tiny()], tmp_path / "model")


def export_to_nowhere(folder: Path) -> str:
    parts, _ = build("fsdp")
    with pytest.raises(CheckpointFailed) as caught:
        export_model(parts, folder / "missing" / "model")
    return str(caught.value)


def test_where_no_file_can_be_written_every_rank_says_so(tmp_path: Path) -> None:
    for message in call_on_ranks(export_to_nowhere, 2, tmp_path):
        assert "missing/model: [Errno 2] No such file or directory" in message


def test_a_checkpoint_says_of_itself_what_an_operator_may_ask(tmp_path: Path) -> None:
    call_on_ranks(save_after, 2, tmp_path, "fsdp", 2)
    about = json.loads((tmp_path / "step-00000002" / "atoll.json").read_text("utf-8"))
    model = about.pop("model")
    assert len(bytes.fromhex(model)) == 32
    assert about == {
        "format": 2,
        "step": 2,
        "mesh": {},
        "world": 2,
        "torch": torch.__version__,
        "tied": {},
        "buffers": ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"],
        "extra": {"examples": 6},
    }
