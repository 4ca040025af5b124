import os
import pickle
import random
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from atoll.ground.file_digest import SUMS, read_sums, sha256_of_file, sums_text
from atoll.parallel.checkpoint.checkpointer import Checkpointer
from atoll.parallel.checkpoint.errors import CheckpointBroken, CheckpointFailed, CheckpointMismatch
from atoll.parallel.checkpoint.store import read_about
from atoll.parallel.engine.forked import RankFailed
from tests.parallel.checkpoint.runs import Tiny, build, everything, load_and_step, step
from tests.parallel.forked import run_ranks
from tests.parallel.ranks import call_on_ranks


def save(folder: Path, layout: str, number: int, **options: Any) -> None:
    parts, optimizers = build(layout)
    step(parts, optimizers, number)
    with Checkpointer(folder, asynchronous=False, **options) as checkpointer:
        checkpointer.save(parts, optimizers, {"examples": 3 * number}, number)


# another model, another optimizer


class Other(nn.Module):
    """A `Tiny` with another width of a layer, another type of it, and another name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 16).to(torch.float16)
        self.down = nn.Linear(16, 9)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 11, bias=False)
        self.foot = nn.Linear(8, 3)


def load_other(folder: Path) -> tuple[str, bool]:
    """Rank 0 has the right model, rank 1 another; what each hears, and whether it still has what it had."""
    parts, optimizers = build("plain") if dist.get_rank() == 0 else ([Other()], [])
    optimizers = [torch.optim.AdamW(part.parameters()) for part in parts]
    before = everything(parts, optimizers)
    with Checkpointer(folder) as checkpointer:
        path = checkpointer.latest()
        assert path is not None
        with pytest.raises(CheckpointMismatch) as caught:
            checkpointer.load(parts, optimizers, path)
    after = everything(parts, optimizers)
    return str(caught.value), before.keys() == after.keys() and all(np.array_equal(before[n], after[n]) for n in before)


def test_a_checkpoint_of_another_model_is_refused_on_every_rank_with_all_differences(tmp_path: Path) -> None:
    save(tmp_path, "plain", 1)
    results = call_on_ranks(load_other, 2, tmp_path)
    assert results[0] == results[1]
    message, is_untouched = results[0]
    assert is_untouched
    for difference in (
        "down.weight is float32 (8, 16) in the checkpoint, here float32 (9, 16)",
        "up.bias is float32 (16,) in the checkpoint, here float16 (16,)",
        "foot.weight is missing in the checkpoint",
        "no optimizer trained foot.bias",
    ):
        assert difference in message


def test_what_the_model_has_not_is_named(tmp_path: Path) -> None:
    save(tmp_path, "plain", 1)
    model = Tiny()
    del model.head
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointMismatch) as caught:
        checkpointer.load([model], [], tmp_path / "step-00000001")
    assert str(caught.value).endswith("another model: head.bias is unknown here; head.weight is unknown here")


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "plain", 1)
    model = Tiny()
    optimizer = SGD(model.parameters(), lr=0.1)
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(CheckpointMismatch, match=r"up.bias was trained with AdamW, here with SGD"),
    ):
        checkpointer.load([model], [optimizer], tmp_path / "step-00000001")


def test_groups_that_were_trained_otherwise_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "plain", 1)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointMismatch, match="with other settings"):
        checkpointer.load([model], [optimizer], tmp_path / "step-00000001")


def test_settings_of_the_optimizer_come_back(tmp_path: Path) -> None:
    save(tmp_path, "plain", 1)
    parts, optimizers = build("plain")
    for group in optimizers[0].param_groups:
        group.update(lr=9.0, betas=(0.0, 0.0), weight_decay=9.0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.load(parts, optimizers, tmp_path / "step-00000001")
    found = [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizers[0].param_groups]
    assert found == [(0.1, (0.9, 0.999), 0.01), (0.1, (0.9, 0.999), 0.0)]


# random numbers


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def save_and_draw(folder: Path) -> list[float]:
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    draws()
    save(folder, "ddp", 1)
    return draws()


def load_and_draw(folder: Path, seed: int) -> tuple[bool, list[float]]:
    parts, optimizers = build("ddp")
    with Checkpointer(folder, seed=seed) as checkpointer:
        restored = checkpointer.load(parts, optimizers, folder / "step-00000001")
    return restored.is_same_mesh, draws()


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    before = call_on_ranks(save_and_draw, 2, tmp_path)
    assert before[0] != before[1]
    assert call_on_ranks(load_and_draw, 2, tmp_path, 0) == [(True, numbers) for numbers in before]


def test_other_ranks_get_random_numbers_of_their_own_that_the_seed_decides(tmp_path: Path) -> None:
    before = call_on_ranks(save_and_draw, 2, tmp_path)
    first, again, other = (call_on_ranks(load_and_draw, 3, tmp_path, seed) for seed in (0, 0, 1))
    assert first == again
    assert {is_same for is_same, _ in first} == {False}
    assert len({tuple(numbers) for numbers in [*before, *(n for _, n in first), *(n for _, n in other)]}) == 8


# what can go wrong


def save_until_full(folder: Path, asynchronous: bool) -> tuple[list[str], str]:
    """One checkpoint, then another when the files of rank 1 may not grow; and a third when they may again."""
    parts, optimizers = build("fsdp")
    errors = []
    with Checkpointer(folder, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(parts, optimizers, {}, 1)
        checkpointer.latest()
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        for call in (lambda: checkpointer.save(parts, optimizers, {}, 2), checkpointer.latest):
            try:
                call()
            except CheckpointFailed as error:
                errors.append(str(error))
        path = checkpointer.latest()
        assert path is not None
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpointer.save(parts, optimizers, {}, 3)
    return errors, path.name


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_older_ones_intact_and_is_said_on_every_rank(tmp_path: Path, asynchronous: bool) -> None:
    for errors, latest in call_on_ranks(save_until_full, 2, tmp_path, asynchronous):
        (error,) = errors
        assert "no checkpoint was written: rank 1: " in error
        assert f"the latest is still {tmp_path}/step-00000001" in error
        assert latest == "step-00000001"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000003"]


def test_a_folder_that_cannot_be_made_is_said_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    parts, optimizers = build("plain")
    with Checkpointer(tmp_path / "file" / "run") as checkpointer:
        with pytest.raises(CheckpointFailed, match=r"file/run: .*Not a directory.*; there is none yet"):
            checkpointer.save(parts, optimizers, {}, 1)


def test_what_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    parts, optimizers = build("plain")
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointFailed, match=r"extra: .*set is not JSON serializable"):
            checkpointer.save(parts, optimizers, {"seen": {1}}, 1)
    assert list(tmp_path.iterdir()) == []


def save_and_change(folder: Path) -> None:
    parts, optimizers = build("plain")
    extra: dict[str, Any] = {"loader": {"seen": [1]}}
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(parts, optimizers, extra, 1)
        extra["loader"]["seen"].append(2)


def test_the_trainer_may_change_its_own_state_while_it_is_being_written(tmp_path: Path) -> None:
    call_on_ranks(save_and_change, 1, tmp_path)
    assert read_about(tmp_path / "step-00000001")["extra"] == {"loader": {"seen": [1]}}


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def test_a_table_of_contents_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, "plain", 1)
    path = tmp_path / "step-00000001"
    (path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    digests = {name: sha256_of_file(path / name) for name in read_sums(path)}
    (path / SUMS).write_text(sums_text(digests), "utf-8")
    parts, optimizers = build("plain")
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointBroken, match=r"posix\.system has no place in a table of contents"):
            checkpointer.load(parts, optimizers, tmp_path / "step-00000001")
    assert not (tmp_path / "exploded").exists()


# death in the middle


def die_while_saving(folder: Path, victim: int, number: int, asynchronous: bool) -> int:
    """Save steps 1 and 2; the victim is killed the given time that it touches the second one's folder."""
    count = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if (
            dist.get_rank() == victim
            and event in ("open", "os.rename", "os.mkdir")
            and "step-00000002" in str(args[:2])
        ):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    parts, optimizers = build("fsdp")
    with Checkpointer(folder, asynchronous=asynchronous) as checkpointer:
        for done in (1, 2):
            step(parts, optimizers, done - 1)
            checkpointer.save(parts, optimizers, {"examples": 3 * done}, done)
    return count


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_in_the_middle_leaves_the_one_before(tmp_path: Path, asynchronous: bool) -> None:
    total = run_ranks(die_while_saving, 1, tmp_path / "whole", 0, 0, asynchronous)[0]
    assert total >= 5
    for number in (1, total // 2, total):
        with pytest.raises(RankFailed, match="rank 0: died with exit code -9"):
            run_ranks(die_while_saving, 1, tmp_path / str(number), 0, number, asynchronous)
        path = (tmp_path / str(number) / "latest").read_text("utf-8")
        steps = int(path.removeprefix("step-"))
        call_on_ranks(load_and_step, 1, tmp_path / str(number), "plain", steps)
        assert steps == 1 or number == total


def test_the_death_of_another_rank_leaves_the_one_before_and_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9"):
        run_ranks(die_while_saving, 2, tmp_path, 1, 1, True, timeout_s=20.0)
    call_on_ranks(load_and_step, 1, tmp_path, "plain", 1)
