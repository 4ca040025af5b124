"""A checkpoint whose files are no longer what was written: refused by name, before anything is loaded."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from atoll.ground.file_digest import SUMS, read_sums
from atoll.parallel.checkpoint.checkpointer import Checkpointer
from atoll.parallel.checkpoint.errors import CheckpointBroken
from atoll.parallel.checkpoint.export import export_checkpoint
from atoll.parallel.checkpoint.store import damage
from tests.parallel.checkpoint.runs import build, everything, load_and_step, save_after, step
from tests.parallel.ranks import call_on_ranks

FILES = [".metadata", "__0_0.distcp", "atoll.json", SUMS]


def two_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Save after one and after two steps of the smallest model; return their folders."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(folder) as checkpointer:
        for number in (1, 2):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            checkpointer.save([model], [optimizer], {}, number)
    return folder / "step-00000001", folder / "step-00000002"


def refusal(folder: Path) -> str:
    """Load the latest checkpoint, which is refused; the message. The model stays as it was."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.item()
    with Checkpointer(folder) as checkpointer:
        path = checkpointer.latest()
        assert path is not None
        with pytest.raises(CheckpointBroken) as caught:
            checkpointer.load([model], [optimizer], path)
    assert model.weight.item() == before
    return str(caught.value)


def test_every_flipped_byte_of_every_file_is_found_and_its_file_is_named(tmp_path: Path) -> None:
    """One bit of each byte; of the list of digests, the file that the flipped line is about may be named."""
    _, path = two_checkpoints(tmp_path)
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES) == sorted([*read_sums(path), SUMS])
    for name in FILES:
        whole = (path / name).read_bytes()
        with (path / name).open("r+b", buffering=0) as file:
            for place, byte in enumerate(whole):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << place % 8]), place)
                (fault,) = damage(path)
                assert str(path / name) in fault or (name == SUMS and SUMS in fault), (name, place, fault)
                os.pwrite(file.fileno(), bytes([byte]), place)
    assert damage(path) == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_place_is_refused_and_the_newest_sound_one_is_offered(tmp_path: Path, name: str) -> None:
    older, path = two_checkpoints(tmp_path)
    whole = (path / name).read_bytes()
    for place in range(0, len(whole), len(whole) // 10 + 1):
        (path / name).write_bytes(whole[:place])
        message = refusal(tmp_path)
        assert str(path) in message
        assert name in message
        assert f"the newest sound checkpoint is {older}: move step-00000002 out of {tmp_path}" in message
    path.rename(tmp_path.with_name(f"{tmp_path.name}.away"))
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.latest() == older
        checkpointer.check(older)


def swap(older: Path, path: Path) -> None:
    shutil.copy(older / "__0_0.distcp", path)


def rename(older: Path, path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(older, path)


def lose(older: Path, path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def leave_out(older: Path, path: Path) -> None:
    lines = (path / SUMS).read_text("utf-8").splitlines(keepends=True)
    (path / SUMS).write_text("".join(line for line in lines if "metadata" not in line), "utf-8")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (swap, "step-00000002/__0_0.distcp is damaged: its SHA-256 is not the one in SHA256SUMS"),
        (rename, "step-00000002 has the files of another checkpoint, of step 1"),
        (lose, "__0_0.distcp, which SHA256SUMS lists, cannot be read: No such file or directory"),
        (leave_out, "SHA256SUMS is damaged: it does not list .metadata"),
    ],
)
def test_files_of_another_checkpoint_or_none_are_refused(
    harm: Callable[[Path, Path], None], sentence: str, tmp_path: Path
) -> None:
    older, path = two_checkpoints(tmp_path)
    harm(older, path)
    assert sentence in refusal(tmp_path)


def test_a_file_that_belongs_to_no_checkpoint_is_not_read(tmp_path: Path) -> None:
    _, path = two_checkpoints(tmp_path)
    (path / ".nfs0001").write_text("of the storage", "utf-8")
    assert damage(path) == []
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=path, check=True, capture_output=True)


def test_the_way_out_names_all_damaged_ones_in_front_of_the_sound_one(tmp_path: Path) -> None:
    older, path = two_checkpoints(tmp_path)
    shutil.copytree(path, third := tmp_path / "step-00000003")
    (tmp_path / "latest").write_text(third.name, "utf-8")
    (path / ".metadata").write_bytes(b"")
    expected = f"the newest sound checkpoint is {older}: move step-00000003 and step-00000002 out of {tmp_path}"
    assert expected in refusal(tmp_path)
    (older / ".metadata").write_bytes(b"")
    assert f"there is no sound checkpoint in {tmp_path}: move it away" in refusal(tmp_path)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    _, path = two_checkpoints(tmp_path)
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1])
    with pytest.raises(CheckpointBroken, match=r"__0_0\.distcp is damaged"):
        export_checkpoint(path, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def save_two(folder: Path) -> None:
    parts, optimizers = build("fsdp")
    with Checkpointer(folder) as checkpointer:
        for number in (1, 2):
            step(parts, optimizers, number)
            checkpointer.save(parts, optimizers, {}, number)


def load_damaged(folder: Path) -> tuple[str, bool]:
    parts, optimizers = build("fsdp")
    before = everything(parts, optimizers)
    with Checkpointer(folder) as checkpointer, pytest.raises(CheckpointBroken) as caught:
        checkpointer.load(parts, optimizers, folder / "step-00000002")
    after = everything(parts, optimizers)
    return str(caught.value), all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.real
def test_damage_in_the_file_of_any_rank_is_known_to_all_ranks(tmp_path: Path) -> None:
    call_on_ranks(save_two, 2, tmp_path)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        path = tmp_path / "step-00000002" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 16]))
        messages = call_on_ranks(load_damaged, 2, tmp_path)
        assert messages[0] == messages[1]
        assert f"{path} is damaged" in messages[0][0]
        assert f"the newest sound checkpoint is {tmp_path}/step-00000001" in messages[0][0]
        assert messages[0][1]
        path.write_bytes(whole)


@pytest.mark.real
def test_digests_of_a_save_beside_the_training_are_those_of_the_files(tmp_path: Path) -> None:
    call_on_ranks(save_after, 2, tmp_path, "fsdp", 3, True)
    path = tmp_path / "step-00000003"
    assert set(read_sums(path)) == {".metadata", "__0_0.distcp", "__1_0.distcp", "atoll.json"}
    assert damage(path) == []
    assert damage(path, 0, 3) == damage(path, 2, 3) == []
    call_on_ranks(load_and_step, 1, tmp_path, "plain", 3)
